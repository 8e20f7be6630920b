"""A port to come back to: one that the system gives to nobody else while its server is away."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 1024


def free_port() -> int:
    """A loopback port without a listener, below the ephemeral ports.

    A server that ends and comes back, or is never there, would else find another test's on its port now and then.
    """
    lowest = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32768
    draw = random.SystemRandom()  # not seeded: other processes draw, too
    for _ in range(100):
        port = draw.randrange(FIRST, lowest) if lowest > 2 * FIRST else 0
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no free port between {FIRST} and {lowest}")
