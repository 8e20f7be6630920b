"""``python -m cloud_server``, and the console script ``cloud-server``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import FrameType

from shared_hooks.command_line import open_closed_streams, quiet_libraries

INTERRUPTED = 128 + signal.SIGINT
USAGE = 2
NEEDED = {"grpc_reflection": "grpcio-reflection", "prometheus_client": "prometheus-client"}
"""Packages that only this side imports, with their names for pip."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command (`cloud_server.cli.main`); returns its exit status."""
    open_closed_streams()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a port in use is reported by our own line, not by gRPC's
    words = sys.argv[1:] if argv is None else list(argv)
    # Until the server is up and drains on Ctrl-C, there is nothing to shut down cleanly. An exception might be caught
    # or dropped where it is raised: in the import of a library, in a destructor, in a callback from C++.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    try:
        _check(words)
        if not sys.stderr.isatty():  # standard error is a log
            quiet_libraries()
        if words[:1] == ["token"]:
            from cloud_server.access import token_command

            return token_command(words[1:])
        if missing := [name for package, name in NEEDED.items() if find_spec(package) is None]:
            print(f'cloud-server: {" and ".join(missing)} missing: pip install "isthmus[cloud]"', file=sys.stderr)
            return USAGE
        if words[:1] == ["doctor"]:
            from cloud_server import doctor

            return doctor.main(words[1:])
        from cloud_server import cli  # imported here because it loads torch, and Ctrl-C may arrive meanwhile

        return cli.main(words)
    finally:
        if signal.getsignal(signal.SIGINT) is _end:  # for callers that use this as a function
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _check(words: Sequence[str]) -> None:
    """Handle ``--help`` and wrong arguments before torch is loaded, which takes seconds."""
    from cloud_server import arguments

    command = words[0] if words else ""
    of = {"token": arguments.token, "doctor": arguments.doctor}.get(command)
    made, words = (of(), words[1:]) if of else (arguments.parser(), words)
    made.parse_args(words)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"cloud-server: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
