"""What of a change of Python state tells on later runs: the rules by which planning judges a recorded run.

A change does not matter where an equal value takes the old one's place and does not hang on the inputs, or where no
code of the model's ever reads the attribute. All else does: the next run starts from another state than this one, and
two processes that each run a part of the model would keep two states.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from shared_hooks.kernels import KernelLog
from shared_hooks.places import MISSING, Change
from shared_hooks.poison import lasting_name
from shared_hooks.python_state import PythonState
from shared_hooks.reach import Reach
from shared_hooks.taint import Taint
from shared_hooks.trace import NEVER

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ADDRESS = re.compile("0x[0-9a-f]+")
_BY_NAME = frozenset({"getattr", "vars", "__dict__", "hasattr", "attrgetter"})


class Judge:
    """Judges changes since ``state`` by what one recording has seen."""

    def __init__(self, state: PythonState, log: KernelLog) -> None:
        self.state = state
        self.log = log
        self.seen: dict[Any, Change] = {}
        """What has changed at any time during the run, whether it matters or not."""
        self._read: dict[tuple[str, type], bool] = {}

    @property
    def reads_data(self) -> bool:
        """Whether Python has looked at values that hang on the inputs."""
        return bool(self.log.dynamic or self.log.escaped)

    def findings(self) -> list[str]:
        """Names of the changes that matter, now."""
        return [change.name for change in self.changes()]

    def changes(self) -> list[Change]:
        """The changes that matter, now."""
        found = self.state.changes()
        self.seen.update((change.name, change) for change in found)
        return [change for change in found if self.matters(change)]

    def matters(self, change: Change) -> bool:
        """Whether a change tells on later runs."""
        if agree(change.before, change.now, self._may_be_data):
            return False
        return not (change.is_attribute and self._is_unread(change.attribute, change.kind))

    def from_data(self) -> list[str]:
        """Names of attributes that the model's code sets to plain values, where it reads data: they may be data."""
        if not self.reads_data:
            return []
        return [
            place.entry(key)
            for place in self.state.places
            if place.is_attributes and place.keys is not None
            for key, value in zip(place.keys, place.values, strict=True)
            if type(value) in _PLAIN and self._set_and_read(key, place.kind)
        ]

    def _set_and_read(self, name: Any, kind: type) -> bool:
        return isinstance(name, str) and self.state.reach.writes(name) and not self._is_unread(name, kind)

    def _is_unread(self, name: str, kind: type) -> bool:
        """Whether no code looks at an attribute of this name of such an object, be it by its name as text."""
        if (name, kind) not in self._read:
            self._read[name, kind] = is_read(self.state.reach, name, kind)
        return not self._read[name, kind]

    def _may_be_data(self, value: Any) -> bool:
        """Whether another input may give another value."""
        if isinstance(value, torch.Tensor):
            return self.log.storage_of(value).tainted < NEVER
        return self.reads_data


def is_read(reach: Reach, name: str, kind: type) -> bool:
    """Whether any code may look at an attribute of this name of objects of this class."""
    return reach.reads(name) or bool(_BY_NAME & reach.names) or name in reach.names_of_others(kind)


def agree(before: Any, now: Any, may_differ: Callable[[Any], bool], depth: int = 5) -> bool:
    """Whether an equal value took the old one's place, and always will: ``may_differ`` is asked of each part."""
    if before is now:
        return before is not MISSING
    if type(before) is not type(now) or not depth:
        return False
    if isinstance(before, _PLAIN):  # by their text, since -0.0 equals 0.0
        return (before == now or before != before) and repr(before) == repr(now) and not may_differ(now)
    if isinstance(before, torch.Tensor):
        return not may_differ(now) and _same_bits(before, now)
    if isinstance(before, (list, tuple)):
        pairs = zip(before, now, strict=False)
        return len(before) == len(now) and all(agree(a, b, may_differ, depth - 1) for a, b in pairs)
    if isinstance(before, dict):
        same = list(before) == list(now)
        return same and all(agree(before[key], now[key], may_differ, depth - 1) for key in before)
    return False


def lost(state: PythonState, known: frozenset[str]) -> list[str]:
    """Names of what a run has changed since ``state`` that would tell on a later one if it were not put back; but for
    what is ``known``, by names as `portable` makes them.
    """
    return [
        change.name
        for change in state.changes()
        if portable(lasting_name(change, state.places)) not in known
        and not agree(change.before, change.now, lambda _: False)
        and (not change.is_attribute or is_read(state.reach, change.attribute, change.kind))
    ]


def told(names: Iterable[str]) -> str:
    """The first few, and how many more."""
    known = list(dict.fromkeys(names))
    return ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")


def portable(name: str) -> str:
    """A name as both sides have it: without addresses, and not too long."""
    return _ADDRESS.sub("0x", name)[:200]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
        return False
    try:
        a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    except (RuntimeError, NotImplementedError):
        return False
    return torch.equal(a, b)


def depends(change: Change, taint: Taint, reach: Reach) -> bool:
    """Whether what a change has put there hangs on the inputs, or may. An attribute that none of the model's own code
    sets by its name is its library's (a note that hooks are installed).
    """
    if isinstance(change.now, _PLAIN):
        own = not change.is_attribute or reach.writes(change.attribute)
        return taint.reads_data and change.now is not None and own
    return any(taint.escaped or taint.has(tensor) for tensor in _tensors_in(change.now, set()))


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Tensors in containers and plain objects, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, (*_PLAIN, type)) and id(value) not in seen and len(seen) < 10_000:
        seen.add(id(value))
        held = [*value] if isinstance(value, (list, tuple, set, frozenset, deque)) else []
        held += [*dict.values(value)] if isinstance(value, dict) else []
        own = getattr(value, "__dict__", None)
        held += [*own.values()] if type(own) is dict else []
        for cell in getattr(value, "__closure__", None) or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # not yet filled
                continue
        for part in held:
            yield from _tensors_in(part, seen)
