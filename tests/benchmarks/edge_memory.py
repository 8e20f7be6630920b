"""Memory of the edge during a request, beyond what the head alone needs, in multiples of the frontier.

Two fresh processes that are the same in all else (model, plan, connection to a real server): one runs heads, the other
whole requests. The highest resident size of each is read from the kernel after each run; (request - head) / frontier is
the cost of getting the frontier out: packing, chunks, what gRPC holds. The frontier is 64 MB, above the size that the
allocator keeps for later, so what is freed is really gone. The server has its own process and does not count.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from tests.benchmarks.processes import cloud, probe
from tests.benchmarks.row import Line, Options, Row

ELEMENTS = 16 << 20
FRONTIER = 4 * ELEMENTS
LIMIT = 2.2
MODELS = {"Spread": "a layer's own output", "Bare": "the input itself"}


def measure(options: Options) -> Row:
    what = "memory of the edge beyond the head's peak / frontier"
    if sys.platform != "linux":
        return Row((Line(what, float("nan"), "x", LIMIT, "measured on Linux only"),))
    repeats = str(options.repeats(12))
    details: dict[str, Any] = {"frontier_bytes": FRONTIER}
    found: dict[str, float] = {}
    for model in MODELS:
        with cloud(model, shape=(1, ELEMENTS), threads=options.threads) as address:
            runs = {
                kind: probe("memory_probe", kind, address, model, str(ELEMENTS), repeats)
                for kind in ("head", "request")
            }
        # the first of each is a warm-up
        peaks = {kind: statistics.median(run["peaks"][1:]) for kind, run in runs.items()}
        resting = statistics.median(runs["head"]["before"][1:])
        found[model] = (peaks["request"] - peaks["head"]) / FRONTIER
        details[model] = {**runs, "head_beyond_rest": (peaks["head"] - resting) / FRONTIER, "ratio": found[model]}
    worst = max(found, key=lambda model: found[model])
    note = "; ".join(
        f"frontier is {text}: {found[model]:.2f} x, head alone {details[model]['head_beyond_rest']:.2f} x above rest"
        for model, text in MODELS.items()
    )
    return Row((Line(what, found[worst], "x", LIMIT, f"{FRONTIER / 1e6:.0f} MB; {note}"),), details)
