"""The commands of ``edge-client`` and their options.

They are here and not in the files that read them, because those load torch and ``--help`` must not.
"""

from __future__ import annotations

import argparse

from edge_client.commands.common import (
    CHOOSES,
    Commands,
    add_codec,
    add_config,
    add_credentials,
    add_losses,
    add_observe,
    add_server,
    add_sink,
    count,
    names,
    number,
    rate,
    seconds,
    share,
)
from edge_client.commands.common import count as _count
from edge_client.commands.common import number as _number
from edge_client.commands.common import pixels as _pixels
from edge_client.commands.common import rate as _rate
from edge_client.commands.common import rates as _rates
from edge_client.commands.common import seconds as _seconds
from edge_client.commands.common import share as _share
from edge_client.commands.common import some_seconds as _some_seconds
from shared_hooks.command_line import Parser, add_common

# The options of the commands that measure and compare: plan, profile, sweep, compare, prune, calibrate and bench.


def add_plan(commands: Commands, model: Parser) -> None:
    plan = commands.add_parser("plan", parents=[model], help="predict every cut, and which is best")
    add_server(plan, "without one, as with own")
    add_credentials(plan)
    plan.add_argument(
        "--input", action="extend", nargs="+", metavar="FILE", help="count its preparation; it may cross as it is"
    )
    plan.add_argument("--edge-profile", metavar="FILE", help="made by edge-client profile (default: measured now)")
    plan.add_argument("--cloud-profile", metavar="FILE", help="made by edge-client profile (default: measured now)")
    plan.add_argument(
        "--edge-speed",
        type=float,
        default=1.0,
        metavar="X",
        help="plan for a device with X times the speed of the one measured, such as 0.2 (default: 1)",
    )
    plan.add_argument("--uplink", metavar="RATE", help="such as 5mbit: do not probe the link; needs --rtt")
    plan.add_argument("--downlink", metavar="RATE", help="(default: same as --uplink)")
    plan.add_argument("--rtt", metavar="TIME", help="such as 30ms")
    plan.add_argument("--objective", default="latency", metavar="NAME|NAME=WEIGHT,...", help="(default: latency)")
    plan.add_argument("--max-edge-memory", metavar="SIZE", help="such as 64MiB: limit on the edge, weights included")
    plan.add_argument("--max-bytes-per-second", metavar="SIZE", help="such as 500kB: limit for both ways, at --rate")
    plan.add_argument("--rate", type=_rate, metavar="N", help="requests per second")
    plan.add_argument("--min-accuracy", type=float, metavar="X", help="agreement with the whole model, 0 to 1")
    plan.add_argument("--max-leakage", type=float, metavar="X", help="of what crosses, 0 to 1; needs --leakage")
    plan.add_argument("--leakage", metavar="FILE", help="leakage.json of edge-client leakage")
    _add_power(plan)
    plan.add_argument(
        "--correct",
        action=argparse.BooleanOptionalAction,
        help="correct the plan by a few real requests (default: where link and edge are measured)",
    )
    plan.add_argument("--repetitions", type=_count, default=10, metavar="N", help="for each profile (default: 10)")
    plan.add_argument("--seconds", type=_seconds, default=20.0, metavar="S", help="for each profile (default: 20)")
    add_codec(plan, auto=CHOOSES)
    add_losses(plan)
    _add_engine(plan, "of heads: torch, onnxruntime, compile, aotinductor")
    _add_generation(plan)
    plan.add_argument("--explain", action="store_true", help="why the best wins, and what would change that")
    plan.add_argument(
        "--report",
        metavar="FILE.html",
        help="also a page: the graph and its cut; of --generate, tokens against the cut",
    )
    plan.add_argument("--top", type=_count, metavar="N", help="show only the N best, the best first")
    plan.add_argument("--partitioner", default="objective", metavar="NAME", help="what decides (default: objective)")
    plan.add_argument("--partitioner-option", metavar="TEXT", help="passed to the partitioner")
    plan.add_argument("--list-partitioners", action="store_true", help="list them and exit")


def _add_heads(command: argparse._ActionsContainer) -> None:
    command.add_argument("--heads", metavar="DIR", help="of edge-client export: run an ONNX head, without PyTorch")
    command.add_argument("--provider", default="cpu", metavar="NAME", help="onnxruntime's, for --heads (default: cpu)")


def _add_engine(command: argparse._ActionsContainer, text: str) -> None:
    command.add_argument("--engine", default="torch", metavar="NAME,NAME", help=f"{text} (default: torch)")


def _add_power(command: argparse._ActionsContainer) -> None:
    command.add_argument("--power-active", type=float, metavar="W", help="of this machine at work, with --power-idle")
    command.add_argument("--power-idle", type=float, metavar="W", help="of this machine waiting")


