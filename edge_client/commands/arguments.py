"""Define the commands of ``edge-client`` and their options.

A task's options are declared in `edge_client.options`. This is separate from the files that read it, because those load
torch and ``--help`` must not.
"""

from __future__ import annotations

import argparse

from edge_client.commands.common import Commands, add_config, add_credentials, add_server, add_sink, pixels
from edge_client.options import (
    AutoSplit,
    BenchOptions,
    CalibrateOptions,
    Encoded,
    ExportOptions,
    HierarchyOptions,
    LeakageOptions,
    LearnOptions,
    Observed,
    PlanGenerationOptions,
    PlanOptions,
    ProfilingOptions,
    PruneOptions,
    RunOptions,
    SweepOptions,
    VerifyOptions,
    WaitOptions,
    WatchOptions,
)
from shared_hooks.command_line import Parser, add_common
from shared_hooks.options import (
    add_options,
    fraction,
    non_negative_int,
    positive_int,
    positive_number,
    positive_seconds,
)

# The options of the commands that measure and compare: plan, profile, sweep, compare, prune, calibrate and bench.


def _add_input(
    command: argparse._ActionsContainer, help: str, *, metavar: str = "PATH", required: bool = False
) -> None:
    """Add the option for any number of inputs."""
    command.add_argument("--input", action="extend", nargs="+", metavar=metavar, required=required, help=help)


def add_plan(commands: Commands, model: Parser) -> None:
    plan = commands.add_parser("plan", parents=[model], help="predict every cut, and which is best")
    add_server(plan, "without one, as with own")
    add_credentials(plan)
    _add_input(plan, "count its preparation; it may cross as it is", metavar="FILE")
    add_options(plan, PlanOptions)
    _add_power(plan)
    own = plan.add_argument_group("of a language model, called token by token")
    own.add_argument(
        "--generate",
        nargs="?",
        const="token",
        choices=("token", "first-token", "reply"),
        help="plan a split generation, and what is to be best in it (alone: a token)",
    )
    add_options(own, PlanGenerationOptions, but=PlanOptions)
    plan.add_argument("--explain", action="store_true", help="why the best wins, and what would change that")
    plan.add_argument(
        "--report",
        metavar="FILE.html",
        help="also a page: the graph and its cut; of --generate, tokens against the cut",
    )
    plan.add_argument("--top", type=positive_int, metavar="N", help="show only the N best, the best first")
    plan.add_argument("--list-partitioners", action="store_true", help="list them and exit")


def _add_heads(command: argparse._ActionsContainer) -> None:
    command.add_argument("--heads", metavar="DIR", help="of edge-client export: run an ONNX head, without PyTorch")
    command.add_argument("--provider", default="cpu", metavar="NAME", help="onnxruntime's, for --heads (default: cpu)")


def _add_power(command: argparse._ActionsContainer) -> None:
    command.add_argument("--power-active", type=float, metavar="W", help="of this machine at work, with --power-idle")
    command.add_argument("--power-idle", type=float, metavar="W", help="of this machine waiting")


def add_profile(commands: Commands, parents: list[Parser]) -> None:
    profile = commands.add_parser("profile", parents=parents, help="measure layers and cuts, on both sides")
    add_server(profile, "also measure the server's side")
    add_credentials(profile)
    add_options(profile, ProfilingOptions)


def add_sweep(commands: Commands, model: Parser) -> None:
    sweep = commands.add_parser("sweep", parents=[model], help="run inputs through every cut: tables and a report")
    add_server(sweep, "without one, as with own")
    add_credentials(sweep)
    _add_input(
        sweep, "an image, .npy, .safetensors, a folder or a glob; or several, each once (default: the model's own)"
    )
    add_options(sweep, SweepOptions)
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
    prune.add_argument("--split", required=True, metavar="LAYER_ID|NAME", help="the layer whose channels are scored")
    add_options(prune, PruneOptions)


def add_leakage(commands: Commands, model: Parser) -> None:
    leakage = commands.add_parser("leakage", parents=[model], help="what an attacker reads from what crosses")
    leakage.add_argument("--input", required=True, metavar="FOLDER", help="input files, or a glob: attacked, in part")
    add_options(leakage, LeakageOptions)


