"""Compare every cut of a model, through bytes, with the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from shared_hooks.crossing import EarlyOutput, Parcel
from shared_hooks.errors import IsthmusError, ModelFailed
from shared_hooks.forward import run_plain
from shared_hooks.middle import Gone
from shared_hooks.modules import INPUT
from shared_hooks.planning import Cut, LayerInfo, Plan
from shared_hooks.showing import html_table, panel, size, strip, summary_of
from shared_hooks.state import Dice
from shared_hooks.tensors import Buffers, copied, identical, tensors_in

# The result of ``verify``: every cut of a model against the whole model.


@dataclass(frozen=True)
class Report:
    """Cuts that are bit-exact, that the plan refuses (with the reason), and that differ (a defect).

    ``unsendable``: why the model's output cannot be an answer, at any cut; empty if it can.
    """

    exact: tuple[LayerInfo, ...]
    refused: tuple[LayerInfo, ...]
    differing: tuple[LayerInfo, ...]
    input_exact: bool
    unsendable: str = ""

    def __repr__(self) -> str:
        differing = f"{len(self.differing)} differ: " + " ".join(one.name for one in self.differing[:8])
        return summary_of(
            self,
            "ok" if self.ok else "NOT ok",
            f"{len(self.exact)} cuts exact",
            f"{len(self.refused)} refused",
            differing if self.differing else "",
            "" if self.input_exact else "the cut before the first layer differs",
            f"the output cannot be sent: {self.unsendable}" if self.unsendable else "",
        )

    def _repr_html_(self) -> str:
        reported = {
            **{one.name: (one, "exact") for one in self.exact},
            **{one.name: (one, f"refused: {one.reason}") for one in self.refused},
            **{one.name: (one, "DIFFERS from the whole model") for one in self.differing},
        }
        rows = [
            (str(one.layer_id), name, one.layer_type, size(one.frontier_bytes), found)
            for name, (one, found) in sorted(reported.items(), key=lambda item: item[1][0].layer_id)
            if found != "exact"  # counted in the summary
        ]
        parts = (("exact", self.exact), ("refused", self.refused), ("DIFFERING", self.differing))
        counts = [(name, float(len(layers))) for name, layers in parts]
        title = f"{'ok' if self.ok else 'NOT ok'}: every cut against the whole model, bit for bit"
        if self.unsendable:
            title = f"{title}; the output cannot be sent: {self.unsendable}"
        return panel(
            title if self.input_exact else f"{title}; the cut before the first layer differs",
            strip(counts, f"{len(reported)} cuts", [str(len(layers)) for _, layers in parts]),
            html_table(("id", "name", "type", "crosses", "found"), rows, (0, 3)) if rows else "",
        )

    @property
    def ok(self) -> bool:
        """Whether no cut's answer differs from the whole model's, and the answer can be sent."""
        return not self.differing and self.input_exact and not self.unsendable

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "ok": self.ok,
            "input_exact": self.input_exact,
            "unsendable": self.unsendable,
            "cuts": len(self.exact) + len(self.refused) + len(self.differing),
            "exact": [info.name for info in self.exact],
            "refused": [asdict(info) for info in self.refused],
            "differing": [asdict(info) for info in self.differing],
        }


Forward = Callable[..., Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
OnCut = Callable[[int, int, str, str], None]
"""(cuts done, cuts in all, the cut's name, the verdict: one of the following)"""
Make = Callable[[], nn.Module]
EXACT, REFUSED, DIFFERS = "exact", "refused", "differs"


class Cold(NamedTuple):
    """Runs models that never ran before. Both raise an IsthmusError for a refusal, and `Gone` if there is no answer."""

    whole: Callable[[tuple[Any, ...], dict[str, Any], Dice], Any]
    """Returns the output of a new model, whose generators start like this."""
    tail: Callable[[bytes], Any]
    """Returns a tail's output for `EarlyOutput.to_bytes`; its generators have another state."""


def cold_here(make: Make, tail: Forward) -> Cold:
    """Run cold models in this process, where they share its globals and classes."""

    def whole(args: tuple[Any, ...], kwargs: dict[str, Any], dice: Dice) -> Any:
        made = make()
        dice.restore()  # where a run begins
        return run_plain(made, args, kwargs)

    def cold_tail(data: bytes) -> Any:
        torch.manual_seed(1)
        return tail(EarlyOutput.from_bytes(data, max_bytes=1 << 40))

    return Cold(whole, cold_tail)


def verify(
    model: nn.Module,
    forward: Forward,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_cut: OnCut | None,
    cold: Cold | None = None,
    first: Cut = INPUT,
    only: Sequence[Cut] | None = None,
) -> Report:
    """Verify every cut of ``plan``, or ``only`` these, ``first`` before the others; ``forward`` runs heads and tails.

    ``cold``: runs the whole model and tails of it on models that never ran. Then generated inputs are tried beside the
    given ones: for those a cut may be refused by name. A cut that differs is refused from then on.
    """
    dice = Dice()
    buffers = Buffers(model)

    def fresh(inputs: Inputs) -> Inputs:
        # models may write to their inputs and buffers, and draw random numbers: every run begins alike
        dice.restore()
        buffers.restore()
        return copied(*inputs)

    def whole(inputs: Inputs) -> Any:
        return run_plain(model, *fresh(inputs)) if cold is None else cold.whole(*fresh(inputs), dice)

    def tail(data: bytes, cut: Cut) -> Any:
        if cold is not None:
            return cold.tail(data)
        return forward(EarlyOutput.from_bytes(data, max_bytes=1 << 40), start=cut)

    given: Inputs = args, kwargs
    tried = [(given, whole(given), False)]
    if cold is not None and (other := _drawn(given)) is not None:
        tried.append((other, whole(other), True))

    def is_exact(cut: Cut) -> bool:
        return all(
            _is_exact(forward, tail, cut, fresh(inputs), wanted, may_refuse=drawn) for inputs, wanted, drawn in tried
        )

    found: dict[str, list[LayerInfo]] = {EXACT: [], REFUSED: [], DIFFERS: []}
    input_exact = False
    cuts = plan.cuts
    order: list[Cut] = [INPUT, *(info.name if info.is_block else info.layer_id for info in cuts)]
    begin = plan.cut_at(*_named(plan.resolve(first)))
    order.sort(key=lambda cut: cut != begin)
    order = order if only is None else [INPUT, *only]
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
    places = {info.name: number for number, info in enumerate(cuts)}  # sets come last
    by_place = partial(sorted, key=lambda info: places.get(info.name, len(places)))
    kept = {verdict: tuple(by_place(infos)) for verdict, infos in found.items()}
    return Report(kept[EXACT], kept[REFUSED], kept[DIFFERS], input_exact, _unsendable(tried[0][1]))


def _named(info: LayerInfo | None) -> tuple[int, str]:
    return (-1, INPUT) if info is None else (info.layer_id, info.name)


def _drawn(inputs: Inputs) -> Inputs | None:
    """Return inputs of the same form, with other numbers in float tensors; None if there are none."""
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
    """Return why a server could not send this answer; empty if it could."""
    try:
        Parcel.of_value(output)
    except IsthmusError as error:
        return str(error)
    return ""


def _is_exact(
    head: Forward, tail: Callable[[bytes, Cut], Any], cut: Cut, inputs: Inputs, whole: Any, *, may_refuse: bool
) -> bool:
    args, kwargs = inputs
    try:
        output = tail(head(*args, end=cut, **kwargs).to_bytes(), cut)
    except Gone:
        raise
    except ModelFailed:
        return False
    except IsthmusError:  # whatever fails, the cut does not give the model's answer
        return may_refuse
    except Exception:
        return False
    return identical(whole, output)