def _add_generation(plan: argparse.ArgumentParser) -> None:
    own = plan.add_argument_group("of a language model, called token by token")
    own.add_argument(
        "--generate",
        nargs="?",
        const="token",
        choices=("token", "first-token", "reply"),
        help="plan a split generation, and what is to be best in it (alone: a token)",
    )
    own.add_argument("--prompt-tokens", type=_count, default=128, metavar="N", help="(default: 128)")
    own.add_argument("--new-tokens", type=_count, default=128, metavar="N", help="(default: 128)")
    own.add_argument(
        "--draft", type=_count, metavar="K", help="tokens guessed before each round trip; needs --acceptance"
    )
    own.add_argument("--acceptance", type=float, metavar="X", help="the share of them that is right, 0 to 1")
    own.add_argument("--top-logits", type=_count, metavar="K", help="only the K likeliest come back (default: all)")
    own.add_argument("--measured", metavar="FILE", help="the JSON of an earlier plan --generate, to measure nothing")


def add_profile(commands: Commands, parents: list[Parser]) -> None:
    profile = commands.add_parser("profile", parents=parents, help="measure layers and cuts, on both sides")
    add_server(profile, "also measure the server's side")
    add_credentials(profile)
    profile.add_argument("--side", choices=("edge", "cloud", "both"), help="(default: both with --server, else edge)")
    profile.add_argument("--warmup", type=_count, default=3, metavar="N", help="forwards before it (default: 3)")
    profile.add_argument("--repetitions", type=_count, default=20, metavar="N", help="at most N (default: 20)")
    profile.add_argument("--seconds", type=_seconds, default=20.0, metavar="S", help="for each side (default: 20)")
    add_codec(profile, auto="measures each")
    profile.add_argument("--calibration", metavar="FILE", help="of edge-client calibrate: its books for basis")


def add_sweep(commands: Commands, model: Parser) -> None:
    sweep = commands.add_parser("sweep", parents=[model], help="run inputs through every cut: tables and a report")
    sweep.add_argument("--output", required=True, metavar="DIR", help="folder for the results; run again to resume")
    add_server(sweep, "without one, as with own")
    add_credentials(sweep)
    sweep.add_argument(
        "--input",
        action="extend",
        nargs="+",
        metavar="PATH",
        help="an image, .npy, .safetensors, a folder or a glob; or several, each once (default: the model's own)",
    )
    cuts = sweep.add_mutually_exclusive_group()
    cuts.add_argument(
        "--cuts", metavar="NAME,NAME", help="these (default: block ends, and layers where other bytes cross)"
    )
    cuts.add_argument("--every", type=_count, metavar="N", help="every n-th allowed cut; 1 for all")
    sweep.add_argument("--repetitions", type=_count, default=3, metavar="N", help="for every request (default: 3)")
    sweep.add_argument(
        "--layer-repetitions",
        type=_count,
        default=1,
        metavar="N",
        help="in N of them each way runs once more, with its layers measured (default: 1)",
    )
    sweep.add_argument(
        "--warmup", type=_count, default=1, metavar="N", help="requests before, not counted (default: 1)"
    )
    sweep.add_argument("--no-local", dest="local", action="store_false", help="do not run the cuts in this process")
    sweep.add_argument("--no-predict", dest="predict", action="store_false", help="no profiles and no plan first")
    sweep.add_argument("--profile-repetitions", type=_count, default=10, metavar="N", help="for the plan (default: 10)")
    sweep.add_argument(
        "--profile-seconds", type=_seconds, default=20.0, metavar="S", help="for each side (default: 20)"
    )
    sweep.add_argument("--correct", action="store_true", help="same as plan: correct the plan by a few real requests")
    sweep.add_argument("--objective", default="latency", metavar="NAME|NAME=WEIGHT,...", help="(default: latency)")
    add_codec(sweep)
    sweep.add_argument("--seconds", type=_seconds, metavar="S", help="stop measuring after this long; resumable")
    sweep.add_argument("--deadline", type=_seconds, default=60.0, metavar="S", help="for each request (default: 60)")
    sweep.add_argument("--patience", type=_seconds, default=15.0, metavar="S", help="wait for a server (default: 15)")
    _add_engine(sweep, "of heads: torch, onnxruntime")
    sweep.add_argument("--leakage", metavar="FILE", help="of edge-client leakage: drawn against latency in the report")
    sweep.add_argument("--fresh", action="store_true", help="start over in a folder that holds a sweep")
    add_observe(sweep, text="one more request for each input, observed on both sides")
    compare = commands.add_parser("compare", help="compare two sweeps, or two benches, taking noise into account")
    compare.add_argument("a", metavar="A", help="a folder made by edge-client sweep, or a file of bench --json")
    compare.add_argument("b", metavar="B", help="another one")
    compare.add_argument("--json", metavar="FILE|-", help='write results as JSON; "-" for standard output')
    compare.add_argument(
        "--report", metavar="FILE", help="of sweeps: write a page, as HTML: ratios with intervals, both times"
    )
    compare.add_argument("--stages", action="store_true", help="of sweeps: every stage of every way, not only the sum")
    compare.add_argument("--debug", action="store_true", help="show tracebacks")