def add_calibrate(commands: Commands, model: Parser) -> None:
    study = commands.add_parser("calibrate", parents=[model], help="what every codec costs in answers, at every cut")
    study.add_argument("--input", required=True, metavar="FOLDER", help="input files, or a folder per class; or a glob")
    add_options(study, CalibrateOptions)


def add_learn(commands: Commands, model: Parser) -> None:
    learn = commands.add_parser("learn", parents=[model], help="train a codec for one cut, on inputs without labels")
    learn.add_argument("--split", required=True, metavar="CUT", help="the layer or block it is for")
    learn.add_argument("--input", required=True, metavar="FOLDER", help="input files, or a folder per class; or a glob")
    add_options(learn, LearnOptions)


def add_export(commands: Commands, model: Parser) -> None:
    export = commands.add_parser("export", parents=[model], help="heads as ONNX files, for devices without PyTorch")
    add_options(export, ExportOptions)
    _add_input(export, "compare answers on these (default: the example)")


def add_bench(commands: Commands, model: Parser) -> None:
    bench = commands.add_parser("bench", parents=[model], help="an open load on a server: latency and goodput by rate")
    add_server(bench)
    add_credentials(bench)
    _add_input(bench, "drawn from these (default: the model's own)")
    add_options(bench, BenchOptions)
    bench.add_argument("--html", metavar="FILE", help="also write a page")
    _add_heads(bench)


# The options of the commands that send inputs: run, watch and dashboard.

PORT = "8050"
"""The dashboard's default port."""


