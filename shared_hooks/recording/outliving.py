"""What of a change of Python state tells on later runs: the rules by which planning judges a recorded run.

A change does not matter where an equal value takes the old one's place and does not hang on the inputs, or where no
code of the model's ever reads the attribute. All else does: the next run starts from another state than this one, and
two processes that each run a part of the model would keep two states.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from shared_hooks.recording.forbidden import is_unreachable
from shared_hooks.recording.kernels import KernelLog
from shared_hooks.recording.taint import Taint
from shared_hooks.recording.trace import NEVER
from shared_hooks.state import MISSING, PLAIN, Change, PythonState, Reach, agree, is_read


class Judge:
    """Judges changes since ``state`` by what one recording has seen."""

    def __init__(self, state: PythonState, log: KernelLog) -> None:
        self.state = state
        self.log = log
        self.seen: dict[Any, Change] = {}
        """What has changed at any time during the run, whether it matters or not."""
        self._read: dict[tuple[str, type], bool] = {}
        self._set: dict[str, bool] = {}

    @property
    def reads_data(self) -> bool:
        """Whether Python has looked at values that hang on the inputs."""
        return bool(self.log.dynamic or self.log.escaped)

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
            if type(value) in PLAIN and self._set_and_read(key, place.kind)
        ]

    def _set_and_read(self, name: Any, kind: type) -> bool:
        return isinstance(name, str) and self._is_set(name) and not self._is_unread(name, kind)

    def _is_set(self, name: str) -> bool:
        """Whether any code sets an attribute of this name, be it on a path that this run did not take."""
        if name not in self._set:
            reach = self.state.reach
            objects = [(one.kind, one.owner) for one in self.state.places if one.is_attributes and one.keys is not None]
            self._set[name] = not all(
                is_unreachable(function, name, objects, reach.writes) for function in reach.writers(name)
            )
        return self._set[name]

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


def depends(change: Change, taint: Taint, reach: Reach) -> bool:
    """Whether what a change has put there depends on the inputs, or may. An attribute that none of the model's own code
    sets by its name is its library's (a note that hooks are installed).
    """
    own = not change.is_attribute or reach.writes(change.attribute)
    return any(
        taint.escaped or taint.has(leaf) if isinstance(leaf, torch.Tensor) else taint.reads_data and own
        for leaf in _leaves(change.now, set())
    )


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """What is in containers, functions and objects, however nested: tensors, and all that may be made of data."""
    if id(value) in seen or value is None or value is MISSING or isinstance(value, (type, types.ModuleType)):
        return
    if not isinstance(value, PLAIN):
        seen.add(id(value))
    held = _held(value)
    own = getattr(value, "__dict__", None)
    if isinstance(value, torch.Tensor) or (held is None and (type(own) is not dict or _keeps_more(type(value)))):
        yield value
        return
    for part in [*(held or ()), *(own.values() if type(own) is dict else ())]:
        yield from _leaves(part, seen)


def _held(value: Any) -> list[Any] | None:
    """What a container or a function holds beside its attributes; None for what is neither."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*value]
    if isinstance(value, dict):
        return [part for entry in dict.items(value) for part in entry]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        return [value.__self__, getattr(value, "__func__", None)]
    return None


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


_MADE_BY_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_PYTHONS_OWN = frozenset({object, torch.nn.Module})


def _keeps_more(kind: type) -> bool:
    """Whether objects of a class may keep anything beside their attributes: in slots, or out of Python's sight."""
    return any(
        base not in _PYTHONS_OWN and (not base.__flags__ & _MADE_BY_CLASS or bool(vars(base).get("__slots__")))
        for base in kind.__mro__
    )