def add_prune(commands: Commands, model: Parser) -> None:
    prune = commands.add_parser("prune", parents=[model], help="which channels of a layer are worth sending")
    prune.add_argument("--input", required=True, metavar="FOLDER", help="test data: input files, or a folder per class")
    prune.add_argument("--choose-by", metavar="FOLDER", help="to choose by (default: every other file of --input)")
    prune.add_argument("--split", required=True, metavar="LAYER_ID|NAME", help="the layer whose channels are scored")
    prune.add_argument("--keep", "--keeps", metavar="N,N", help="channels kept (default: a quarter, half, 3 quarters)")
    prune.add_argument("--scores", metavar="NAME,NAME", help="scorings to try (default: all)")
    prune.add_argument("--seeds", type=_count, default=5, metavar="N", help="for the random control (default: 5)")
    prune.add_argument("--boxes", metavar="FILE", help="JSON: score only inside the calibration files' objects")
    prune.add_argument("--predictions", metavar="FILE", help="JSON: score only in predictions that match --boxes")
    prune.add_argument("--structural", action="store_true", help="also cut the channels out of the model")
    prune.add_argument("--output", metavar="DIR", help="masks, smaller models and report.html go here")
    prune.add_argument("--batch", type=_count, default=16, metavar="N", help="inputs in one forward (default: 16)")
    prune.add_argument("--requests", type=_count, default=20, metavar="N", help="through a server (default: 20)")
    prune.add_argument("--no-serve", dest="serve", action="store_false", help="do not measure bytes and times")


def add_leakage(commands: Commands, model: Parser) -> None:
    leakage = commands.add_parser("leakage", parents=[model], help="what an attacker reads from what crosses")
    leakage.add_argument("--input", required=True, metavar="FOLDER", help="input files, or a glob: attacked, in part")
    leakage.add_argument("--splits", default="all", metavar="CUT,CUT|all", help='cuts, "input" too (default: all)')
    leakage.add_argument("--every", type=_count, metavar="N", help="with all: every n-th cut")
    leakage.add_argument("--codecs", "--codec", default="raw", metavar="NAME,NAME", help="as they leave what crosses")
    leakage.add_argument("--public", metavar="FOLDER", help="other inputs, which the attacker learns from")
    leakage.add_argument("--labels", metavar="FILE.csv", help="a file's name and what is to stay private of it")
    leakage.add_argument("--decoder", default="small", choices=("small", "large"), help="(default: small)")
    leakage.add_argument("--seeds", type=_count, default=3, metavar="N", help="repetitions (default: 3)")
    leakage.add_argument("--steps", type=_count, metavar="N", help="of an attacker's training (default: 500)")
    leakage.add_argument("--output", metavar="DIR", help="leakage.json, report.html; the same command continues")
    leakage.add_argument("--fresh", action="store_true", help="attack all of it again")


OUTPUT_KINDS = ("classes", "embedding", "boxes", "tensors")


def add_calibrate(commands: Commands, model: Parser) -> None:
    study = commands.add_parser("calibrate", parents=[model], help="what every codec costs in answers, at every cut")
    study.add_argument("--input", required=True, metavar="FOLDER", help="input files, or a folder per class; or a glob")
    study.add_argument("--labels", metavar="FILE.csv", help="rows of a file's name and its label")
    study.add_argument("--max-loss", default="1%", metavar="SHARE", help="to be allowed, such as 0.5%% (default: 1%%)")
    study.add_argument("--codecs", metavar="NAME,NAME", help="these codecs (default: all)")
    cuts = study.add_mutually_exclusive_group()
    cuts.add_argument("--cuts", metavar="NAME,NAME", help='these cuts, "input" among them (default: all allowed)')
    cuts.add_argument("--every", type=_count, metavar="N", help="every n-th allowed cut")
    study.add_argument(
        "--kind",
        choices=OUTPUT_KINDS,
        help="of the output (default: by the spec, names and shapes)",
    )
    study.add_argument("--seconds", type=_seconds, metavar="S", help="begin no input after this long")
    study.add_argument(
        "--learn", type=int, metavar="N", help='of the inputs, for "basis" to learn from (default: a quarter)'
    )
    study.add_argument(
        "--output", metavar="DIR", help="calibration.json and report.html, as they grow; the same command continues"
    )
    study.add_argument("--fresh", action="store_true", help="measure all of it again")


