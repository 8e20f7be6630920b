"""``edge-client layers | verify | run``: arguments, and errors as one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from io import TextIOWrapper

from edge_client.commands import exits
from edge_client.commands.text import one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status (`edge_client.commands.exits`)."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if isinstance(sys.stdout, TextIOWrapper):  # a file name that cannot be shown as it is must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    options.stdout = sys.stdout
    # JSON is alone on standard output, whatever else is printed, by a model's own code, too.
    with redirect_stdout(sys.stderr) if options.json == "-" else nullcontext():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a server that goes away is our line to write, not gRPC's
    try:
        from shared_hooks.errors import IsthmusError

        try:
            status: int = import_module(f"edge_client.commands.{options.command}").main(options)
            sys.stdout.flush()
            options.stdout.flush()
            return status
        except IsthmusError as error:
            if options.debug:
                raise
            return _complain(f"{error}")
        except BrokenPipeError:
            # The reader of our output has left (a pager, head): not worth a word, and nothing can be flushed any more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), options.stdout.fileno())
            return exits.SOME_FAILED
        except Exception as error:
            if options.debug:
                raise
            return _complain(f"{type(error).__name__}: {error} (--debug shows where)")
    except KeyboardInterrupt:
        print("edge-client: interrupted", file=sys.stderr)
        return exits.INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The arguments of all three commands."""
    parser = argparse.ArgumentParser(
        prog="edge-client", description="The edge side of Isthmus: run a model up to a cut, the rest on a server."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument(
        "--model",
        default="digits",
        metavar="SPEC",
        help='a built-in name, a TOML file, "module:callable", or any of them after "NAME=" (default: digits)',
    )
    model.add_argument("--weights", metavar="FILE.safetensors", action="append", help="in place of the spec's own")
    model.add_argument("--depth", type=_count, metavar="N", help="how many levels of modules to descend (default: all)")
    model.add_argument("--device", default="auto", metavar="auto|cpu|cuda[:n]", help="(default: auto)")
    model.add_argument("--threads", type=_count, metavar="N", help="threads inside one operation (default: torch's)")
    model.add_argument("--json", metavar="FILE|-", help='write results as JSON; "-" for standard output')
    model.add_argument("--no-progress", action="store_true", help="no progress on standard error")
    model.add_argument("--debug", action="store_true", help="show tracebacks")
    planned = argparse.ArgumentParser(add_help=False)
    planned.add_argument(
        "--input", action="append", metavar="PATH", help="plan on this input instead of the spec's example"
    )

    commands.add_parser("layers", parents=[model, planned], help="list a model's layers and where it can be cut")
    commands.add_parser("verify", parents=[model, planned], help="compare every cut with the whole model")
    run = commands.add_parser("run", parents=[model], help="send inputs through a cut")
    run.add_argument(
        "--server",
        default=os.environ.get("ISTHMUS_SERVER"),
        metavar="HOST:PORT",
        help="(default: the environment variable ISTHMUS_SERVER)",
    )
    run.add_argument(
        "--split",
        required=True,
        metavar="LAYER_ID|NAME|input",
        help="the layer after which to cut; a name goes before an id",
    )
    run.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="PATH",
        help="an image, .npy, .safetensors, a folder or a glob; may be repeated",
    )
    run.add_argument("--deadline", type=_seconds, default=60.0, metavar="S", help="for each request (default: 60)")
    run.add_argument("--patience", type=_seconds, default=15.0, metavar="S", help="without a server (default: 15)")
    run.add_argument("--in-flight", type=_count, default=4, metavar="N", help="requests under way (default: 4)")
    run.add_argument("--codec", choices=("raw", "lz4"), default="raw", help="of the frontier (default: raw)")
    run.add_argument("--layers", action="store_true", help="print the layers' times on both sides")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _complain(message: str) -> int:
    print(f"edge-client: error: {one_line(message)}", file=sys.stderr)
    return exits.USAGE


if __name__ == "__main__":
    sys.exit(main())
