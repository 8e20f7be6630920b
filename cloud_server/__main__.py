"""``python -m cloud_server``, and the console script ``cloud-server``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command (`cloud_server.cli.main`); returns its exit status."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a port that is in use is our line to write, not gRPC's
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if words[:1] == ["token"]:
            from cloud_server.access import token_command

            return token_command.main(words[1:])
        if words[:1] == ["doctor"]:
            from cloud_server.doctor import command

            return command.main(words[1:])
        from cloud_server import cli  # here, for it loads torch, and Ctrl-C may come meanwhile

        return cli.main(argv)
    except KeyboardInterrupt:  # before the server was up; later ones drain
        print("cloud-server: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