def add_learn(commands: Commands, model: Parser) -> None:
    learn = commands.add_parser("learn", parents=[model], help="train a codec for one cut, on inputs without labels")
    learn.add_argument("--split", required=True, metavar="CUT", help="the layer or block it is for")
    learn.add_argument("--input", required=True, metavar="FOLDER", help="input files, or a folder per class; or a glob")
    learn.add_argument("--output", required=True, metavar="DIR", help="codec.safetensors; the same command continues")
    goal = learn.add_mutually_exclusive_group()
    goal.add_argument("--rate", metavar="BYTES", help="least loss, payload of at most BYTES on average")
    goal.add_argument("--max-loss", metavar="SHARE", help="the fewest bytes within this loss (default: 0.5%%)")
    learn.add_argument("--choose-by", metavar="FOLDER", help="other inputs, to choose among encoders by")
    learn.add_argument("--labels", metavar="FILE.csv", help="rows of a file's name and its label, for the table alone")
    learn.add_argument("--kind", choices=OUTPUT_KINDS, help="of the output (default: by the spec, names and shapes)")
    learn.add_argument("--epochs", type=_count, metavar="N", help="for each encoder (default: by the inputs)")
    learn.add_argument("--seconds", type=_seconds, metavar="S", help="end training after this long")
    learn.add_argument("--seed", type=int, default=0, metavar="N", help="of the split and the training (default: 0)")
    learn.add_argument("--fresh", action="store_true", help="train all of it again")


def add_export(commands: Commands, model: Parser) -> None:
    export = commands.add_parser("export", parents=[model], help="heads as ONNX files, for devices without PyTorch")
    export.add_argument("--split", required=True, type=names, metavar="CUT,CUT|all", help="the cuts at which heads end")
    export.add_argument("--output", required=True, metavar="DIR", help="folder for the heads and their manifest")
    export.add_argument(
        "--input", action="extend", nargs="+", metavar="PATH", help="compare answers on these (default: the example)"
    )
    export.add_argument("--check", action="store_true", help="compare once more, by the files as a device reads them")
    export.add_argument("--whole", action="store_true", help="the whole model, too, for when the server is gone")
    export.add_argument(
        "--vary",
        default="both",
        metavar="WHAT",
        help="what a head takes any of: batch, length, both, fixed (default: both)",
    )


def add_bench(commands: Commands, model: Parser) -> None:
    bench = commands.add_parser("bench", parents=[model], help="an open load on a server: latency and goodput by rate")
    add_server(bench)
    add_credentials(bench)
    bench.add_argument(
        "--rate", type=_rates, metavar="N,N", help="requests a second of all clients, one or several (default: 10)"
    )
    bench.add_argument(
        "--arrivals", default="poisson", metavar="poisson|constant|FILE", help="(default: poisson); FILE: a time a line"
    )
    bench.add_argument("--seconds", type=_seconds, metavar="S", help="of each rate (default: 10, or all of FILE)")
    bench.add_argument(
        "--warmup", type=_some_seconds, default=2.0, metavar="S", help="of each rate, before, not counted (default: 2)"
    )
    bench.add_argument("--clients", type=_count, default=4, metavar="N", help="each with a stream (default: 4)")
    bench.add_argument(
        "--split",
        default="input",
        metavar="CUT=WEIGHT,...",
        help="cuts, by weight: stage2=0.7,stage3=0.3 (default: input)",
    )
    bench.add_argument(
        "--codec", default="raw", metavar="CODEC=WEIGHT,...", help="a client has one; shares of clients (default: raw)"
    )
    bench.add_argument(
        "--input", action="extend", nargs="+", metavar="PATH", help="drawn from these (default: the model's own)"
    )
    bench.add_argument(
        "--deadline", type=_seconds, default=1.0, metavar="S", help="within which an answer is goodput (default: 1)"
    )
    bench.add_argument("--give-up", type=_seconds, default=10.0, metavar="S", help="on a request (default: 10)")
    bench.add_argument("--patience", type=_seconds, default=5.0, metavar="S", help="wait for a server (default: 5)")
    bench.add_argument("--in-flight", type=_count, default=4, metavar="N", help="of each client (default: 4)")
    bench.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="--no-exact: the server may compute requests of several clients in batches",
    )
    bench.add_argument(
        "--recorded", action="store_true", help="run the heads once, and send their frontiers again and again"
    )
    bench.add_argument("--processes", type=_count, default=1, metavar="N", help="that send (default: 1)")
    bench.add_argument("--seed", type=_number, default=0, metavar="N", help="of what is drawn (default: 0)")
    bench.add_argument("--html", metavar="FILE", help="also write a page")
    _add_heads(bench)


