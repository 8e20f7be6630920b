"""All mutable Python state that a model's code can reach, as it is at one moment: to compare, and to put back.

From the modules it goes through attributes, containers, plain objects, closures, class attributes and the globals that
the model's code names; not into torch, the standard library, or tensors (those count by identity).
What is remembered of each container is a shallow copy, so "the same" means the same objects: an equal one is a change.

Comparing is made to be cheap, since planning does it after many layers: one pass over all containers, in C.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_hooks.attach import Shim
from shared_hooks.probes import probe_of
from shared_hooks.reach import Reach, file_of, is_foreign, names_in
from shared_hooks.settings import Settings

MAX_OBJECTS = 50_000

_ATOMS = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented), torch.dtype,
        torch.device, torch.layout, torch.memory_format, torch.Size, torch.Tensor, nn.Parameter, Shim,
        types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
        types.MethodWrapperType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
    }
)  # fmt: skip
# Of the standard library and of torch, what people keep things in.
_HOLDERS = frozenset(
    """
    UserDict UserList ChainMap SimpleNamespace local Event Condition Semaphore Barrier Queue LifoQueue PriorityQueue
    SimpleQueue ExitStack WeakKeyDictionary WeakValueDictionary WeakSet
    """.split()
)
_MODULE_OWN = frozenset(vars(nn.Module()))
_EMPTY_MOSTLY = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and value is not None)


MISSING = object()


@dataclass(frozen=True, eq=False)
class Change:
    """One thing that differs: where, what was there and what is there now (`MISSING` for nothing)."""

    name: str
    before: Any
    now: Any
    is_attribute: bool = False
    can_be_undone: bool = True
    spot: tuple[int, str] | None = None
    """Of an attribute: the identity of what holds it, and its name."""
    kind: type = object
    """Of an attribute: the class of what holds it."""

    @property
    def attribute(self) -> str:
        """The last name in ``name``: the attribute that holds it."""
        return self.name.partition("[")[0].rpartition(".")[2]


class Place:
    """One container. ``view`` always gives what is in it now; ``name`` is for people; ``owner`` restores.

    ``kind``: of the attributes of an object, its class. ``set_one``: of a single value, how to set it.
    """

    __slots__ = ("keys", "kind", "name", "owner", "put", "set_one", "values", "view")

    def __init__(self, name: str, owner: Any, view: Iterable[Any], put: Callable[[Place], None]) -> None:
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
        if isinstance(self.view, _Class):
            found = zip(self.view.names, self.values, now, strict=True)
            return [Change(self.name + key, old, new) for key, old, new in found if old is not new]
        name = self.name if isinstance(self.view, _Several) else self.name + "[{}]"
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


def _put_dict(place: Place) -> None:
    """Entry by entry: another thread may be running the model."""
    owner, kept = place.owner, dict(zip(place.keys or (), place.values, strict=True))
    for key in [key for key, value in dict.items(owner) if key not in kept and not _is_attaching(MISSING, value)]:
        dict.pop(owner, key)
    for key, value in kept.items():
        found = dict.get(owner, key, MISSING)
        if found is not value and not _is_attaching(value, found):
            dict.__setitem__(owner, key, value)
    if place.in_order and list(owner) != list(kept):
        dict.clear(owner)
        dict.update(owner, kept)


def _is_attaching(before: Any, now: Any) -> bool:
    """Whether a wrapper of ours was put there or taken away. A model that has something else there for a while, and
    then puts our wrapper back, is another matter.
    """
    return type(now) is Shim or (type(before) is Shim and (now is MISSING or now is before.before))


def _put_list(place: Place) -> None:
    list.__setitem__(place.owner, slice(None), place.values)


def _put_other(place: Place) -> None:
    place.owner.clear()
    (place.owner.extend if isinstance(place.owner, collections.deque) else place.owner.update)(place.values)


def _put_class(place: Place) -> None:
    kind, kept = place.owner, dict(zip(place.view.names, place.values, strict=True))  # type: ignore[attr-defined]
    for name in [name for name in vars(kind) if name not in kept]:
        type.__delattr__(kind, name)
    for name, value in kept.items():
        if vars(kind).get(name, place) is not value:
            type.__setattr__(kind, name, value)


class _Class:
    """What a class holds, by name."""

    def __init__(self, kind: type) -> None:
        self.held = vars(kind)
        self.names = list(self.held)

    def __iter__(self) -> Any:
        return iter(self.held.values())

    def __len__(self) -> int:
        return len(self.held)


class _Several:
    """Values fetched one by one: cells, slots, globals. Something that is missing counts as a value."""

    def __init__(self, fetch: list[Callable[[], Any]]) -> None:
        self.fetch = fetch

    def __iter__(self) -> Any:
        return iter(_fetched_all(self.fetch))

    def __len__(self) -> int:
        return len(self.fetch)


def _fetched_all(several: list[Callable[[], Any]]) -> list[Any]:
    try:
        return [fetch() for fetch in several]
    except (AttributeError, KeyError, ValueError):
        return [_fetched(fetch) for fetch in several]


def _fetched(fetch: Callable[[], Any]) -> Any:
    try:
        return fetch()
    except (AttributeError, KeyError, ValueError):
        return MISSING


class PythonState:
    """A model's Python state at the moment this is made. ``overflow``: there is more than is looked at."""

    def __init__(self, model: nn.Module, *, settings: bool = True) -> None:
        self.places: list[Place] = []
        self.probes: list[tuple[str, Any, Any]] = []
        kinds = {type(module) for module in model.modules()}
        self.reach = Reach({file_of(kind) for kind in kinds if not is_foreign(kind)} - {""})
        self.overflow = False
        self.settings = Settings() if settings else None
        self._hooks: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._classes: set[int] = set()
        self._todo: collections.deque[tuple[str, Any]] = collections.deque([(type(model).__qualname__, model)])
        self._globals: dict[tuple[int, str], None] = {}
        self._walk()
        several = [place for place in self.places if isinstance(place.view, _Several)]
        self._fetch = [fetch for place in several for fetch in place.view.fetch]  # type: ignore[attr-defined]
        self._fetched = [value for place in several for value in place.values]
        whole = [place for place in self.places if not isinstance(place.view, _Several)]
        self._views = [place.view.held.values() if isinstance(place.view, _Class) else place.view for place in whole]
        self._flat = [value for place in whole for value in place.values]
        self._lengths = [len(place.values) for place in whole]
        self._keyed = [place for place in self.places if place.keys is not None and place.in_order]
        self._keys = [key for place in self._keyed for key in place.keys or ()]

    # -- comparing ----------------------------------------------------------------------------------------------

    @property
    def is_same(self) -> bool:
        """Whether nothing has changed since; some tens of microseconds for a large model."""
        try:
            if list(map(len, self._views)) != self._lengths:  # type: ignore[arg-type]
                return False
            if not all(map(operator.is_, itertools.chain.from_iterable(self._views), self._flat)):
                return False
            if not all(map(operator.is_, _fetched_all(self._fetch), self._fetched)):
                return False
            keys = itertools.chain.from_iterable([place.owner for place in self._keyed])
            if not all(map(operator.is_, keys, self._keys)) or any(self._hooks):
                return False
        except RuntimeError:  # another thread changes it just now
            return False
        if any(probe.now() != kept for _, probe, kept in self.probes):
            return False
        return self.settings is None or not self.settings.changed()

    def changes(self) -> list[Change]:
        """What differs now."""
        if self.is_same:
            return []
        found = [change for place in self.places for change in place.changes()]
        for name, probe, kept in self.probes:
            now = probe.now()
            if now != kept:
                found.append(Change(name, kept, now, can_be_undone=probe.can_be_undone))
        found += [Change(name, MISSING, MISSING) for name in (self.settings.changed() if self.settings else ())]
        return found + ([Change("hooks of a module", MISSING, MISSING)] if any(self._hooks) else [])

    def restore(self) -> list[str]:
        """Put back, in place, what has changed since; names of what could not be."""
        if self.is_same:
            return []
        for place in self.places:
            if place.changes():
                place.put(place)
        for hooks in self._hooks:
            hooks.clear()
        for _, probe, kept in self.probes:
            if probe.now() != kept:
                probe.restore(kept)
        if self.settings is not None:
            self.settings.restore()
        return [change.name for change in self.changes()]

    @property
    def unrepeatable(self) -> list[str]:
        """Names of generators and iterators: they only go on."""
        return [name for name, probe, _ in self.probes if probe.only_goes_on]

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that was found."""
        found = [value for place in self.places for value in place.values if isinstance(value, torch.Tensor)]
        frozen = (value for value in self._seen.values() if isinstance(value, (tuple, frozenset)))
        return found + [value for held in frozen for value in held if isinstance(value, torch.Tensor)]

    # -- walking ------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        while self._todo or self._functions():
            if len(self._seen) > MAX_OBJECTS:
                self.overflow = True
                return
            name, value = self._todo.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(name, value)

    def _add(self, name: str, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) not in _ATOMS and id(value) not in self._seen:
                self._todo.append((name, value))

    def _keep(self, name: str, owner: Any, view: Any, put: Callable[[Place], None]) -> Place:
        place = Place(name, owner, view, put)
        self.places.append(place)
        return place

    def _visit(self, name: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return
        if isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, dict):
            self._keep(name, value, dict.values(value), _put_dict)
            self._entries(name, value)
        elif isinstance(value, (list, set, collections.deque)):
            self._keep(name, value, value, _put_list if isinstance(value, list) else _put_other)
            if not _ATOMS.issuperset(map(type, value)):
                for number, item in enumerate(value):
                    self._add(f"{name}[{number}]" if not isinstance(value, set) else name, (item,))
        elif isinstance(value, (tuple, frozenset)):
            self._add(name, value)
        elif isinstance(value, types.FunctionType):
            self._function(name, value)
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            self._add(name, (value.__func__, getattr(value, "__self__", None)))
        elif isinstance(value, property):
            self._add(name, (value.fget, value.fset))
        elif isinstance(value, functools.partial):
            self._add(name, (value.func, value.args, value.keywords))
        elif isinstance(value, types.CellType):
            self._cell(name, value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType) or kind.__module__.partition(".")[0] == "shared_hooks":
            return
        elif (probe := probe_of(value)) is not None:
            self.probes.append((name, probe, probe.now()))
            self._add(name, probe.inside)
        if not is_foreign(kind) or kind.__name__ in _HOLDERS:
            self._instance(name, value)

    def _module(self, name: str, module: nn.Module) -> None:
        own = vars(module)
        self._keep(f"{name}.", own, own.values(), _put_dict).kind = type(module)
        for hooks in _EMPTY_MOSTLY:
            found = own.get(hooks)
            if found:
                self._add(f"{name}.{hooks}", (found,))
            elif found is not None:
                self._hooks.append(found)
        for register in ("_parameters", "_buffers", "_modules"):
            held = own.get(register)
            if isinstance(held, dict):
                self._seen[id(held)] = held
                self._keep(f"{name}.", held, held.values(), _put_dict).kind = type(module)
                if register == "_modules":
                    self._entries(f"{name}.", held)
        self._entries(f"{name}.", {key: value for key, value in own.items() if key not in _MODULE_OWN})

    def _entries(self, name: str, held: dict[Any, Any]) -> None:
        if not _ATOMS.issuperset(map(type, dict.values(held))):
            for key, value in dict.items(held):
                self._add(f"{name}{key}" if name.endswith(".") else f"{name}[{key!r:.40}]", (value,))
        if not _ATOMS.issuperset(map(type, held)):
            self._add(name, held)

    def _instance(self, name: str, value: Any) -> None:
        """Attributes of an object, and its class."""
        if isinstance(value, type):
            return
        own = getattr(value, "__dict__", None)
        if type(own) is dict and not isinstance(value, (nn.Module, types.FunctionType)):
            self._seen[id(own)] = own
            self._keep(f"{name}.", own, own.values(), _put_dict).kind = type(value)
            self._entries(f"{name}.", own)
        for base in type(value).__mro__:
            for slot, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType) and not is_foreign(base):
                    self._several(f"{name}.{slot}", [functools.partial(member.__get__, value)],
                                  functools.partial(_set_slot, member, value))  # fmt: skip
        self._class(type(value))

    def _several(self, name: str, fetch: list[Callable[[], Any]], put: Callable[[Any], None]) -> None:
        place = self._keep(name, None, _Several(fetch), lambda place: put(place.values[0]))
        place.set_one = put
        self._add(name, place.values)

    def _cell(self, name: str, cell: Any) -> None:
        self._several(name, [functools.partial(getattr, cell, "cell_contents")], functools.partial(_set_cell, cell))

    def _function(self, name: str, function: types.FunctionType) -> None:
        self.reach.add(function)
        if function.__closure__:
            for variable, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
                self._add(f"{variable} of {function.__qualname__}", (cell,))
        if self.reach.counts(function.__code__.co_filename):
            self._add(f"{function.__qualname__}'s defaults", (function.__defaults__, function.__kwdefaults__))
            if function.__dict__:
                self._add(f"{function.__qualname__}.", (function.__dict__,))

    def _functions(self) -> bool:
        """The globals that functions found meanwhile name; whether there is more to look at."""
        for function in self.reach.fresh():
            self._seen.setdefault(id(function), function)
            self._function(function.__qualname__, function)
            space = function.__globals__
            names = names_in(function)
            self._named_in(space, names)
            for name in names:
                value = space.get(name)
                if isinstance(value, types.ModuleType) and not _is_foreign_module(value):
                    self._named_in(vars(value), names)
        return bool(self._todo)

    def _named_in(self, space: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            key = id(space), name
            if key not in self._globals and (name in space or not hasattr(__builtins__, name)):
                self._globals[key] = None
                if name not in space:
                    continue
                value = space[name]
                where = f"global {space.get('__name__', '?').rpartition('.')[2]}.{name}"
                self._several(where, [functools.partial(space.__getitem__, name)],
                              functools.partial(_set_global, space, name))  # fmt: skip
                if isinstance(value, type) and self.reach.owns(value):
                    self._add(where, (value,))

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            # a class may have been met as a value before: what it holds has not been looked at by that
            if id(base) in self._classes or not self.reach.owns(base):
                continue
            self._classes.add(id(base))
            self._seen[id(base)] = base
            self.reach.add_class(base)
            self._keep(f"{base.__qualname__}.", base, _Class(base), _put_class)
            for name, value in vars(base).items():
                if not isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
                    self._add(f"{base.__qualname__}.{name}", (value,))
        self._seen.setdefault(id(kind), kind)


def _is_foreign_module(module: types.ModuleType) -> bool:
    root = module.__name__.partition(".")[0]
    return root in ("torch", "numpy") or (root in sys.stdlib_module_names and root != "__main__")


def _set_cell(cell: Any, value: Any) -> None:
    if value is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def _set_slot(member: Any, owner: Any, value: Any) -> None:
    if value is MISSING:
        member.__delete__(owner)
    else:
        member.__set__(owner, value)


def _set_global(space: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value
