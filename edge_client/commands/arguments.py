"""The commands of ``edge-client`` and their options.

They are here and not in the files that read them, because those load torch and ``--help`` must not.
"""

from __future__ import annotations

from edge_client.commands.common import Commands, add_config
from edge_client.commands.credentials import add_credentials
from edge_client.commands.generation import add_generation
from edge_client.commands.kinds import count as _count
from edge_client.commands.measuring import add_bench, add_calibrate, add_plan, add_profile, add_prune, add_sweep
from edge_client.commands.sending import add_dashboard, add_run
from edge_client.commands.server import add_server
from shared_hooks.command_line import Parser, add_common


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
    model.add_argument("--weights", metavar="FILE.safetensors", action="append", help="instead of the spec's own")
    model.add_argument("--selection", metavar="FILE", help="from edge-client prune: a mask at a cut or a smaller model")
    model.add_argument(
        "--example",
        metavar="SIZES|FILE",
        help="the input that both sides plan on, in place of the spec's: 1,3,224,224 or 1,16:int64, a file, "
        "module:callable; the same on both sides",
    )
    model.add_argument("--depth", type=_count, metavar="N", help="how many levels of modules to descend (default: all)")
    model.add_argument("--device", default="auto", metavar="auto|cpu|cuda[:n]", help="(default: auto)")
    model.add_argument("--threads", type=_count, metavar="N", help="threads within one operation (default: torch's)")
    model.add_argument("--json", metavar="FILE|-", help='write results as JSON; "-" for standard output')
    model.add_argument("--no-progress", action="store_true", help="no progress on standard error")
    model.add_argument("--debug", action="store_true", help="show tracebacks")
    planned = Parser(add_help=False)
    planned.add_argument(
        "--input", action="extend", nargs="+", metavar="PATH", help="plan on this input instead of the spec's example"
    )

    layers = commands.add_parser("layers", parents=[model, planned], help="a model's layers and where it can be cut")
    layers.add_argument(
        "--explain", metavar="LAYER_ID|NAME|input", help="what crosses there and why, and what is skipped"
    )
    layers.add_argument("--all", action="store_true", help="with --explain: do not shorten long lists")
    verify = commands.add_parser("verify", parents=[model, planned], help="compare every cut with the whole model")
    add_server(verify, "through this server, over the real link; without one in this process")
    add_credentials(verify)
    doctor = commands.add_parser("doctor", parents=[model], help="what stands between this machine and a server")
    doctor.add_argument("server", nargs="?", metavar="HOST:PORT", help="(default: as --server of run)")
    doctor.add_argument("--server", dest="named", metavar="HOST:PORT", help="the same, as other commands have it")
    add_credentials(doctor)
    add_run(commands, model)
    add_dashboard(commands, model)
    _add_lifecycle(commands, model)
    _add_hierarchy(commands, [model, planned])
    add_sweep(commands, model)
    add_prune(commands, model)
    add_calibrate(commands, model)
    add_bench(commands, model)
    add_plan(commands, model)
    add_profile(commands, [model, planned])
    generate, chat = add_generation(commands, model)
    for command in (generate, chat):
        add_config(command)
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