# The options of the commands that send inputs: run, watch and dashboard.

PORT = "8050"
"""The dashboard's, where none is given."""


def add_run(commands: Commands, model: Parser) -> None:
    run = commands.add_parser("run", parents=[model], help="send inputs through a cut")
    watch = commands.add_parser("watch", parents=[model], help="send inputs, and show live what observers see")
    for command in (run, watch):
        add_config(command)
        add_credentials(command)
        add_observe(command, default=("activation", "debug") if command is watch else ())
    run.add_argument("--heat-maps", metavar="DIR", help="with --observe attention: pictures of it, as PNG files")
    add_server(watch)
    watch.add_argument("--split", required=True, metavar="LAYER_ID|NAME|input|...", help="same as run, without auto")
    watch.add_argument("--input", action="extend", nargs="+", required=True, metavar="PATH", help="same as run")
    watch.add_argument("--repeat", type=_count, default=1, metavar="N", help="repeat all inputs N times (default: 1)")
    add_server(run)
    run.add_argument(
        "--split",
        required=True,
        metavar="CUT",
        help='the name of a block or layer to cut after, or a layer\'s id; "edge-only" needs no server; "cloud-only" '
        'sends the input, "cloud-only-file" the file as it is; "auto" chooses the cut and moves it as link and load '
        "change; several, with commas, for a chain: --server A,B --split CUT,CUT",
    )
    run.add_argument(
        "--input",
        action="extend",
        nargs="+",
        required=True,
        metavar="PATH",
        help="an image, .npy, .safetensors, a folder, a glob, a video; or several, each as often as given. Or one "
        "camera: a device as /dev/video0, an address as rtsp://...",
    )
    run.add_argument("--frames", type=_count, metavar="N", help="of a video or a camera: end after N frames")
    run.add_argument(
        "--queue", type=_count, metavar="N", help="of a camera: frames that wait; the oldest is dropped (default: 2)"
    )
    run.add_argument("--camera-size", type=_pixels, metavar="WxH", help="asked of a device, such as 640x480")
    run.add_argument("--camera-rate", type=_rate, metavar="N", help="asked of a device: frames a second")
    run.add_argument("--camera-format", metavar="NAME", help="asked of a device: its pixel format, such as mjpeg")
    run.add_argument(
        "--only-head",
        metavar="LAYER_ID|NAME",
        help="load only the weights of heads that end here or before; the others stay in their files",
    )
    run.add_argument("--deadline", type=_seconds, default=60.0, metavar="S", help="for each request (default: 60)")
    run.add_argument("--patience", type=_seconds, default=15.0, metavar="S", help="wait for a server (default: 15)")
    run.add_argument(
        "--in-flight", type=_count, default=1, metavar="N", help="requests under way, for throughput (default: 1)"
    )
    run.add_argument(
        "--warmup", type=_number, default=0, metavar="N", help="requests of the first input before all, not counted"
    )
    run.add_argument(
        "--output",
        metavar="DIR",
        help="keep outputs: JSON, large tensors as safetensors, drawn where the spec says how",
    )
    add_codec(run, auto=CHOOSES)
    add_losses(run)
    run.add_argument(
        "--witness",
        type=_share,
        default=0.0,
        metavar="P",
        help="also compute this share of the split inputs whole on the edge, and compare: 0 to 1 (default: 0)",
    )
    run.add_argument(
        "--journal", metavar="FILE", help="keep what became of each input; the same command continues where it stopped"
    )
    run.add_argument(
        "--fallback",
        choices=("edge",),
        help="answer on the edge what the server does not: gone, other weights, refused",
    )
    run.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="--no-exact: the server may compute inputs in batches with other clients'; last bits then differ",
    )
    _add_heads(run)
    run.add_argument("--layers", action="store_true", help="print each layer's time on both sides")
    run.add_argument(
        "--dashboard",
        nargs="?",
        const=PORT,
        metavar="[HOST:]PORT",
        help=f"serve a page that shows this run, live, as long as it goes (alone: {PORT}, of 127.0.0.1)",
    )
    add_sink(run)
    _add_auto(run)


