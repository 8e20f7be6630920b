"""One plan of one network; run in a process of its own by `plan_cost`, because the first plan is what people wait for.

``python -m tests.benchmarks.plan_probe NETWORK REPEATS`` prints JSON: CPU nanoseconds of plain forwards, of the first
plan, of one listing of all layers with all that is told of them; and bytes: resident at rest, the highest in a plain
forward and in planning (VmHWM, which writing 5 to clear_refs resets; Linux only), and the model's activations: the
inputs, and every storage that a forward makes, as the trace counts them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from shared_hooks import WrappedModel
from shared_hooks.plan import Plan
from tests.benchmarks.memory_probe import PROCESS, status
from tests.benchmarks.networks import built
from tests.benchmarks.plan_networks import PLANNED
from tests.benchmarks.timing import cpu_ns, timed


def main() -> None:
    name, repeats = sys.argv[1:]
    torch.set_num_threads(1)
    build, make_input = PLANNED[name]
    model, x = built(build), make_input()
    on_linux = sys.platform == "linux"
    found: dict[str, Any] = {}
    with torch.no_grad(), WrappedModel(model, metrics=False) as wrapped:
        forwards = [timed(lambda: model(x), cpu_ns) for _ in range(int(repeats) + 2)][2:]
        for what, run in (("forward", lambda: model(x)), ("plan", lambda: wrapped.plan(x))):
            if on_linux:
                found[f"{what}_rest"] = status("VmRSS")
                (Path(PROCESS) / "clear_refs").write_text("5")
            found[f"{what}_ns"] = timed(run, cpu_ns)
            if on_linux:
                found[f"{what}_peak"] = status("VmHWM")
        plan = wrapped.plan(x)
    found["forwards_ns"] = forwards
    found["activations"] = _activations(plan)
    found["layers_ns"] = timed(lambda: _looked_at(plan), cpu_ns)
    found["layers"], found["operations"] = len(plan.trace.layers), len(plan.trace.ops)
    print(json.dumps(found))


def _activations(plan: Plan) -> int:
    trace = plan.trace
    met = {storage for event in trace.events for storage in event.handed} | {value.storage for value in trace.outputs}
    made = {storage for storage in met if not storage.outside}
    return sum(storage.elements * storage.itemsize for storage in made)


def _looked_at(plan: Plan) -> int:
    """All that `layers` tells of every layer."""
    return sum(layer.frontier_bytes + layer.can_split for layer in plan.layers)


if __name__ == "__main__":
    main()
