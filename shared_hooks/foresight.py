"""Can the form of a kernel's results be worked out on the meta device? Asked of every kernel that a plan sees.

Where the answer is no (there is no such kernel, it wants data, or it says something else than what came out), the
tail's side is told the result's form (`crossing.Given`) instead of finding it. The answer is kept by the kernel, the
forms of its tensors and its other arguments, so that a loop asks once.
"""

from __future__ import annotations

from typing import Any

import torch

from shared_hooks.operations import arguments_of, literals_of

MOST = 20_000


class Foresight:
    """Remembers answers for one recording."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[Any, ...]] | None] = {}

    def foresees(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Whether the meta device gives the forms of ``result``. To be asked before the arguments change their form."""
        tensors = arguments_of(args, kwargs)
        key = func, tuple((t.shape, t.stride(), t.dtype) if _plain(t) else None for t in tensors), _told(args, kwargs)
        if key not in self._known:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = _worked_out(func, args, kwargs)
        found = self._known[key]
        return found is not None and found == [_form(tensor) for tensor in arguments_of((result,), {})]


def on_meta(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """The same arguments on the meta device; one object stays one object. Raises `TypeError` for what it has not."""
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            if not _plain(value):
                raise TypeError("a sparse or quantised tensor")
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            known[id(value)] = value, made
        return known[id(value)][1]
    if isinstance(value, (list, tuple)):
        return type(value)(on_meta(item, known) for item in value)
    if isinstance(value, dict):
        return {key: on_meta(item, known) for key, item in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


def _told(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return repr(literals_of((args, kwargs)))


def _worked_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, ...]] | None:
    if torch.Tag.inplace_view in func.tags:
        return None
    known: dict[int, tuple[Any, Any]] = {}
    try:
        result = func(*on_meta(args, known), **on_meta(kwargs, known))
    except Exception:  # no kernel, or one that wants data
        return None
    return [_form(tensor) for tensor in arguments_of((result,), {})]
