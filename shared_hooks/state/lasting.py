"""Which changes of Python state last: they would tell on a later run, and both sides call them by the same name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shared_hooks.state.places import MISSING
from shared_hooks.state.poison import lasting_name
from shared_hooks.state.python_state import PythonState
from shared_hooks.state.reach import Reach
from shared_hooks.tensors import identical

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ADDRESS = re.compile("0x[0-9a-f]+")
_BY_NAME = frozenset({"getattr", "vars", "__dict__", "hasattr", "attrgetter"})


def is_read(reach: Reach, name: str, kind: type) -> bool:
    """Whether any code may look at an attribute of this name of objects of this class."""
    return reach.reads(name) or bool(_BY_NAME & reach.names) or name in reach.names_of_others(kind)


def agree(before: Any, now: Any, may_differ: Callable[[Any], bool], depth: int = 5) -> bool:
    """Whether an equal value took the old one's place, and always will: ``may_differ`` is asked of each part."""
    if before is now:
        return before is not MISSING
    if type(before) is not type(now) or not depth:
        return False
    if isinstance(before, PLAIN):  # by their text, since -0.0 equals 0.0
        return (before == now or before != before) and repr(before) == repr(now) and not may_differ(now)
    if isinstance(before, torch.Tensor):
        return not may_differ(now) and _forms_agree(before, now) and identical(before, now)
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


def first_few(names: Iterable[str]) -> str:
    """The first few, and how many more."""
    known = list(dict.fromkeys(names))
    return ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")


def portable(name: str) -> str:
    """A name as both sides have it: without addresses, and not too long."""
    return _ADDRESS.sub("0x", name)[:200]


def _forms_agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both lie alike in memory: what is computed from them may hang on that, too."""
    plain = one.layout == other.layout == torch.strided and not (one.is_nested or other.is_nested)
    return plain and one.stride() == other.stride()
