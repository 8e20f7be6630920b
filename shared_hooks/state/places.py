"""Where Python state lies: containers as they were at one moment, to compare with what is in them now, and to put back.

What is remembered of each is a shallow copy, so "the same" means the same objects: an equal one is a change.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shared_hooks.modules import Instead, Shim

MISSING = object()
_OURS = (Shim, Instead)


@dataclass(frozen=True, eq=False)
class Change:
    """One thing that differs: where, what was there and what is there now (`MISSING` for nothing)."""

    name: str
    before: Any
    now: Any
    is_attribute: bool = False
    can_be_undone: bool = True
    spot: tuple[int, str] | None = None
    """The identity of what holds an attribute, and its name."""
    kind: type = object
    """The class of what holds an attribute."""

    @property
    def attribute(self) -> str:
        """The last name in ``name``: the attribute that holds it."""
        return self.name.partition("[")[0].rpartition(".")[2]


class Container:
    """One container. ``view`` always gives what is in it now; ``name`` is for people; ``owner`` restores.

    ``kind``: of the attributes of an object, its class. ``set_one``: of a single value, how to set it.
    """

    __slots__ = ("keys", "kind", "name", "owner", "put", "set_one", "values", "view")

    def __init__(self, name: str, owner: Any, view: Iterable[Any], put: Callable[[Container], None]) -> None:
        self.name = name
        self.owner = owner
        self.view = view
        self.put = put
        self.kind: type = object
        self.set_one: Callable[[Any], None] | None = None
        self.values = list(view)
        self.keys: list[Any] | None = list(owner) if isinstance(owner, dict) else None

    def changes(self) -> list[Change]:
        """What differs now."""
        now = list(self.view)
        if self.keys is not None:
            return self._changed_entries()
        if len(now) != len(self.values):
            fresh = {id(value) for value in self.values}
            new = [Change(self.name, MISSING, value) for value in now if id(value) not in fresh]
            return new or [Change(self.name, len(self.values), len(now))]
        pairs = enumerate(zip(self.values, now, strict=True))
        if isinstance(self.view, ClassEntries):
            found = zip(self.view.names, self.values, now, strict=True)
            return [Change(self.name + key, old, new) for key, old, new in found if old is not new]
        name = self.name if isinstance(self.view, Fetched) else self.name + "[{}]"
        return [Change(name.format(n), before, value) for n, (before, value) in pairs if before is not value]

    def _changed_entries(self) -> list[Change]:
        before = dict(zip(self.keys or (), self.values, strict=True))
        now = dict(dict.items(self.owner))
        found = []
        for key in [*now, *(key for key in before if key not in now)]:
            old, new = before.get(key, MISSING), now.get(key, MISSING)
            if new is not old and not _is_attaching(old, new):
                found.append(
                    Change(self.entry(key), old, new, self.is_attributes, True, (id(self.owner), key), self.kind)
                )
        if not found and self.in_order and list(now) != [key for key in before if key in now]:
            found.append(Change(self.name, MISSING, MISSING))
        return found

    @property
    def is_attributes(self) -> bool:
        """Whether these are the attributes of an object."""
        return self.keys is not None and self.name.endswith(".")

    @property
    def in_order(self) -> bool:
        """Whether the order of the entries means something to somebody: that of attributes does not."""
        return not self.is_attributes

    def entry(self, key: Any) -> str:
        return f"{self.name}{key}" if self.name.endswith(".") else f"{self.name}[{key!r:.40}]"


def put_dict(place: Container) -> None:
    """Entry by entry: another thread may be running the model."""
    owner, kept = place.owner, dict(zip(place.keys or (), place.values, strict=True))
    # an OrderedDict keeps its order beside the entries, and knows nothing of what a dictionary's own methods do to it
    base: Any = collections.OrderedDict if isinstance(owner, collections.OrderedDict) else dict
    for key in [key for key, value in dict.items(owner) if key not in kept and not _is_attaching(MISSING, value)]:
        base.pop(owner, key)
    for key, value in kept.items():
        found = dict.get(owner, key, MISSING)
        if found is not value and not _is_attaching(value, found):
            base.__setitem__(owner, key, value)
    if place.in_order and list(owner) != list(kept):
        base.clear(owner)
        base.update(owner, kept)


def _is_attaching(before: Any, now: Any) -> bool:
    """Whether a wrapper of ours was put there or taken away. A model that has something else there for a while, and
    then puts our wrapper back, is another matter.
    """
    return type(now) in _OURS or (type(before) in _OURS and (now is MISSING or now is before.before))


def put_list(place: Container) -> None:
    list.__setitem__(place.owner, slice(None), place.values)


def put_other(place: Container) -> None:
    place.owner.clear()
    (place.owner.extend if isinstance(place.owner, collections.deque) else place.owner.update)(place.values)


def put_class(place: Container) -> None:
    kind, kept = place.owner, dict(zip(place.view.names, place.values, strict=True))  # type: ignore[attr-defined]
    for name in [name for name in vars(kind) if name not in kept]:
        type.__delattr__(kind, name)
    for name, value in kept.items():
        if vars(kind).get(name, place) is not value:
            type.__setattr__(kind, name, value)


class ClassEntries:
    """What a class holds, by name."""

    def __init__(self, kind: type) -> None:
        self.held = vars(kind)
        self.names = list(self.held)

    def __iter__(self) -> Any:
        return iter(self.held.values())

    def __len__(self) -> int:
        return len(self.held)


class Fetched:
    """Values fetched one by one: cells, slots, globals. Something that is missing counts as a value."""

    def __init__(self, fetch: list[Callable[[], Any]]) -> None:
        self.fetch = fetch

    def __iter__(self) -> Any:
        return iter(fetched_all(self.fetch))

    def __len__(self) -> int:
        return len(self.fetch)


def fetched_all(several: list[Callable[[], Any]]) -> list[Any]:
    """The values; something that is missing counts as one."""
    try:
        return [fetch() for fetch in several]
    except (AttributeError, KeyError, ValueError):
        return [_fetched(fetch) for fetch in several]


def _fetched(fetch: Callable[[], Any]) -> Any:
    try:
        return fetch()
    except (AttributeError, KeyError, ValueError):
        return MISSING
