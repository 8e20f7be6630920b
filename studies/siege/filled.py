"""A server process with a `FakeEngine` and small limits, for those who look at its memory: prints its port."""

from __future__ import annotations

import sys
import threading

from cloud_server.core import Core
from cloud_server.limits import MIB, Limits
from cloud_server.scheduling import few_heaps
from cloud_server.transport import CloudServer
from tests.cloud_server.fakes import FakeEngine

LIMITS = Limits(
    max_request_bytes=8 * MIB,
    max_pending_bytes=96 * MIB,
    max_answer_bytes=64 * MIB,
    max_cuts_bytes=64 * MIB,
    max_clients=8,
    max_message_bytes=2 * MIB,
)


def main() -> None:
    """Serves until its input ends."""
    few_heaps()  # as the command does
    with Core([FakeEngine()], LIMITS) as core:
        server = CloudServer(core, "127.0.0.1:0")
        server.start()
        print(server.port, flush=True)
        sys.stdin.read()
        threading.Timer(5, sys.exit).start()
        server.stop(0)


if __name__ == "__main__":
    main()
