"""A bound on the memory that kernels take where sizes depend on what nobody could foresee.

Each kernel's result is worked out on the meta device before the kernel runs, once for calls of the same form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.errors import TooLarge
from shared_hooks.forward.foresight import call_key, on_meta
from shared_hooks.forward.operations import arguments_of

PRUNED_AT = 4096
"""Results that are remembered before those that are gone are dropped."""


class Allowance(TorchDispatchMode):
    """Raises `TooLarge` before a kernel whose result is beyond ``most`` bytes together with the earlier ones.

    ``alive``: only with those of them whose memory is still in use, else with all. A kernel that was refused is refused
    for good: `failure` says so, also where the model's own code caught the error. Use as a context manager.
    """

    def __init__(self, most: int, what: str, *, alive: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most
        self._what = what
        self._alive = alive
        self.spent = 0
        self.failure: TooLarge | None = None
        self._sizes: dict[Any, int] = {}
        self._results: list[tuple[StorageWeakRef, int]] = []

    def counts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the kernel takes memory for its result."""
        return not _is_view(func)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.counts(func, args, kwargs):
            return func(*args, **kwargs)
        size = self._size(func, args, kwargs)
        self.spent += size
        if self.spent > self._most or len(self._results) > PRUNED_AT:
            self._prune(size)
            if self.spent > self._most or self.failure is not None:
                self.failure = self.failure or TooLarge(f"{self._what} more than {self._most >> 20} MiB")
                raise TooLarge(str(self.failure))
        found = func(*args, **kwargs)
        if self._alive:
            for tensor in arguments_of((found,), {}):
                if tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    self._results.append((StorageWeakRef(storage), storage.nbytes()))
        return found

    def _prune(self, size: int) -> None:
        if self._alive:
            self._results = [one for one in self._results if not one[0].expired()]
            self.spent = size + sum(nbytes for _, nbytes in self._results)

    def _size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        by_value = _BY_VALUE.get(func._schema.name)
        if by_value is not None:
            return by_value(*args, **kwargs)
        key = call_key(func, args, kwargs)
        if key not in self._sizes:
            self._sizes[key] = _size(func, args, kwargs)
        return self._sizes[key]


def _is_view(func: Any) -> bool:
    """Whether all that a kernel gives is memory that was there."""
    returns = func._schema.returns
    return (
        bool(returns)
        and all(result.alias_info is not None for result in returns)
        and func._schema.name not in _BY_VALUE
    )


def _resized(tensor: torch.Tensor, size: Any, **_: Any) -> int:
    nbytes = tensor.itemsize
    for one in size:
        nbytes *= int(one)
    return max(0, nbytes - tensor.untyped_storage().nbytes())


def _counted(tensor: torch.Tensor, weights: Any = None, minlength: int = 0) -> int:
    return 8 * max(int(minlength), int(tensor.max()) + 1 if tensor.numel() else 0)


def _repeated(repeats: torch.Tensor, output_size: int | None = None, **_: Any) -> int:
    return 8 * int(repeats.sum())


_BY_VALUE: dict[str, Callable[..., int]] = {
    "aten::resize_": _resized,
    "aten::bincount": _counted,
    "aten::repeat_interleave": _repeated,
}
"""Kernels whose results are as large as their arguments' values say."""


def _size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of what a kernel gives; of some that nobody can foresee, of all it is given."""
    known: dict[int, tuple[Any, Any]] = {}
    try:
        found = func(*on_meta(args, known), **{"device": torch.device("meta"), **on_meta(kwargs, known)})
    except Exception:
        try:
            found = func(*on_meta(args, known), **on_meta(kwargs, known))
        except Exception:  # it has no such kernel, or needs data
            found = arguments_of(args, kwargs)
    return sum(tensor.numel() * tensor.itemsize for tensor in arguments_of((found,), {}))