def add_dashboard(commands: Commands, model: Parser) -> None:
    page = commands.add_parser(
        "dashboard", parents=[model], help="a page in the browser that shows requests, link, cuts and machines, live"
    )
    page.add_argument(
        "--listen",
        default=PORT,
        metavar="[HOST:]PORT",
        help=f"of the page; 0 = any free one (default: {PORT}, of 127.0.0.1)",
    )
    add_server(page)
    add_credentials(page)
    page.add_argument(
        "--input", action="extend", nargs="+", metavar="PATH", help="same as run; without, the server is watched"
    )
    page.add_argument("--split", default="auto", metavar="LAYER_ID|NAME|auto|...", help="same as run (default: auto)")
    page.add_argument(
        "--every", type=_seconds, default=0.2, metavar="S", help="begin a request every S seconds (default: 0.2)"
    )
    page.add_argument("--repeat", type=_count, metavar="N", help="all inputs N times (default: until Ctrl-C)")
    page.add_argument("--deadline", type=_seconds, default=60.0, metavar="S", help="for each request (default: 60)")
    page.add_argument("--patience", type=_seconds, default=15.0, metavar="S", help="wait for a server (default: 15)")
    add_codec(page, auto=CHOOSES)
    add_losses(page)
    add_observe(page)
    add_sink(page)
    add_config(page)
    _add_auto(page)


def _add_auto(run: argparse.ArgumentParser) -> None:
    """The options of ``--split auto``: without effect, and so refused, at any other split."""
    auto = run.add_argument_group("--split auto")
    auto.add_argument("--objective", default="latency", metavar="NAME|NAME=WEIGHT,...", help="(default: latency)")
    auto.add_argument("--max-edge-memory", metavar="SIZE", help="such as 64MiB: limit on the edge, weights included")
    auto.add_argument("--max-bytes-per-second", metavar="SIZE", help="such as 500kB: limit for both ways, at --rate")
    auto.add_argument("--rate", type=_rate, metavar="N", help="requests per second")
    auto.add_argument("--min-accuracy", type=float, metavar="X", help="agreement with the whole model, 0 to 1")
    auto.add_argument("--max-leakage", type=float, metavar="X", help="of what crosses, 0 to 1; needs --leakage")
    auto.add_argument("--leakage", metavar="FILE", help="leakage.json of edge-client leakage")
    _add_power(auto)
    auto.add_argument("--edge-profile", metavar="FILE", help="made by edge-client profile (default: measured now)")
    auto.add_argument("--cloud-profile", metavar="FILE", help="made by edge-client profile (default: measured now)")
    auto.add_argument(
        "--profile-seconds", type=_seconds, default=5.0, metavar="S", help="for each profile (default: 5)"
    )
    auto.add_argument("--partitioner", default="objective", metavar="NAME", help="what decides (default: objective)")
    auto.add_argument("--partitioner-option", metavar="TEXT", help="passed to the partitioner")
    auto.add_argument("--log-decisions", metavar="FILE", help="write every decision and its numbers as lines of JSON")


# The options of ``edge-client generate``, ``chat`` and ``serve``; they load nothing.

CODECS = ("int8", "int6", "int5", "int4")
"""As `shared_hooks.generation.hidden` has them, which loads torch."""


def add_generation(commands: Commands, model: Parser) -> tuple[Parser, ...]:
    """All three commands."""
    generate = commands.add_parser(
        "generate", parents=[model], help="continue a text with a language model, split: its layers here and there"
    )
    generate.add_argument("--prompt", required=True, metavar="TEXT|-", help='"-" for standard input')
    generate.add_argument("--no-stream", action="store_true", help="write the text when all of it is there")
    generate.add_argument(
        "--beams",
        type=count,
        default=1,
        metavar="N",
        help="search with N beams; the text comes at the end (default: 1)",
    )
    chat = commands.add_parser(
        "chat",
        parents=[model],
        help="talk with a language model, split; what was said stays in its state on both sides",
    )
    chat.add_argument("--system", default="", metavar="TEXT", help="before the first turn, such as a role")
    serve = commands.add_parser(
        "serve", parents=[model], help="serve a language model, split, to applications that speak OpenAI's protocol"
    )
    serve.add_argument(
        "--listen", default="8080", metavar="[HOST:]PORT", help="of this machine without HOST; 0: a free one (8080)"
    )
    serve.add_argument("--key-file", metavar="FILE", help="with the key that applications have to bring")
    serve.add_argument(
        "--seats", type=count, default=4, metavar="N", help="texts that are written at once (default: 4)"
    )
    serve.add_argument(
        "--together", action="store_true", help="the server may compute several in one; last bits differ"
    )
    for command in (generate, chat, serve):
        _add_split(command)
    for command in (generate, chat):
        _add_text(command)
    _add_drafts(serve)
    return generate, chat, serve


