"""A gate stands for the forward of one module: calls that run in lock-step meet there and go through as one.

It lies below the module's shim, so that sessions and observers see each call as it would be alone. What runs outside of
a lock-step goes straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.forward import UNSEEN, Session
from shared_hooks.modules import Shim, running
from shared_hooks.tensors import tensors_in

# Whether a module is row-wise: the last dimension is computed with, and no row of the others sees another row.
#
# That its Python writes no state is for `purity` to say. Here the module runs on random rows. No kernel may draw
# random numbers, decide by values, give integers or write to what was there: then one run shows what every run does.
# A row of NaN must stay the only one: NaN survives all arithmetic, so that it would show in what another row read.
# And rows alone, together and in another order must agree.

ROUNDINGS = 8
"""How far results may differ, by root mean square, in units of the dtype's rounding: a matrix product of one row and
one of several rows add up in different orders."""

_DECIDES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


class _Decides(Exception):
    """A kernel whose work depends on values, not on shapes alone, or that writes to what it was not given to write."""


class _Kernels(TorchDispatchMode):
    """Looks at all kernels of a call, before they run. Raises `_Decides`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, torch.Tensor] = {}
        """What the call has made, by storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(tensors_in((args, kwargs or {})))
        storages = {_storage(tensor) for tensor in given}
        if not _DECIDES.isdisjoint(func.tags) or (func._schema.is_mutable and not storages <= self._made.keys()):
            raise _Decides(str(func))
        result = func(*args, **(kwargs or {}))
        floating = any(tensor.dtype.is_floating_point for tensor in given)
        for tensor in tensors_in(result):
            if floating and not tensor.dtype.is_floating_point:
                raise _Decides(str(func))
            if _storage(tensor) not in storages:
                self._made[_storage(tensor)] = tensor
        return result


def is_row_wise(forward: Callable[[torch.Tensor], Any], like: torch.Tensor) -> bool:
    """Whether ``forward`` is, for floating-point tensors of the rank, last dimension, dtype and device of ``like``.

    It runs about ten times on up to six rows of random numbers; ``like`` is not read. What it raises means no.
    """
    if not like.dtype.is_floating_point or like.dim() < 2:
        return False

    def looked_at(rows: torch.Tensor) -> Any:
        with _Kernels():
            return forward(rows)

    try:
        with torch.no_grad():
            return _holds(looked_at, like)
    except Exception:
        return False


def _holds(forward: Callable[[torch.Tensor], Any], like: torch.Tensor) -> bool:
    ones = (1,) * (like.dim() - 2)
    width = like.shape[-1]
    random = torch.randn((6, *ones, width), generator=torch.Generator().manual_seed(0))
    rows = random.to(like.device, like.dtype)
    together = forward(rows)
    if type(together) is not torch.Tensor or together.shape[:-1] != rows.shape[:-1]:
        return False
    if not together.dtype.is_floating_point or _storage(together) == _storage(rows):
        return False
    for number in (0, 3, 5):
        others = [row for row in range(6) if row != number]
        altered = rows.clone()
        altered[number] = torch.nan
        if not torch.equal(forward(altered)[others], together[others]):
            return False
    order = [3, 1, 5, 0, 4, 2]
    one_two_three = torch.cat([forward(rows[:1]), forward(rows[1:3]), forward(rows[3:])])
    pairs = [(forward(rows[order]), together[order]), (one_two_three, together)]
    if like.dim() > 2:
        block = rows.reshape(2, 3, *ones[1:], width)
        pairs.append((forward(block).reshape(together.shape), together))
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (rows, together))
    return all(_agree(one, other, eps) for one, other in pairs)


def _agree(one: torch.Tensor, other: torch.Tensor, eps: float) -> bool:
    apart, scale = (value.double().square().mean().sqrt() for value in (one - other, other))
    return one.shape == other.shape and bool(apart <= ROUNDINGS * eps * scale)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


Form = tuple[int, int, torch.dtype, torch.device]
"""Rank, last dimension, dtype and device of rows."""

LOOKS = 8
"""How often a gate is looked at that was not quiet: a model may build something in its first steps."""

_copied_parts: Any = torch.split_with_sizes_copy  # annotated for its other variant, with out=


class Traveller(Protocol):
    """One of the calls in lock-step."""

    def arrive(self, gate: Gate, form: Form, rows: torch.Tensor) -> Any:
        """What the module gives for ``rows``."""

    @property
    def may_meet(self) -> bool:
        """Whether others are under way, and nothing is set for the thread that would hold for them, too."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether the model's Python state is as it was before all calls: what this one has written there would be
        overwritten by the others while it waits.
        """
        ...


travelling: ContextVar[Traveller | None] = ContextVar("isthmus_travelling", default=None)


@contextmanager
def nobodys() -> Iterator[None]:
    """What runs in the block is of no session and in no lock-step: several calls' rows, or none's."""
    tokens = travelling.set(None), running.set(UNSEEN)
    try:
        yield
    finally:
        travelling.reset(tokens[0])
        running.reset(tokens[1])


class Gate:
    """Stands for the forward of one module that writes no state. ``number``: its place in the model; later ones have
    lower ones.
    """

    __slots__ = ("_inside", "_known", "_looks", "_quiet", "forward", "module", "number", "users")

    def __init__(self, module: nn.Module, forward: Callable[..., Any], number: int) -> None:
        self.module = module
        self.forward = forward
        self.number = number
        self.users = 0
        self._inside = [child for child in module.modules() if child is not module]
        self._known: dict[Form, bool] = {}
        self._quiet = False
        self._looks = LOOKS

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traveller = travelling.get()
        if traveller is None or kwargs or len(args) != 1 or not traveller.may_meet:
            return self.forward(*args, **kwargs)
        (rows,) = args
        if type(rows) is not torch.Tensor or rows.dim() < 2 or (self._inside and isinstance(running.get(), Session)):
            return self.forward(rows)  # a session counts the layers inside
        form = rows.dim(), rows.shape[-1], rows.dtype, rows.device
        known = self._known.get(form)
        if known is None:
            if self._is_watched:
                return self.forward(rows)
            with nobodys():
                known = self._known[form] = is_row_wise(self.forward, rows)
        if not known or not self._is_quiet(traveller):
            return self.forward(rows)
        return traveller.arrive(self, form, rows)

    def look_again(self) -> None:
        """The model's Python state has changed: whoever comes next is looked at again."""
        self._quiet = False

    def _is_quiet(self, traveller: Traveller) -> bool:
        if not self._quiet and self._looks:
            self._quiet = traveller.is_quiet
            self._looks -= not self._quiet
        return self._quiet

    def through(self, several: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The module's results for rows of one form, each in memory of its own; None where they must go alone.

        Raises what the module raises.
        """
        if self._is_watched:
            return None
        alike = all(rows.shape[1:] == several[0].shape[1:] for rows in several)
        ones = (1,) * (several[0].dim() - 2)
        flat = several if alike else [rows.reshape(-1, *ones, rows.shape[-1]) for rows in several]
        found = self.forward(torch.cat(list(flat)))
        parts: list[torch.Tensor] = list(_copied_parts(found, [rows.shape[0] for rows in flat]))
        return (
            parts if alike else [part.reshape(*rows.shape[:-1], -1) for part, rows in zip(parts, several, strict=True)]
        )

    @property
    def _is_watched(self) -> bool:
        """Whether somebody looks at calls inside, and must not be shown the rows of others."""
        for module in self._inside:
            shim = module.__dict__.get("forward")
            if module._forward_hooks or module._forward_pre_hooks or (isinstance(shim, Shim) and shim.watching):
                return True
        return False
