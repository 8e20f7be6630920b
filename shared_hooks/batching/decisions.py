"""What no trial on random data can show of rows: a tail in which data decide, and rows may meet where they do so.

A mixture of experts with capacity gives each row its place until an expert is full: random rows never fill it, and rows
that somebody chose do. So a proof ends where integers or truth values that come of floating point numbers are used for
more than choosing element by element (counted, sorted, taken as places) or given as results, where a cumulative or
sorting kernel runs along the rows, and where a size is neither the same for all numbers of rows nor in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.errors import CutRefused
from shared_hooks.forward import arguments_of

_ORDERS = frozenset(
    """
    cumsum cumprod cummax cummin logcumsumexp sort argsort topk kthvalue median nanmedian mode cumsum_ cumprod_ _cummax
    cumulative_trapezoid unique_dim unique_consecutive
    """.split()
)
# They give a copy, a form or a part of what they are given.
_PLAIN = frozenset(
    """
    clone copy_ _to_copy where masked_fill masked_fill_ detach alias cat stack constant_pad_nd repeat expand_copy
    lift_fresh contiguous is_same_size
    """.split()
)


class Decisions(TorchDispatchMode):
    """Watches one tail. Raises CutRefused, naming the kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[tuple[str, tuple[int, ...]]] = []
        """What kernels gave: names, and sizes of results; of those that put in order, the length of what they do."""
        self._decided: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        given = arguments_of(args, kwargs)
        decided = [one for one in given if _key(one) in self._decided]
        chooses = torch.Tag.pointwise in func.tags or name in _PLAIN
        is_view = all(one.alias_info is not None for one in func._schema.returns)
        if decided and not chooses and not is_view:
            raise CutRefused(f"{name}() takes integers or truth values that come of data: rows may meet there")
        found = func(*args, **kwargs)
        made = arguments_of((found,), {})
        floats = any(one.is_floating_point() or one.is_complex() for one in given)
        all_decided = bool(decided) and len(decided) == len(given)
        for one in made:
            is_number = one.is_floating_point() or one.is_complex()
            if (not is_number and (floats or decided)) or (is_number and all_decided):
                self._decided[_key(one)] = one
        length = (given[0].shape[_dim(func, args, kwargs)],) if name in _ORDERS and given and given[0].dim() else ()
        self.sizes += [(name, (*one.shape, *length)) for one in made]
        return found

    def check_result(self, tensors: Sequence[torch.Tensor]) -> None:
        """Of the tail. Raises CutRefused."""
        if any(_key(one) in self._decided for one in tensors):
            raise CutRefused("it gives integers or truth values that come of data, which rounding may change")


def check_sizes(seen: Sequence[Decisions], rows: Sequence[int]) -> None:
    """Of tails of so many ``rows`` each; the first, of one row, may take a path of its own. Raises CutRefused."""
    names = [[name for name, _ in one.sizes] for one in seen]
    if rows[0] == 1 and names[0] != names[1]:
        seen, rows, names = seen[1:], rows[1:], names[1:]
    if any(one != names[0] for one in names):
        raise CutRefused("it takes another path for another number of rows")
    for several in zip(*(one.sizes for one in seen), strict=True):
        name = several[0][0]
        if len({len(one[1]) for one in several}) > 1:
            raise CutRefused("it takes another path for another number of rows")
        for number, sizes in enumerate(zip(*(one[1] for one in several), strict=True)):
            if len(set(sizes)) == 1:
                continue
            shares = {size * rows[0] == sizes[0] * count for size, count in zip(sizes, rows, strict=True)}
            if shares != {True}:
                raise CutRefused(f"{name}() gives a size of {sizes} for {tuple(rows)} rows")
            if name in _ORDERS and number == len(several[0][1]) - 1:
                raise CutRefused(f"{name}() runs along the rows")


def _dim(func: Any, args: Any, kwargs: Any) -> int:
    """The dimension that a kernel runs along; the last, if it says nothing."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            value = args[number] if number < len(args) else kwargs.get("dim", argument.default_value)
            return value if isinstance(value, int) else -1
    return -1


def _key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(tensor)
