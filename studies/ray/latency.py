"""The same requests at one plain process and elsewhere, in turns: what else the machine does counts for both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from edge_client import EdgeClient, ModelChoice
from studies.ray.model import CUT, inputs

SIZES: Final = (4 << 10, 64 << 10, 1 << 20)
TURN: Final = 25
"""Requests at one address before it is the other's turn."""


def measure(addresses: Mapping[str, str], model: Path, requests: int) -> list[dict[str, Any]]:
    """One at a time, so many of each size at each address: a row for each size, milliseconds."""
    clients = {
        name: EdgeClient(address, ModelChoice(str(model), device="cpu", threads=1), CUT, metrics=False)
        for name, address in addresses.items()
    }
    rows = []
    try:
        for nbytes in SIZES:
            x, took = inputs(nbytes), {name: list[float]() for name in clients}
            for client in clients.values():
                for _ in range(5):
                    client.infer(x)
            while min(map(len, took.values())) < requests:
                for name, client in clients.items():
                    for _ in range(TURN):
                        began = time.perf_counter()
                        client.infer(x)
                        took[name].append(1e3 * (time.perf_counter() - began))
            rows.append({"bytes": nbytes, **{name: _figures(values) for name, values in took.items()}})
    finally:
        for client in clients.values():
            client.close()
    return rows


def _figures(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p95": round(ordered[int(0.95 * len(ordered))], 3),
        "requests": len(ordered),
    }
