"""The plain values on a model's objects: numbers, text, flags that somebody may change between two requests."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

from torch import nn

from shared_hooks.state.python_state import PythonState

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MODULE_OWN = frozenset(vars(nn.Module()))
Spot = tuple[int, str]


class Numbers:
    """What is in the attributes of the objects that ``state`` holds, without what the model's own runs change.

    ``own``: those, as (place, attribute). Each combination of values gets a number of its own.
    """

    def __init__(self, state: PythonState, own: set[Spot]) -> None:
        dicts = [place.owner for place in state.places if place.is_attributes and type(place.owner) is dict]
        registers = {id(held.get(name)) for held in dicts for name in ("_parameters", "_buffers", "_modules")}
        self._held = [held for held in dicts if id(held) not in registers]
        self._own = own
        self._known: dict[Any, int] = {}
        self._learn()

    def current(self) -> int:
        """The number of the values as they are now; next to nothing as long as they are the same objects."""
        try:
            same = list(map(len, self._held)) == self._lengths and all(
                map(operator.is_, itertools.chain.from_iterable([get(held) for get, held in self._get]), self._flat)
            )
        except KeyError:
            same = False
        if not same:
            self._learn()
        return self._now

    def _learn(self) -> None:
        found = [
            (place, name, value)
            for place, held in enumerate(self._held)
            for name, value in list(held.items())
            if name not in _MODULE_OWN and is_plain(value) and (id(held), name) not in self._own
        ]
        content = tuple((place, name, _typed(value)) for place, name, value in found)
        get: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        flat: list[Any] = []
        for place, group in itertools.groupby(found, operator.itemgetter(0)):
            entries = list(group)
            names = [name for _, name, _ in entries]
            # of one name alone the getter would not give a tuple
            get.append((operator.itemgetter(*names, names[0]), self._held[place]))
            flat += [*(value for _, _, value in entries), entries[0][2]]
        self._get, self._flat = get, flat
        self._lengths = list(map(len, self._held))
        self._now = self._known.setdefault(content, len(self._known))


def is_plain(value: Any) -> bool:
    """A number, text, None, or a tuple of those."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(is_plain, value)))


def _typed(value: Any) -> Any:
    """1, 1.0 and True are three values; so are 0.0 and -0.0, and nan is one."""
    return tuple(map(_typed, value)) if type(value) is tuple else (type(value), repr(value))
