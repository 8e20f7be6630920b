"""Compare every cut of a model, through bytes, with the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_hooks.crossing import EarlyOutput, Parcel
from shared_hooks.errors import IsthmusError
from shared_hooks.forward import run_plain
from shared_hooks.planning import INPUT, Cut, LayerInfo, Plan
from shared_hooks.report import Report
from shared_hooks.tensors import Buffers, copied, identical

Forward = Callable[..., Any]


def verify(
    model: nn.Module,
    forward: Forward,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_cut: Callable[[int, int], None] | None,
) -> Report:
    """Every cut of ``plan`` on these inputs; ``forward`` runs heads and tails.

    A cut that differs is refused from then on.
    """
    random_state = torch.get_rng_state()
    buffers = Buffers(model)

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        # models may write to their inputs and buffers, and draw random numbers: every run begins alike
        torch.set_rng_state(random_state)
        buffers.restore()
        return copied(args, kwargs)

    whole = run_plain(model, *fresh())
    found: dict[str, list[LayerInfo]] = {"exact": [], "refused": [], "differing": []}
    input_exact = False
    for done, cut in enumerate([INPUT, *range(len(plan.layers))]):
        info = plan.resolve(cut)
        if info is None:
            input_exact = _is_exact(forward, cut, fresh(), whole)
        elif not info.can_split:
            found["refused"].append(info)
        elif _is_exact(forward, cut, fresh(), whole):
            found["exact"].append(info)
        else:
            plan.refuse(cut, "verify found that the tail differs from the whole model")
            found["differing"].append(info)
        if on_cut is not None:
            on_cut(done + 1, len(plan.layers) + 1)
    fresh()
    differing = tuple(found["differing"])
    return Report(tuple(found["exact"]), tuple(found["refused"]), differing, input_exact, _unsendable(whole))


def _unsendable(output: Any) -> str:
    """Why a server could not send this answer; nothing where it could."""
    try:
        Parcel.of_value(output)
    except IsthmusError as error:
        return str(error)
    return ""


def _is_exact(forward: Forward, cut: Cut, inputs: tuple[tuple[Any, ...], dict[str, Any]], whole: Any) -> bool:
    args, kwargs = inputs
    try:
        early = forward(*args, end=cut, **kwargs)
        output = forward(EarlyOutput.from_bytes(early.to_bytes(), max_bytes=1 << 40), start=cut)
    except Exception:  # whatever it is, the cut does not give the model's answer
        return False
    return identical(whole, output)
