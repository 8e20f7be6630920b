"""What a model's plan, memory and machine say, for who asks about it."""

from __future__ import annotations

import platform

import torch
from torch import nn

from shared_hooks import Crossing, Plan
from shared_hooks.errors import Disagreement, UnknownLayer
from shared_hooks.profiling.kind import kind


def check_plan(plan: Plan, crossing: Crossing, *, branches: bool) -> None:
    """Whether a request's cut is what this side would make of it, on inputs like the plan's. ``branches``: data may
    decide on the path. Raises Disagreement, and CutRefused where this side would not cut.
    """
    if crossing.plan_digest != plan.digest:
        if branches:
            return  # another path through the model, taken for this input's data: its layers are its own
        raise Disagreement(
            "plan: on inputs of these shapes the client's model ran other operations or layers than this side's, "
            "and it does not branch on data: the code differs"
        )
    cut = crossing.layer_id
    try:
        layer = plan.resolve(cut)
    except UnknownLayer as error:
        raise Disagreement(f"the request's cut: {error}") from error
    name = layer.name if layer else "input"
    if name != crossing.layer_name:
        raise Disagreement(f'layer {cut} is "{name}" here, and "{crossing.layer_name}" in the request')
    plan.cutting(cut)  # raises CutRefused where this side would not cut
    here = plan.frontier_bytes(cut)
    # A client that knows more paths through the model than this plan sends what those read, too, but never less;
    # before the first layer, who knows nothing of the model sends all inputs.
    may_be_more = branches or cut < 0
    if crossing.payload_bytes < here or (crossing.payload_bytes > here and not may_be_more):
        raise Disagreement(
            f"after {name} {here} bytes cross by this side's plan, {crossing.payload_bytes} by the request"
        )


def bytes_of(model: nn.Module) -> int:
    """Memory of its parameters and buffers; what two share counts once."""
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage() for one in (*model.parameters(), *model.buffers())
    }
    return sum(one.nbytes() for one in storages.values())


def about(device: torch.device) -> dict[str, str]:
    """Versions, device and kind of machine, for messages, logs, and a client that compares answers."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"python": platform.python_version(), "device": f"{device} ({where})", **kind(device)}
