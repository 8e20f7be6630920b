"""How much memory one step may take. Sizes come from the edge, and a mask of lengths that a stranger names, squared,
would be all the memory there is.

Every kernel's result is foreseen on the meta device before it runs. That costs, so it is done once for steps that are
alike: of the same structure, every single size and number of the same order of magnitude (`magnitude`). Where sizes are
less than twice as large, what is made of them is less than `GROWTH` times as large; a step that would not fit then is
looked at each time.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from shared_hooks.forward import FORM_ONLY, Allowance, arguments_of
from shared_hooks.generation.remote_tensor import RemoteTensor

STEP_BYTES = 4 << 30
GROWTH = 16
"""What a product of four sizes grows by where each is doubled: rows, heads, and two lengths."""
MAX_SEEN = 4096


class StepAllowance(Allowance):
    """Placeholders take no memory, but for what is made in their form."""

    def __init__(self, most: int) -> None:
        super().__init__(most, "with inputs and a state of these sizes a step takes")

    def counts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        is_remote = any(type(tensor) is RemoteTensor for tensor in arguments_of(args, kwargs))
        return (not is_remote or func._schema.name in FORM_ONLY) and super().counts(func, args, kwargs)


class Seen:
    """The steps of one tail that were looked at, and took little enough for all that are alike. Any thread may call."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()  # digests: what they are of may be as long as a header
        self._lock = threading.Lock()

    def has(self, key: Any) -> bool:
        digest = _digest(key)
        with self._lock:
            found = digest in self._known
            if found:
                self._known.move_to_end(digest)
            return found

    def add(self, key: Any) -> None:
        digest = _digest(key)
        with self._lock:
            self._known[digest] = None
            while len(self._known) > MAX_SEEN:
                self._known.popitem(last=False)


class Extents:
    """Bounds one step: it is looked at where nothing like it was. ``most``: bytes that it may take."""

    def __init__(self, most: int, seen: Seen) -> None:
        self._most = most
        self._seen = seen
        self._keys: list[Any] = []
        self._allowance: StepAllowance | None = None

    def begin(self) -> None:
        """A forward begins."""
        self._keys, self._allowance = [], None

    def around(self, *reported: Any) -> AbstractContextManager[Any]:
        """For the rest of the forward, of which the edge has reported this: a look, if it is new."""
        key = (*(self._keys[-1] if self._keys else ()), *reported)
        self._keys.append(key)
        if self._allowance is not None or self._seen.has(key):
            return nullcontext()
        self._allowance = StepAllowance(self._most)
        return self._allowance

    def passed(self) -> None:
        """The step was made."""
        if self._allowance is not None and self._allowance.spent * GROWTH <= self._most:
            for key in self._keys:
                self._seen.add(key)


def _digest(key: Any) -> bytes:
    """A digest of tuples of numbers, text and sets of such. Equal keys may have several, where a set is ordered
    differently.
    """
    return hashlib.blake2b(repr(key).encode(), digest_size=16).digest()


def magnitude(value: Any) -> Any:
    """What is the same for values of one structure whose numbers are of the same sign and less than twice as large."""
    kind = type(value)
    if kind is int:
        return value.bit_length() if value >= 0 else -value.bit_length()
    if kind is str or value is None:
        return value
    if kind is bool:
        return str(value)
    if kind is float:
        return "f", math.copysign(1.0, value), *(math.frexp(value)[1:] if math.isfinite(value) else (str(value),))
    if isinstance(value, (list, tuple)):
        return tuple(map(magnitude, value))
    if isinstance(value, dict):
        return tuple([(key, magnitude(one)) for key, one in value.items()])
    return value


def weight(value: Any) -> int:
    """About how many bytes of memory a value from JSON takes."""
    found, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            found += 50 + len(one)
        elif isinstance(one, (list, tuple)):
            found += 56 + 8 * len(one)
            waiting += one
        elif isinstance(one, dict):
            found += 64 + 100 * len(one)
            waiting += [*one, *one.values()]
        else:
            found += 32
    return found
