"""Whether a module is row-wise: the last dimension is computed with, and no row of the others sees another row.

That its Python writes no state is for `purity` to say. Here the module runs on random rows. No kernel may draw random
numbers, decide by values, give integers or write to what was there: then one run shows what every run does. A row of
NaN must stay the only one: NaN survives all arithmetic, so that it would show in what another row read. And rows alone,
together and in another order must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.tensors import tensors_in

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