def _add_split(command: Parser) -> None:
    add_server(command)
    add_credentials(command)
    command.add_argument(
        "--cut",
        "--split",
        dest="cut",
        required=True,
        metavar="NAME|auto",
        help='the module after which the model is cut, such as model.layers.3; "auto" measures for some seconds',
    )
    command.add_argument(
        "--only-head",
        metavar="NAME",
        help="load only the weights up to this module, the cut or a later one; the others stay in their files",
    )
    command.add_argument(
        "--codec",
        choices=CODECS,
        help="send hidden states in fewer bytes; values change a little, and so may the text (default: as they are)",
    )
    command.add_argument("--deadline", type=seconds, default=60.0, metavar="S", help="for each step (default: 60)")
    command.add_argument("--patience", type=seconds, default=15.0, metavar="S", help="wait for a server (default: 15)")


def _add_text(command: Parser) -> None:
    command.add_argument(
        "--max-new-tokens", type=count, default=128, metavar="N", help="write at most so many (default: 128)"
    )
    command.add_argument("--sample", action="store_true", help="draw tokens by chance (default: always the likeliest)")
    command.add_argument("--temperature", type=rate, metavar="X", help="with --sample: below 1 more of the likeliest")
    command.add_argument("--top-k", type=count, metavar="N", help="with --sample: among the N likeliest")
    command.add_argument(
        "--top-p", type=share, metavar="P", help="with --sample: among the likeliest that add up to P, 0 to 1"
    )
    command.add_argument("--seed", type=number, metavar="N", help="with --sample: the same text every time")
    _add_drafts(command)


def _add_drafts(command: Parser) -> None:
    command.add_argument(
        "--lookup",
        type=count,
        metavar="N",
        help="draft up to N tokens from what was read, and have them checked in one round trip",
    )
    command.add_argument(
        "--first-layers",
        metavar="NAME",
        help="draft with the model's own layers up to this block, such as model.layers.3",
    )
    command.add_argument("--assistant", metavar="SPEC", help="draft with this small model, of the same vocabulary")


MOST = "--model --server --input --output --json"
BASIC = {
    name: f"{MOST} {options}".split()
    for name, options in {
        "run": "--split --codec --max-loss --in-flight --layers --dashboard",
        "watch": "--split --observe --codec",
        "dashboard": "--split --listen --every",
        "plan": "--objective --codec --max-loss --correct --explain --seconds",
        "profile": "--side --seconds --codec",
        "sweep": "--cuts --every --repetitions --seconds --codec",
        "prune": "--split --choose-by --keep --structural",
        "calibrate": "--labels --max-loss --codecs --cuts --seconds",
        "learn": "--split --rate --max-loss --seconds",
        "leakage": "--splits --every --codecs --public --labels --seeds",
        "export": "--split --whole --vary",
        "bench": "--split --rate --seconds --in-flight",
        "generate": "--cut --prompt --max-new-tokens --sample --codec",
        "chat": "--cut --system --max-new-tokens --sample --codec",
        "serve": "--cut --listen --key-file --seats --codec",
        "layers": "--explain --example --depth",
        "verify": "--cuts --example --depth --threads",
        "hierarchy": "--split --onnx --head-onnx --tail-onnx --validate",
        "doctor": "",
        "hooks": "--split --stages --config",
    }.items()
}
"""The options that ``--help`` shows, by command; a dozen at most."""

TOPICS = {
    topic: options.split()
    for topic, options in {
        "model": "--model --weights --selection --example --depth --device --threads --only-head --heads --provider",
        "inputs": "--input --labels --prompt --system --repeat --frames --queue "
        "--camera-size --camera-rate --camera-format",
        "where to cut": "--split --cut --cuts --every --side",
        "server": "--server --deadline --patience --fallback --in-flight --warmup",
        "what crosses": "--codec --codec-plugin --codecs --calibration --max-loss --exact --no-exact",
        "what is served here": "--listen --key-file --seats --together",
        "text": "--max-new-tokens --sample --temperature --top-k --top-p --seed --lookup --first-layers --assistant "
        "--beams --no-stream",
        "choosing a cut (plan, --split auto)": "--objective --max-edge-memory --max-bytes-per-second --rate "
        "--min-accuracy --max-leakage --leakage --power-active --power-idle --uplink --downlink --rtt "
        "--edge-profile --edge-speed "
        "--cloud-profile --profile-seconds --profile-repetitions --partitioner --partitioner-option "
        "--list-partitioners --log-decisions --correct",
        "results": "--output --json --journal --layers --dashboard --observe --heat-maps --sink --witness --report",
        "credentials, for a server that asks (docs/access.md); files are PEM": "--tls --ca --cert --key --server-name "
        "--token-file --insecure",
        "this process": "--config --log-level --log-format --no-progress --debug --help",
    }.items()
}


