"""A soak: a server, a relay that resets connections, a client that continues; and what came of it."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from studies.experiments.relay import Relay
from studies.siege.processes import Child, Server
from studies.soak.slope import Slope
from studies.soak.watch import WHAT, Watch

FLAT = {"MiB": 5.0, "descriptors": 2.0, "threads": 2.0}
"""In 100,000 requests: what still counts as nothing."""
ENOUGH = 20_000
"""Requests; fewer do not tell growth from what fills up once."""
NEW_CLIENTS = 0.1
"""Share of the reconnects at which the client is a new one; at the others its connection is reset."""


@dataclass
class Result:
    """``slopes``: by process and what was read."""

    requests: int = 0
    wrong: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    again: int = 0
    clients: int = 0
    streams: int = 0
    resets: int = 0
    seconds: float = 0.0
    status: int | None = None
    slopes: dict[tuple[str, str], Slope] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """What is not as it is promised."""
        found = [f"{self.wrong} wrong answers"] if self.wrong else []
        found += [f"lost: {count} x {text}" for text, count in self.lost.items()]
        found += [f"exit status {self.status}"] if self.status else []
        if self.requests >= ENOUGH:
            for (who, what), slope in self.slopes.items():
                found += [f"{who}: {what} grow: {slope}"] if slope.grows(FLAT[what]) else []
        return found

    def json(self) -> dict[str, Any]:
        slopes = {
            f"{who}: {what}": {**vars(slope), "margin": slope.margin if math.isfinite(slope.margin) else None}
            for (who, what), slope in self.slopes.items()
        }
        return {**vars(self), "slopes": slopes, "faults": self.faults}

    def __str__(self) -> str:
        rate = self.requests / max(self.seconds, 1e-9)
        lines = [
            f"{self.requests:,} requests in {self.seconds:.0f} s ({rate:.0f} a second), "
            f"{self.wrong} wrong, {sum(self.lost.values())} lost, {self.again} sent again",
            f"{self.clients} clients, {self.streams} streams, {self.resets} resets of the connection",
        ]
        lines += [f"{who:<12}{what:<13}{slope}" for (who, what), slope in sorted(self.slopes.items())]
        good = "flat, and nothing wrong or lost" if self.requests >= ENOUGH else "nothing wrong or lost"
        return "\n".join([*lines, *(self.faults or [good])])


def soak(folder: Path, requests: int, reconnects: int, workers: int = 1, every: float = 1.0) -> Result:
    """``every``: seconds between two readings."""
    tables = {"": {"listen": "127.0.0.1:0", "threads": 1, "workers": workers}, "models": {"digits": "digits"}}
    server = Server(folder, tables)
    host, _, port = server.address.rpartition(":")
    result, began = Result(), time.monotonic()
    clients = max(1, round(NEW_CLIENTS * reconnects))
    apart = requests / max(1, reconnects - clients)
    last: dict[str, Any] = {"asked": 0, "over": False}
    try:
        with Relay((host, int(port))) as relay:
            client = Child("studies.soak.asker", ":".join(map(str, relay.address)), str(requests), str(clients))
            try:
                processes = {"server": server.process.pid, "client": client.process.pid}
                watch = Watch(processes, lambda: int(last["asked"]), every)
                while not last["over"] and (line := client.line()):
                    last = json.loads(line)
                    if last["asked"] >= (result.resets + 1) * apart and last["asked"] < requests:
                        relay.reset()
                        result.resets += 1
                watch.stop()
                if not last["over"]:
                    raise RuntimeError(f"the client ended after {last['asked']} requests")
            finally:
                client.kill()
    finally:
        result.status, _ = server.drain()
    result.seconds = round(time.monotonic() - began, 1)
    result.requests, result.wrong, result.lost = last["asked"], last["wrong"], last["lost"]
    result.again, result.clients, result.streams = last["again"], last["clients"], last["streams"]
    result.slopes = {key: Slope.of(looks) for key, looks in watch.looks.items() if key[1] in WHAT}
    return result
