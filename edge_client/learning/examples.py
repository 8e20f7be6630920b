"""Collect what crosses one cut for many inputs, the model's answers to them, and the rest of the model behind it.

Heads run once for each input. Training then works on batches: the rest of the model runs through the cut's own tail,
with gradients with respect to what crosses, on as many inputs at a time as one call of the model takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from edge_client.user_input import LoadedModel, NamedInput
from shared_hooks import WrappedModel
from shared_hooks.codecs import Grain
from shared_hooks.crossing import Crossing, EarlyOutput
from shared_hooks.crossing.parcel import storage_order
from shared_hooks.errors import CutRefused, InputMismatch, IsthmusError, SpecError
from shared_hooks.models.inputs import to_device
from shared_hooks.tensors import copied, flatten, unflatten

MAX_BYTES: Final = 2 << 30
"""Maximum memory of pieces and outputs; more inputs are not used."""
BATCH: Final = 64
BATCH_BYTES: Final = 64 << 20
_NEAR: Final = 1e-2
"""Relative error by which a batch may differ from its inputs one by one."""
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Examples:
    """``pieces``: of each piece that crosses (n, elements), in the order of memory; ``inputs``: of each tensor that the
    model takes (n, ...); ``outputs``: of each float tensor that it returns (n, ...), none if their shapes vary.
    ``used``: the indices of the inputs used: others have another shape, or were too many.
    """

    wrapped: WrappedModel
    crossing: Crossing
    pieces: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    used: tuple[int, ...]
    first: EarlyOutput
    template: EarlyOutput
    """What crosses of `batch` inputs at once."""
    batch: int

    def __len__(self) -> int:
        return len(self.used)

    @property
    def cut(self) -> str:
        return self.crossing.name

    @property
    def grains(self) -> tuple[Grain, ...]:
        """The layout of each piece of one input."""
        return self.crossing.grains

    def behind(self, pieces: Sequence[torch.Tensor], *, gradients: bool = True) -> list[torch.Tensor]:
        """Run the rest of the model on `batch` inputs' pieces (batch, elements) each; return its float outputs."""
        strided = []
        for flat, like in zip(pieces, self.template.pieces, strict=True):
            _, stride = storage_order(like)
            flat = flat.reshape(-1).to(like.dtype)
            flat = flat if flat.requires_grad else flat.clone()  # the tail may write to its memory
            strided.append(flat.as_strided(like.shape, stride))
        early = replace(self.template, pieces=tuple(strided), starts=(), disposable=True)
        return _floats(self.wrapped.tail(early, gradients=gradients))

    def batches(self, numbers: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield ``numbers`` in full batches; the last one is padded with the first ones."""
        for start in range(0, len(numbers), self.batch):
            some = numbers[start : start + self.batch]
            while len(some) < self.batch:
                some = torch.cat([some, numbers[: self.batch - len(some)]])
            yield some


def examples_of(
    loaded: LoadedModel,
    cut: str,
    items: Sequence[NamedInput],
    on_input: Callable[[], None] = lambda: None,
    *,
    answers: bool = True,
) -> Examples:
    """Run the heads of all ``items`` that cross in the first one's form. ``answers``: collect the model's outputs, too,
    and what `Examples.behind` needs.

    Raises UnknownLayer, CutRefused (the random state, or values that Python read, cross as well), InputMismatch, and
    what the model raises.
    """
    wrapped, device = loaded.wrapped, loaded.wrapped.device
    kept: list[tuple[EarlyOutput, list[torch.Tensor], list[torch.Tensor]]] = []
    used: list[int] = []
    first: Crossing | None = None
    calls: list[Call] = []
    nbytes = 0
    for number, item in enumerate(items):
        args, kwargs = item.read(loaded.spec)
        call = to_device(args, device), to_device(kwargs, device)
        on_input()
        try:
            own_args, own_kwargs = copied(*call)
            early = wrapped.head(cut, *own_args, **own_kwargs)
        except InputMismatch:
            raise
        except IsthmusError:
            if first is None:
                raise
            continue  # this input takes another path
        if first is None:
            first = early.crossing
            if early.generators or early.values:
                raise CutRefused(
                    f"after {first.layer_name} more crosses than tensors: what the model's Python reads of data, or "
                    "the state of random numbers; what is learnt there would be of one input"
                )
        if early.crossing.digest != first.digest or early.values:
            continue
        outputs = [one.detach().cpu().clone() for one in _floats(wrapped.tail(early))] if answers else []
        nbytes += early.nbytes + sum(one.nbytes for one in outputs)
        if nbytes > MAX_BYTES and kept:
            break
        own = replace(early, pieces=tuple(one.detach().cpu().clone() for one in early.pieces), starts=())
        kept.append((own, [one.cpu() for one in flatten(call)[1]], outputs))
        used.append(number)
        if len(calls) < BATCH:
            calls.append(call)
    if first is None:
        raise SpecError("there are no inputs to learn from")
    pieces = _stacked([[storage_order(one)[0] for one in early.pieces] for early, _, _ in kept])
    wanted = max(1, min(len(kept), BATCH, BATCH_BYTES // max(1, kept[0][0].nbytes)))
    forms = {tuple(one.shape for one in outputs) for _, _, outputs in kept}
    answered = (
        _stacked([one for _, _, one in kept]) if len(forms) == 1 else ()
    )  # boxes: their number differs between inputs
    made = Examples(
        wrapped, first, pieces, _stacked([one for _, one, _ in kept]), answered, tuple(used), kept[0][0], kept[0][0], 1
    )
    if not answered:  # there is nothing to run
        return replace(made, batch=wanted)
    return _batched(made, cut, calls[:wanted]) or made


def _batched(single: Examples, cut: str, calls: Sequence[Call]) -> Examples | None:
    """Return the same with a template for all of ``calls`` at once; None if the model does not take them so."""
    call = _together(calls)
    if call is None or len(calls) < 2:
        return None
    try:
        early = single.wrapped.head(cut, *call[0], **call[1])
        outputs = _floats(single.wrapped.tail(early))
    except Exception:  # a model for one input at a time may raise anything
        return None
    count = len(calls)
    flat = [storage_order(one)[0] for one in early.pieces]
    if early.values or early.generators or len(flat) != len(single.pieces) or len(outputs) != len(single.outputs):
        return None
    for many, one in ((flat, single.pieces), (outputs, single.outputs)):
        for found, own in zip(many, one, strict=True):
            if found.numel() != own[:count].numel() or not _is_near(found.cpu().reshape(-1), own[:count].reshape(-1)):
                return None
    return replace(single, template=replace(early, starts=()), batch=count)


def _together(calls: Sequence[Call]) -> Call | None:
    """Combine calls of one row each into a single call."""
    flat = [flatten(call) for call in calls]
    if any(one[0] != flat[0][0] for one in flat) or any(tensor.shape[:1] != (1,) for _, all in flat for tensor in all):
        return None
    if any(one.shape != like.shape for _, tensors in flat for one, like in zip(tensors, flat[0][1], strict=True)):
        return None
    joined = [torch.cat(list(tensors)) for tensors in zip(*(tensors for _, tensors in flat), strict=True)]
    args, kwargs = unflatten(flat[0][0], joined, lambda name: None)
    return tuple(args), dict(kwargs)


def _stacked(rows: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.stack(list(column)) for column in zip(*rows, strict=True))


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= _NEAR * b.norm() + 1e-6)


def _floats(output: Any) -> list[torch.Tensor]:
    return [one for one in flatten(output)[1] if one.is_floating_point()]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Disable gradients of the model's own parameters."""
    wanted = [one for one in model.parameters() if one.requires_grad]
    for one in wanted:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in wanted:
            one.requires_grad_(True)
