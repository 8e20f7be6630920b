"""What planning costs: its first time in a process over a plain forward, in CPU time, and its memory.

The first plan comes once in a process, so there are several of each network, in turns with those of the others, and the
ratio of each is to forwards right before and right after it: what else continues in the machine slows both down.

Memory is what planning rises above a plain forward's own peak, over the model's activations. Listing all layers, with
what crosses at each and whether a cut is possible, is reported, too; making a plan does not do that.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from studies.benchmarks.plan_networks import PLANNED
from studies.benchmarks.processes import probe
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread

LIMIT_TIME = 6.0
LIMIT_MEMORY = 1.0
PROCESSES = 5


def measure(options: Options) -> Row:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PLANNED}
    for turn in range(3 if options.quick else PROCESSES):
        for name, runs in found.items():
            more = () if turn else ("layers",)
            runs.append(probe("plan_probe", name, str(options.repeats(20)), *more, threads=options.threads))
    lines: list[Line] = []
    for name, runs in found.items():
        times = Spread.of([run["plan_ns"] / statistics.median(run["forwards_ns"]) for run in runs])
        forward = statistics.median(time for run in runs for time in run["forwards_ns"])
        first = runs[0]
        note = (
            f"{first['operations']} operations; forward {forward / 1e6:.0f} ms; of {times.count} processes, half from "
            f"{times.low:.2f} to {times.high:.2f}; all {first['layers']} layers looked at: "
            f"{first['layers_ns'] / 1e9:.2f} s"
        )
        lines.append(Line(f"first plan / plain forward, {name}", times.median, "x", LIMIT_TIME, note))
        if sys.platform == "linux":
            more_bytes = statistics.median(run["plan_peak"] - run["forward_peak"] for run in runs)
            activations = first["activations"]
            note = f"{more_bytes / 1e6:.0f} MB more than a forward's peak; activations {activations / 1e6:.0f} MB"
            what = f"memory of planning / activations, {name}"
            lines.append(Line(what, more_bytes / activations, "x", LIMIT_MEMORY, note))
    return Row(tuple(lines), {"processes": found})
