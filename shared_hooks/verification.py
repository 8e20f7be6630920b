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
from shared_hooks.tensors import Buffers, copied, identical, tensors_in

Forward = Callable[..., Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
OnCut = Callable[[int, int, str, str], None]
"""(cuts done, cuts in all, the cut's name, what was found: one of the following)"""
EXACT, REFUSED, DIFFERS = "exact", "refused", "differs"


def verify(
    model: nn.Module,
    forward: Forward,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_cut: OnCut | None,
    cold: tuple[Callable[[], nn.Module], Forward] | None = None,
    first: Cut = INPUT,
) -> Report:
    """Every cut of ``plan`` on these inputs, ``first`` before the others; ``forward`` runs heads and tails.

    ``cold``: what makes the model once more, as it is before it has run, and what runs tails of such a one. Then
    answers are compared with those of models that never ran, tails begin with other generators' states, and inputs that
    are drawn are tried beside the given ones: of those a cut may be refused by name. A cut that differs is refused from
    then on.
    """
    random_state = torch.get_rng_state()
    buffers = Buffers(model)

    def fresh(inputs: Inputs) -> Inputs:
        # models may write to their inputs and buffers, and draw random numbers: every run begins alike
        torch.set_rng_state(random_state)
        buffers.restore()
        return copied(*inputs)

    def whole(inputs: Inputs) -> Any:
        made = model if cold is None else cold[0]()  # before the generators stand where a run begins
        return run_plain(made, *fresh(inputs))

    given: Inputs = args, kwargs
    tried = [(given, whole(given), False)]
    if cold is not None and (other := _drawn(given)) is not None:
        tried.append((other, whole(other), True))

    def is_exact(cut: Cut) -> bool:
        return all(
            _is_exact(forward, forward if cold is None else cold[1], cut, fresh(inputs), wanted, may_refuse=drawn)
            for inputs, wanted, drawn in tried
        )

    found: dict[str, list[LayerInfo]] = {EXACT: [], REFUSED: [], DIFFERS: []}
    input_exact = False
    order: list[Cut] = [INPUT, *range(len(plan.layers))]
    begin = plan.resolve(first)
    order.sort(key=lambda cut: cut != (INPUT if begin is None else begin.layer_id))
    for done, cut in enumerate(order):
        info = plan.resolve(cut)
        verdict = REFUSED if info is not None and not info.can_split else EXACT if is_exact(cut) else DIFFERS
        if info is None:
            input_exact = verdict == EXACT
        else:
            found[verdict].append(info)
            if verdict == DIFFERS:
                plan.refuse(cut, "verify found that the tail differs from the whole model")
        if on_cut is not None:
            on_cut(done + 1, len(order), INPUT if info is None else info.name, verdict)
    fresh(given)
    kept = {verdict: tuple(sorted(infos, key=lambda info: info.layer_id)) for verdict, infos in found.items()}
    return Report(kept[EXACT], kept[REFUSED], kept[DIFFERS], input_exact, _unsendable(tried[0][1]))


def _drawn(inputs: Inputs) -> Inputs | None:
    """Inputs of the same form, with other numbers wherever they are floating point; None where none are."""
    args, kwargs = copied(*inputs)
    generator = torch.Generator().manual_seed(0)
    changed = False
    for tensor in tensors_in((args, kwargs)):
        if tensor.is_floating_point() and tensor.numel():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            tensor.copy_(noise * tensor.std(correction=0) + tensor.mean())
            changed = True
    return (args, kwargs) if changed else None


def _unsendable(output: Any) -> str:
    """Why a server could not send this answer; nothing where it could."""
    try:
        Parcel.of_value(output)
    except IsthmusError as error:
        return str(error)
    return ""


def _is_exact(head: Forward, tail: Forward, cut: Cut, inputs: Inputs, whole: Any, *, may_refuse: bool) -> bool:
    args, kwargs = inputs
    try:
        early = head(*args, end=cut, **kwargs)
        data = early.to_bytes()
        if tail is not head:
            torch.manual_seed(1)  # another process's generators stand anywhere
        output = tail(EarlyOutput.from_bytes(data, max_bytes=1 << 40), start=cut)
    except IsthmusError:  # whatever it is, the cut does not give the model's answer
        return may_refuse
    except Exception:
        return False
    return identical(whole, output)
