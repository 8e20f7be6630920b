"""What planning costs: its first time in a process over a plain forward, in CPU time, and its memory.

Memory is what planning rises above a plain forward's own peak, over the model's activations. Listing all layers, with
what crosses at each and whether a cut is possible, is told, too; making a plan does not do that.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from tests.benchmarks.plan_networks import PLANNED
from tests.benchmarks.processes import probe
from tests.benchmarks.row import Line, Options, Row

LIMIT_TIME = 6.0
LIMIT_MEMORY = 1.0


def measure(options: Options) -> Row:
    details: dict[str, Any] = {}
    lines: list[Line] = []
    for name in PLANNED:
        found = probe("plan_probe", name, str(options.repeats(20)), threads=options.threads)
        forward = statistics.median(found["forwards_ns"])
        ratio = found["plan_ns"] / forward
        note = (
            f"{found['operations']} operations; forward {forward / 1e6:.0f} ms; "
            f"all {found['layers']} layers looked at: {found['layers_ns'] / 1e9:.2f} s"
        )
        lines.append(Line(f"first plan / plain forward, {name}", ratio, "x", LIMIT_TIME, note))
        if sys.platform == "linux":
            more = found["plan_peak"] - found["forward_peak"]
            memory = more / found["activations"]
            note = f"{more / 1e6:.0f} MB more than a forward's peak; activations {found['activations'] / 1e6:.0f} MB"
            lines.append(Line(f"memory of planning / activations, {name}", memory, "x", LIMIT_MEMORY, note))
        details[name] = found
    return Row(tuple(lines), details)
