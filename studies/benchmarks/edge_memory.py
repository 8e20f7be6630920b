"""Memory of the edge during a request, beyond what the head alone needs, in multiples of the frontier.

Two fresh processes that are the same in all else (model, plan, connection to a real server): one runs heads, the other
whole requests. The highest resident size is read from the kernel after each run. What a request rises above the process
at rest, less what a head does, is the cost of getting the frontier out: packing, chunks, what gRPC holds; what stays
behind between requests counts, too. The frontier is 64 MB, above the size that the allocator keeps for later: what is
freed is really gone. Garbage is collected as it would be. The server has its own process and does not count.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from studies.benchmarks.processes import cloud, probe
from studies.benchmarks.row import Line, Options, Row

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
        # the first of each plans
        peaks = {kind: statistics.median(run["peaks"][1:]) / FRONTIER for kind, run in runs.items()}
        rests = {kind: statistics.median(run["before"][1:]) / FRONTIER for kind, run in runs.items()}
        risen = {kind: peaks[kind] - rests[kind] for kind in runs}
        found[model] = max(risen["request"] - risen["head"], peaks["request"] - peaks["head"])
        details[model] = {"bytes": runs, "peak": peaks, "at_rest": rests, "ratio": found[model]}
    worst = max(found, key=lambda model: found[model])
    note = "; ".join(
        f"frontier is {text}: {found[model]:.2f} x, "
        f"where the head rises {details[model]['peak']['head'] - details[model]['at_rest']['head']:.2f} x above rest"
        for model, text in MODELS.items()
    )
    return Row((Line(what, found[worst], "x", LIMIT, f"{FRONTIER / 1e6:.0f} MB; {note}"),), details)