def make_parser() -> Parser:
    """The arguments of every command."""
    parser = Parser(
        prog="edge-client", description="The edge side of Isthmus: run a model up to a cut, the rest on a server."
    )
    add_common(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    model = Parser(add_help=False)
    model.add_argument(
        "--model",
        default="digits",
        metavar="SPEC",
        help='a built-in name, a TOML file, "module:callable", or any of them after "NAME=" (default: digits)',
    )
    model.add_argument(
        "--weights", metavar="FILE", action="append", help="safetensors, .pt or .pth, instead of the spec's own"
    )
    model.add_argument("--selection", metavar="FILE", help="from edge-client prune: a mask at a cut or a smaller model")
    model.add_argument(
        "--example",
        metavar="SIZES|FILE",
        help="the input that both sides plan on, in place of the spec's: 1,3,224,224 or 1,16:int64, a file, "
        "module:callable; the same on both sides",
    )
    model.add_argument("--depth", type=_count, metavar="N", help="how many levels of modules to descend (default: all)")
    model.add_argument("--device", default="auto", metavar="auto|cpu|KIND[:N]", help="cuda, xpu, mps (default: auto)")
    model.add_argument("--threads", type=_count, metavar="N", help="threads within one operation (default: torch's)")
    model.add_argument(
        "--codec-plugin",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="a codec of another package, or the name of its entry point; may be repeated",
    )
    model.add_argument("--json", metavar="FILE|-", help='write results as JSON; "-" for standard output')
    model.add_argument("--no-progress", action="store_true", help="no progress on standard error")
    model.add_argument("--debug", action="store_true", help="show tracebacks")
    planned = Parser(add_help=False)
    planned.add_argument(
        "--input", action="extend", nargs="+", metavar="PATH", help="plan on this input instead of the spec's example"
    )

    layers = commands.add_parser("layers", parents=[model, planned], help="a model's layers and where it can be cut")
    layers.add_argument(
        "--explain",
        metavar="LAYER_ID|NAME|input",
        help="what crosses there and why, and what is skipped; A,B: a cut after a set of calls",
    )
    layers.add_argument("--all", action="store_true", help="with --explain: do not shorten long lists")
    verify = commands.add_parser("verify", parents=[model, planned], help="compare every cut with the whole model")
    add_server(verify, "through this server, over the real link (A,B: a chain); without one in this process")
    verify.add_argument("--cuts", metavar="NAME,NAME", help='these (default: all); "a + b" is a cut along branches')
    add_credentials(verify)
    doctor = commands.add_parser("doctor", parents=[model], help="what stands between this machine and a server")
    doctor.add_argument("server", nargs="?", metavar="HOST:PORT", help="A,B: a chain (default: as --server of run)")
    doctor.add_argument("--server", dest="named", metavar="HOST:PORT", help="the same, as other commands have it")
    _add_heads(doctor)
    add_credentials(doctor)
    add_run(commands, model)
    add_dashboard(commands, model)
    _add_lifecycle(commands, model)
    _add_hierarchy(commands, [model, planned])
    add_sweep(commands, model)
    add_prune(commands, model)
    add_calibrate(commands, model)
    add_learn(commands, model)
    add_leakage(commands, model)
    add_export(commands, model)
    add_bench(commands, model)
    add_plan(commands, model)
    add_profile(commands, [model, planned])
    speaking = add_generation(commands, model)
    for command in speaking:
        add_config(command)
    for name, one in commands.choices.items():
        one.basic, one.topics = BASIC.get(name, ()), TOPICS
    return parser


def _add_lifecycle(commands: Commands, model: Parser) -> None:
    hooks = commands.add_parser("hooks", parents=[model], help="the life cycle's hooks, in order, and their cost")
    add_config(hooks)
    hooks.add_argument("--stages", action="store_true", help="list the stages and exit")
    hooks.add_argument(
        "--input", action="extend", nargs="+", metavar="PATH", help="run these first, and show what hooks cost"
    )
    add_credentials(hooks)
    add_server(hooks)
    hooks.add_argument("--split", metavar="LAYER_ID|NAME|...", help="(default: edge-only, without a server)")


def _add_hierarchy(commands: Commands, parents: list[Parser]) -> None:
    tree = commands.add_parser("hierarchy", parents=parents, help="the module tree, what ran, and ONNX files")
    tree.add_argument("--graphml", metavar="FILE", help="modules, calls and operations as a graph")
    tree.add_argument("--onnx", metavar="FILE", help="export, every node tagged; FILE.json lists the tags")
    tree.add_argument("--validate", action="store_true", help="read the ONNX files again, run them, compare with torch")
    tree.add_argument("--split", metavar="LAYER_ID|NAME", help="a cut, for --head-onnx and --tail-onnx")
    tree.add_argument("--head-onnx", metavar="FILE", help="write the head, up to the cut, to this file")
    tree.add_argument("--tail-onnx", metavar="FILE", help="write the tail, after the cut, to this file")
