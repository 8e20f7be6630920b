"""How much memory one step may take. Sizes are told by the edge, and a mask of lengths that a stranger names, squared,
would be all the memory there is.

Every kernel's result is foreseen on the meta device before it runs. That costs, so it is done only for steps whose
largest size is beyond twice that of the steps that were looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.errors import TooLarge
from shared_hooks.forward import FORM_ONLY, arguments_of, call_key, on_meta
from shared_hooks.generation.forms import Form, Node
from shared_hooks.generation.ghost import Ghost

STEP_BYTES = 4 << 30


class Allowance(TorchDispatchMode):
    """Raises `TooLarge` before a kernel whose result, with those before it, is beyond ``most`` bytes."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = self._most = most
        self._sizes: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ghostly = any(type(tensor) is Ghost for tensor in arguments_of(args, kwargs))
        if (not ghostly or func._schema.name in FORM_ONLY) and not _is_view(func):
            key = call_key(func, args, kwargs)
            if key not in self._sizes:
                self._sizes[key] = _size(func, args, kwargs)
            self._left -= self._sizes[key]
            if self._left < 0:
                raise TooLarge(f"with inputs and a state of these sizes a step takes more than {self._most >> 20} MiB")
        return func(*args, **kwargs)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(result.alias_info is not None for result in returns)


def _size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of what a kernel gives; of some that nobody can foresee, of all it is given."""
    known: dict[int, tuple[Any, Any]] = {}
    try:
        found = func(*on_meta(args, known), **{"device": torch.device("meta"), **on_meta(kwargs, known)})
    except Exception:
        try:
            found = func(*on_meta(args, known), **on_meta(kwargs, known))
        except Exception:  # it has no such kernel, or needs data
            found = [one for one in arguments_of(args, kwargs) if type(one) is not Ghost]
    return sum(tensor.numel() * tensor.itemsize for tensor in arguments_of((found,), {}))


class Seen:
    """The sizes up to which steps of one tail need no look: of private inputs, of what is told of a state."""

    def __init__(self) -> None:
        self.inputs = self.state = 0


class Extents:
    """How large a session's inputs and its state are said to be. ``most``: bytes that one step may take. ``seen``: of
    all sessions of the tail, since what a step of some sizes takes is the same in each.
    """

    def __init__(self, most: int = STEP_BYTES, seen: Seen | None = None) -> None:
        self._most = most
        self._inputs = self._state = 0
        self._seen = Seen() if seen is None else seen
        self._looked = False

    def begin(self, elements: int) -> None:
        """A forward begins; the largest private input has so many elements."""
        self._inputs = elements
        self._looked = False

    def state(self, forms: Iterable[Form]) -> None:
        """This was told of the state."""
        self._state = max(self._state, extent_of(forms))

    def around(self) -> AbstractContextManager[Any]:
        """For the step, or the rest of it: a look at what it takes, where that is new."""
        if self._looked or (self._inputs <= self._seen.inputs and self._state <= self._seen.state):
            return nullcontext()
        self._looked = True
        return Allowance(self._most)

    def passed(self) -> None:
        """The step was made."""
        if self._looked:
            self._seen.inputs = max(self._seen.inputs, 2 * self._inputs)
            self._seen.state = max(self._seen.state, 2 * self._state)

    def copied(self) -> Extents:
        """For a fork, and for a step that may fail."""
        made = Extents(self._most, self._seen)
        made._inputs, made._state = self._inputs, self._state
        return made


def extent_of(forms: Iterable[Form]) -> int:
    """The largest size or number in some forms."""
    most = 0
    for form in forms:
        if isinstance(form, Node):
            most = max(most, extent_of(form.forms.values()))
        elif form is not None and form[0] == "m":
            most = max(most, *form[1], 0)
        elif form is not None and form[0] == "v" and type(form[1]) is int:
            most = max(most, abs(form[1]))
        elif form is not None and form[0] == "i":
            most = max(most, _largest(form[2]))
    return most


def _largest(values: Any) -> int:
    return max((_largest(one) for one in values), default=0) if isinstance(values, list) else abs(int(values))
