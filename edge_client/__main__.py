"""``edge-client``: one command, and errors as one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from io import TextIOWrapper
from typing import Final

from edge_client import interrupts
from edge_client.commands import common
from edge_client.user_text import by_command
from shared_hooks.command_line import open_closed_streams, quiet_libraries

ALONE: Final = ("run", "watch", "dashboard", "compare", "doctor", "hooks")
"""Commands with a module of their own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status (`edge_client.commands.common`)."""
    open_closed_streams()
    with interrupts.ends_at_once():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    from edge_client.commands.arguments import make_parser  # a tenth of a second, in which Ctrl-C may arrive

    parser = make_parser()
    options = parser.parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    options.given = {word.partition("=")[0] for word in words if word.startswith("--")}
    options.model_named = "--model" in options.given
    if isinstance(sys.stdout, TextIOWrapper):  # a file name that cannot be encoded must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    options.stdout = sys.stdout
    common.log_format = getattr(options, "log_format", "console")
    if getattr(options, "no_progress", False):
        quiet_libraries()
    # only JSON is on standard output, whatever else is printed, including by a model's own code
    with redirect_stdout(sys.stderr) if options.json == "-" else nullcontext():
        return _run(options)


def _register(options: argparse.Namespace) -> None:
    """The codecs of other packages. Raises SpecError."""
    from shared_hooks.errors import SpecError

    if getattr(options, "heads", None) is not None:
        raise SpecError("--codec-plugin: not with --heads, where codecs are in numpy")
    from shared_hooks.codecs import register

    for reference in options.codec_plugin:
        register(reference)


def _command(options: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """Import and return what runs the command: a module of its own, or a function of `commands.tasks`."""
    if getattr(options, "heads", None) is not None:
        from edge_client.commands import light

        return {"doctor": light.doctor, "bench": light.bench}.get(options.command, light.main)
    if options.command in ALONE:
        return _main_of(options.command)
    if options.command in ("generate", "chat", "serve"):
        from edge_client.commands import speaking

        return {"generate": speaking.generate, "chat": speaking.chat, "serve": speaking.serve}[options.command]
    from edge_client.commands.tasks import COMMANDS

    return COMMANDS[options.command]


def _main_of(name: str) -> Callable[[argparse.Namespace], int]:
    found: Callable[[argparse.Namespace], int] = import_module(f"edge_client.commands.{name}").main
    return found


def _run(options: argparse.Namespace) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a lost server is reported by our own line, not by gRPC's
    try:
        from shared_hooks.errors import (
            AccessRefused,
            Disagreement,
            IsthmusError,
            ServerUnavailable,
            UnknownLayer,
            UnknownModel,
        )

        try:
            command = _command(options)
            interrupts.insists()
            if getattr(options, "codec_plugin", None):
                _register(options)
            with by_command():
                status = command(options)
            sys.stdout.flush()
            options.stdout.flush()
            return status
        except IsthmusError as error:
            if options.debug:
                raise
            if not options.model_named and isinstance(error, (UnknownLayer, UnknownModel)):
                error = type(error)(f"{error} (the model is {options.model}, the default: --model names another)")
            connection = isinstance(error, (ServerUnavailable, Disagreement, AccessRefused))
            return _complain(f"{error}", common.CONNECTION if connection else common.USAGE)
        except BrokenPipeError:
            # The reader of our output has left (a pager, head): this is not reported, and nothing can be flushed any
            # more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), options.stdout.fileno())
            return common.SOME_FAILED
        except Exception as error:
            if options.debug:
                raise
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                return _complain("PyTorch is not installed here; `run --heads DIR` needs none (edge-client export)")
            if isinstance(error, OSError) and error.strerror:
                if error.filename is None:
                    return _complain(f"{error.strerror} (--debug shows where)")
                return _complain(f"{error.filename}: {error.strerror}")
            return _complain(f"{type(error).__name__}: {error} (--debug shows where)")
    except KeyboardInterrupt:
        interrupts.acknowledge()
        common.say("interrupted")
        return common.INTERRUPTED


def _complain(message: str, status: int = common.USAGE) -> int:
    common.say(message, "error")
    return status


if __name__ == "__main__":
    sys.exit(main())
