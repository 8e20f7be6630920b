"""The options of the commands that measure and compare: plan, profile, sweep, compare, prune, calibrate and bench."""

from __future__ import annotations

import argparse

from edge_client.commands.common import CHOOSES, Commands, add_codec, add_losses, add_observe
from edge_client.commands.credentials import add_credentials
from edge_client.commands.kinds import count as _count
from edge_client.commands.kinds import number as _number
from edge_client.commands.kinds import rate as _rate
from edge_client.commands.kinds import rates as _rates
from edge_client.commands.kinds import seconds as _seconds
from edge_client.commands.kinds import some_seconds as _some_seconds
from edge_client.commands.server import add_server
from shared_hooks.command_line import Parser


def add_plan(commands: Commands, model: Parser) -> None:
    plan = commands.add_parser("plan", parents=[model], help="predict every cut, and which is best")
    add_server(plan, "without one, as with own")
    add_credentials(plan)
    plan.add_argument(
        "--input", action="extend", nargs="+", metavar="FILE", help="count its preparation; it may cross as it is"
    )
    plan.add_argument("--edge-profile", metavar="FILE", help="made by edge-client profile (default: measured now)")
    plan.add_argument("--cloud-profile", metavar="FILE", help="made by edge-client profile (default: measured now)")
    plan.add_argument("--uplink", metavar="RATE", help="such as 5mbit: do not probe the link; needs --rtt")
    plan.add_argument("--downlink", metavar="RATE", help="(default: same as --uplink)")
    plan.add_argument("--rtt", metavar="TIME", help="such as 30ms")
    plan.add_argument("--objective", default="latency", metavar="NAME|NAME=WEIGHT,...", help="(default: latency)")
    plan.add_argument("--max-edge-memory", metavar="SIZE", help="such as 64MiB: limit on the edge, weights included")
    plan.add_argument("--max-bytes-per-second", metavar="SIZE", help="such as 500kB: limit for both ways, at --rate")
    plan.add_argument("--rate", type=_rate, metavar="N", help="requests per second")
    plan.add_argument("--min-accuracy", type=float, metavar="X", help="agreement with the whole model, 0 to 1")
    plan.add_argument("--power-active", type=float, metavar="W", help="of this machine at work, with --power-idle")
    plan.add_argument("--power-idle", type=float, metavar="W", help="of this machine waiting")
    plan.add_argument("--calibrate", action="store_true", help="correct the plan by a few real requests")
    plan.add_argument("--repetitions", type=_count, default=10, metavar="N", help="for each profile (default: 10)")
    plan.add_argument("--seconds", type=_seconds, default=20.0, metavar="S", help="for each profile (default: 20)")
    add_codec(plan, auto=CHOOSES)
    add_losses(plan)
    _add_generation(plan)
    plan.add_argument("--explain", action="store_true", help="why the best wins, and what would change that")
    plan.add_argument("--top", type=_count, metavar="N", help="show only the N best, the best first")
    plan.add_argument("--partitioner", default="objective", metavar="NAME", help="what decides (default: objective)")
    plan.add_argument("--partitioner-option", metavar="TEXT", help="passed to the partitioner")
    plan.add_argument("--list-partitioners", action="store_true", help="list them and exit")


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
    own.add_argument("--report", metavar="FILE.html", help="also a page: tokens and memory against the cut")
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
    sweep.add_argument("--out", required=True, metavar="DIR", help="folder for the results; run again to resume")
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
    cuts.add_argument("--cuts", metavar="NAME,NAME", help="these cuts (default: all that are allowed)")
    cuts.add_argument("--every", type=_count, metavar="N", help="every n-th allowed cut")
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
    sweep.add_argument("--calibrate", action="store_true", help="same as plan: correct the plan by a few real requests")
    sweep.add_argument("--objective", default="latency", metavar="NAME|NAME=WEIGHT,...", help="(default: latency)")
    add_codec(sweep)
    sweep.add_argument("--seconds", type=_seconds, metavar="S", help="stop measuring after this long; resumable")
    sweep.add_argument("--deadline", type=_seconds, default=60.0, metavar="S", help="for each request (default: 60)")
    sweep.add_argument("--patience", type=_seconds, default=15.0, metavar="S", help="wait for a server (default: 15)")
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
    prune.add_argument("--data", required=True, metavar="FOLDER", help="test data: input files, or a folder per class")
    prune.add_argument("--calibration", metavar="FOLDER", help="to choose by (default: every other file of --data)")
    prune.add_argument("--split", required=True, metavar="LAYER_ID|NAME", help="the layer whose channels are scored")
    prune.add_argument("--keep", "--keeps", metavar="N,N", help="channels kept (default: a quarter, half, 3 quarters)")
    prune.add_argument("--scores", metavar="NAME,NAME", help="scorings to try (default: all)")
    prune.add_argument("--seeds", type=_count, default=5, metavar="N", help="for the random control (default: 5)")
    prune.add_argument("--boxes", metavar="FILE", help="JSON: score only inside the calibration files' objects")
    prune.add_argument("--predictions", metavar="FILE", help="JSON: score only in predictions that match --boxes")
    prune.add_argument("--structural", action="store_true", help="also cut the channels out of the model")
    prune.add_argument("--out", metavar="DIR", help="masks, smaller models and report.html go here")
    prune.add_argument("--batch", type=_count, default=16, metavar="N", help="inputs in one forward (default: 16)")
    prune.add_argument("--requests", type=_count, default=20, metavar="N", help="through a server (default: 20)")
    prune.add_argument("--no-serve", dest="serve", action="store_false", help="do not measure bytes and times")


def add_calibrate(commands: Commands, model: Parser) -> None:
    study = commands.add_parser("calibrate", parents=[model], help="what every codec costs in answers, at every cut")
    study.add_argument(
        "--inputs", required=True, metavar="FOLDER", help="input files, or a folder per class; or a glob"
    )
    study.add_argument("--labels", metavar="FILE.csv", help="rows of a file's name and its label")
    study.add_argument("--max-loss", default="1%", metavar="SHARE", help="to be allowed, such as 0.5%% (default: 1%%)")
    study.add_argument("--codecs", metavar="NAME,NAME", help="these codecs (default: all)")
    cuts = study.add_mutually_exclusive_group()
    cuts.add_argument("--cuts", metavar="NAME,NAME", help='these cuts, "input" among them (default: all allowed)')
    cuts.add_argument("--every", type=_count, metavar="N", help="every n-th allowed cut")
    study.add_argument(
        "--kind",
        choices=("classes", "embedding", "boxes", "tensors"),
        help="of the output (default: by the spec, names and shapes)",
    )
    study.add_argument("--seconds", type=_seconds, metavar="S", help="begin no input after this long")
    study.add_argument(
        "--learn", type=int, metavar="N", help='of the inputs, for "basis" to learn from (default: a quarter)'
    )
    study.add_argument("--out", metavar="DIR", help="calibration.json and report.html go here")


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
