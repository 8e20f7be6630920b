"""One plan of one network; run in a process of its own by `plan_cost`, because the first plan is what people wait for.

``python -m studies.benchmarks.plan_probe NETWORK REPEATS [layers]`` prints JSON: CPU nanoseconds of the first plan, and
of plain forwards, half of them right before it and half right after it; with ``layers`` also of one listing of all
layers with all that is reported of them; and bytes: resident at rest, the highest in a plain forward and in planning
(VmHWM, which writing 5 to clear_refs resets; Linux only), and the model's activations: the inputs, and every storage
that a kernel of a forward makes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import WrappedModel
from shared_hooks.planning.plan import Plan
from shared_hooks.tensors.trees import tensors_in
from studies.benchmarks.memory_probe import PROCESS, status
from studies.benchmarks.networks import built
from studies.benchmarks.plan_networks import PLANNED
from studies.benchmarks.timing import cpu_ns, timed


class Activations(TorchDispatchMode):
    """``nbytes`` of all storages that appear while this is active, and of ``inputs``."""

    def __init__(self, model: nn.Module, inputs: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self.known: dict[int, StorageWeakRef] = {}
        for tensor in (*model.parameters(), *model.buffers(), *inputs):
            self.count(tensor)
        self.nbytes = sum(tensor.untyped_storage().nbytes() for tensor in inputs)

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.count(tensor)
        return result

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            # a weak reference keeps the address from being used again
            self.known[storage._cdata] = StorageWeakRef(storage)
            self.nbytes += storage.nbytes()


def main() -> None:
    name, repeats, *more = sys.argv[1:]
    torch.set_num_threads(1)
    build, make_input = PLANNED[name]
    model, x = built(build), make_input()
    on_linux = sys.platform == "linux"
    found: dict[str, Any] = {}
    with torch.no_grad(), WrappedModel(model, metrics=False) as wrapped:

        def forwards() -> list[int]:
            return [timed(lambda: model(x), cpu_ns) for _ in range(-(-int(repeats) // 2))]

        for _ in range(2):
            model(x)
        found["forwards_ns"] = forwards()
        for what, run in (("forward", lambda: model(x)), ("plan", lambda: wrapped.plan(x))):
            if on_linux:
                found[f"{what}_rest"] = status("VmRSS")
                (Path(PROCESS) / "clear_refs").write_text("5")
            found[f"{what}_ns"] = timed(run, cpu_ns)
            if on_linux:
                found[f"{what}_peak"] = status("VmHWM")
        found["forwards_ns"] += forwards()
        with Activations(model, [x]) as made:
            model(x)
        found["activations"] = made.nbytes
        if more:
            plan = wrapped.plan(x)
            found["layers_ns"] = timed(lambda: _looked_at(plan), cpu_ns)
            found["layers"], found["operations"] = len(plan.trace.layers), len(plan.trace.ops)
    print(json.dumps(found))


def _looked_at(plan: Plan) -> int:
    """All that `layers` tells of every layer."""
    return sum(layer.frontier_bytes + layer.can_split for layer in plan.layers)


if __name__ == "__main__":
    main()