def add_run(commands: Commands, model: Parser) -> None:
    run = commands.add_parser("run", parents=[model], help="send inputs through a cut")
    watch = commands.add_parser("watch", parents=[model], help="send inputs, and show live what observers see")
    for command in (run, watch):
        add_config(command)
        add_credentials(command)
        add_options(command, WatchOptions if command is watch else Observed)
    run.add_argument("--heat-maps", metavar="DIR", help="with --observe attention: pictures of it, as PNG files")
    add_server(watch)
    watch.add_argument("--split", required=True, metavar="LAYER_ID|NAME|input|...", help="same as run, without auto")
    _add_input(watch, "same as run", required=True)
    watch.add_argument(
        "--repeat", type=positive_int, default=1, metavar="N", help="repeat all inputs N times (default: 1)"
    )
    add_server(run)
    run.add_argument(
        "--split",
        required=True,
        metavar="CUT",
        help='the name of a block or layer to cut after, or a layer\'s id; "edge-only" needs no server; "cloud-only" '
        'sends the input, "cloud-only-file" the file as it is; "auto" chooses the cut and moves it as link and load '
        "change; several, with commas, for a chain: --server A,B --split CUT,CUT",
    )
    _add_input(
        run,
        "an image, .npy, .safetensors, a folder, a glob, a video; or several, each as often as given. Or one "
        "camera: a device as /dev/video0, an address as rtsp://...",
        required=True,
    )
    run.add_argument("--frames", type=positive_int, metavar="N", help="of a video or a camera: end after N frames")
    run.add_argument(
        "--queue",
        type=positive_int,
        metavar="N",
        help="of a camera: frames that wait; the oldest is dropped (default: 2)",
    )
    run.add_argument("--camera-size", type=pixels, metavar="WxH", help="requested from a device, such as 640x480")
    run.add_argument(
        "--camera-rate", type=positive_number, metavar="N", help="requested from a device: frames a second"
    )
    run.add_argument("--camera-format", metavar="NAME", help="requested from a device: its pixel format, such as mjpeg")
    run.add_argument(
        "--only-head",
        metavar="LAYER_ID|NAME",
        help="load only the weights of heads that end here or before; the others stay in their files",
    )
    add_options(run, RunOptions)
    run.add_argument(
        "--output",
        metavar="DIR",
        help="keep outputs: JSON, large tensors as safetensors, drawn where the spec has [draw]",
    )
    run.add_argument(
        "--journal", metavar="FILE", help="keep what became of each input; the same command continues where it stopped"
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
    _add_input(page, "same as run; without, the server is watched")
    page.add_argument("--split", default="auto", metavar="LAYER_ID|NAME|auto|...", help="same as run (default: auto)")
    page.add_argument(
        "--every",
        type=positive_seconds,
        default=0.2,
        metavar="S",
        help="begin a request every S seconds (default: 0.2)",
    )
    page.add_argument("--repeat", type=positive_int, metavar="N", help="all inputs N times (default: until Ctrl-C)")
    add_options(page, WaitOptions)
    add_options(page, Encoded)
    add_options(page, Observed)
    add_sink(page)
    add_config(page)
    _add_auto(page)


def _add_auto(run: argparse.ArgumentParser) -> None:
    """Add the options of ``--split auto``, which are refused at any other split."""
    auto = run.add_argument_group("--split auto")
    add_options(auto, AutoSplit)
    _add_power(auto)


# The options of ``edge-client generate``, ``chat`` and ``serve``; they load nothing.

CODECS = ("int8", "int6", "int5", "int4")
"""As in `shared_hooks.generation.hidden`, which loads torch."""


def add_generation(commands: Commands, model: Parser) -> tuple[Parser, ...]:
    """Add all three commands."""
    generate = commands.add_parser(
        "generate", parents=[model], help="continue a text with a language model, split: its layers here and there"
    )
    generate.add_argument("--prompt", required=True, metavar="TEXT|-", help='"-" for standard input')
    generate.add_argument("--no-stream", action="store_true", help="write the text when all of it is there")
    generate.add_argument(
        "--beams",
        type=positive_int,
        default=1,
        metavar="N",
        help="search with N beams; the text comes at the end (default: 1)",
    )
    chat = commands.add_parser(
        "chat",
        parents=[model],
        help="talk with a language model, split; the conversation stays in its state on both sides",
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
        "--seats", type=positive_int, default=4, metavar="N", help="texts that are written at once (default: 4)"
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
    add_options(command, WaitOptions)


def _add_text(command: Parser) -> None:
    command.add_argument(
        "--max-new-tokens", type=positive_int, default=128, metavar="N", help="write at most so many (default: 128)"
    )
    command.add_argument("--sample", action="store_true", help="draw tokens by chance (default: always the likeliest)")
    command.add_argument(
        "--temperature", type=positive_number, metavar="X", help="with --sample: below 1 more of the likeliest"
    )
    command.add_argument("--top-k", type=positive_int, metavar="N", help="with --sample: among the N likeliest")
    command.add_argument(
        "--top-p", type=fraction, metavar="P", help="with --sample: among the likeliest that add up to P, 0 to 1"
    )
    command.add_argument("--seed", type=non_negative_int, metavar="N", help="with --sample: the same text every time")
    _add_drafts(command)


def _add_drafts(command: Parser) -> None:
    command.add_argument(
        "--lookup",
        type=positive_int,
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
"""The options that ``--help`` shows, by command; at most a dozen."""

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
    """Return the parser of every command."""
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
    model.add_argument(
        "--depth", type=positive_int, metavar="N", help="how many levels of modules to descend (default: all)"
    )
    model.add_argument("--device", default="auto", metavar="auto|cpu|KIND[:N]", help="cuda, xpu, mps (default: auto)")
    model.add_argument(
        "--threads", type=positive_int, metavar="N", help="threads within one operation (default: torch's)"
    )
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
    _add_input(planned, "plan on this input instead of the spec's example")

    layers = commands.add_parser("layers", parents=[model, planned], help="a model's layers and where it can be cut")
    layers.add_argument(
        "--explain",
        metavar="LAYER_ID|NAME|input",
        help="what crosses there and why, and what is skipped; A,B: a cut after a set of calls",
    )
    layers.add_argument("--all", action="store_true", help="with --explain: do not shorten long lists")
    verify = commands.add_parser("verify", parents=[model, planned], help="compare every cut with the whole model")
    add_server(verify, "through this server, over the real link (A,B: a chain); without one in this process")
    add_options(verify, VerifyOptions)
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
    _add_input(hooks, "run these first, and show what hooks cost")
    add_credentials(hooks)
    add_server(hooks)
    hooks.add_argument("--split", metavar="LAYER_ID|NAME|...", help="(default: edge-only, without a server)")


def _add_hierarchy(commands: Commands, parents: list[Parser]) -> None:
    tree = commands.add_parser("hierarchy", parents=parents, help="the module tree, what ran, and ONNX files")
    add_options(tree, HierarchyOptions)
