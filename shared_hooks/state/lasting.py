"""Which changes of Python state last: they would tell on a later run, and both sides call them by the same name."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from shared_hooks.state.places import MISSING, Change, Container
from shared_hooks.state.python_state import PythonState
from shared_hooks.state.reach import Reach
from shared_hooks.tensors import identical

# Is state that a model leaves behind ever read again? Asked of the model itself, by a run that finds poison there.
#
# Much of what forwards keep on objects is set again in every forward before anybody looks (``self.last = hidden``). The
# proof: in place of what a run has left there lies an object that nobody can look at without an error. If the next run
# gives the same bits and has overwritten all of it, that path hangs on none of it.


class Read(BaseException):
    """Poison was looked at; not an Exception, so that the model does not catch it."""


def _raise(*args: Any, **kwargs: Any) -> NoReturn:
    raise Read


_LOOKS = """
    __abs__ __add__ __aiter__ __and__ __anext__ __array__ __array_ufunc__ __await__ __bool__ __bytes__ __call__ __ceil__
    __complex__ __contains__ __delattr__ __delitem__ __dir__ __divmod__ __enter__ __eq__ __exit__ __float__ __floor__
    __floordiv__ __format__ __fspath__ __ge__ __getattribute__ __getitem__ __gt__ __hash__ __iadd__ __iand__
    __ifloordiv__ __ilshift__ __imatmul__ __imod__ __imul__ __index__ __int__ __invert__ __ior__ __ipow__ __irshift__
    __isub__ __iter__ __itruediv__ __ixor__ __le__ __len__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__
    __next__ __or__ __pos__ __pow__ __radd__ __rand__ __rdivmod__ __repr__ __reversed__ __rfloordiv__ __rlshift__
    __rmatmul__ __rmod__ __rmul__ __ror__ __round__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__
    __setattr__ __setitem__ __str__ __sub__ __torch_function__ __truediv__ __trunc__ __xor__
""".split()  # fmt: skip
Poison: type = type("Poison", (), dict.fromkeys(_LOOKS, _raise))


def lasting_name(change: Change, places: Iterable[Container]) -> str:
    """What a change is remembered by: what is in a list counts as a whole, and is not the attribute that holds it."""
    if change.is_attribute:
        return change.name
    for place in places:
        if _is_series(place) and (change.name == place.name or change.name.startswith(place.name + "[")):
            return _content(place)
    return change.name


def _content(series: Container) -> str:
    return series.name + "[]"


def spread(state: PythonState, names: set[str]) -> bool:
    """Put poison where ``names`` say; whether all of them could be reached. What was there is in ``state``."""
    left = set(names)
    for place in state.places:
        if place.keys is not None and isinstance(place.owner, dict):
            for key in place.keys:
                if place.entry(key) in names:
                    dict.__setitem__(place.owner, key, Poison())
                    left.discard(place.entry(key))
        elif _is_series(place):
            if _content(place) in names:
                poisons = [Poison() for _ in place.values]
                place.owner.clear()
                place.owner.extend(poisons)
                left.discard(_content(place))
        elif isinstance(place.owner, type):
            for key in list(vars(place.owner)):
                if place.name + key in names:
                    type.__setattr__(place.owner, key, Poison())
                    left.discard(place.name + key)
        elif place.name in names and place.set_one is not None:
            place.set_one(Poison())
            left.discard(place.name)
    return not left


def _is_series(place: Container) -> bool:
    return isinstance(place.owner, (list, collections.deque))


def remains(value: Any, depth: int = 6) -> bool:
    """Whether there is poison in a value."""
    if type(value) is Poison:
        return True
    if not depth:
        return False
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        held = list(value)
    elif isinstance(value, dict):
        held = list(dict.values(value))
    else:
        own = getattr(value, "__dict__", None)
        held = list(own.values()) if type(own) is dict and not isinstance(value, type) else []
    return any(remains(item, depth - 1) for item in held)


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
