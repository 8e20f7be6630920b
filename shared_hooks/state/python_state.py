"""All mutable Python state that a model's code can reach (`state.walk`) at one time, to compare and to restore.

Comparing is cheap, because planning does it after many layers: one pass over all containers, in C.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import operator
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from shared_hooks import devices
from shared_hooks.state.probes import counts, function_of, is_repeatable
from shared_hooks.state.reach import (
    MISSING,
    ClassEntries,
    Container,
    Fetched,
    Reach,
    StateChange,
    attribute_in,
    fetched_all,
    held_by_code,
)
from shared_hooks.state.walk import Poison, Spare, Walk
from shared_hooks.tensors import identical

# The settings of the process and of the thread that a forward may change. Random numbers belong to `dice`.

_DEVICES = devices.AUTOCAST


def _device() -> torch.device | None:
    """Return the default device of new tensors. `torch.get_default_device` takes ten times as long, and planning needs
    it after many a layer.
    """
    for place in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None


def _autocast() -> tuple[Any, ...]:
    return tuple(zip(map(torch.is_autocast_enabled, _DEVICES), map(torch.get_autocast_dtype, _DEVICES), strict=True))


def _set_autocast(value: tuple[Any, ...]) -> None:
    for device, (enabled, dtype) in zip(_DEVICES, value, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


# Reads settings of `torch.backends` without the modules in between: each run of a model reads them, with cold caches.


def _deterministic() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _attention() -> tuple[bool, ...]:
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
    )


def _set_attention(value: tuple[bool, ...]) -> None:
    torch.backends.cuda.enable_flash_sdp(value[0])
    torch.backends.cuda.enable_mem_efficient_sdp(value[1])
    torch.backends.cuda.enable_math_sdp(value[2])


def _flags() -> tuple[Any, ...]:
    own = torch._C
    return (
        own._get_mkldnn_enabled(),
        own._get_cudnn_enabled(),
        own._get_cudnn_benchmark(),
        own._get_cublas_allow_tf32(),
        own._get_cudnn_allow_tf32(),
    )


def _set_flags(value: tuple[Any, ...]) -> None:
    backends: Any = torch.backends
    torch._C._set_mkldnn_enabled(value[0])
    backends.cudnn.enabled, backends.cudnn.benchmark = value[1:3]
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = value[3:]


def _flushes_denormals() -> bool:
    """Return whether this thread flushes denormals. torch has no function for that, but Python divides with the same
    unit.
    """
    return sys.float_info.min / 2 == 0.0


_OWN = {name: value for name, value in vars(torch.nn.functional).items() if callable(value)}
_OWN_VALUES = list(_OWN.values())


def _functional() -> dict[str, Any]:
    """Functions that replace torch's own. Others in this process may have set some temporarily (a compiler does): what
    was there before a run and is not torch's is never restored.
    """
    space = vars(torch.nn.functional)
    if all(map(operator.is_, map(space.get, _OWN), _OWN_VALUES)):
        return {}
    return {name: space.get(name) for name, value in _OWN.items() if space.get(name) is not value}


def _set_functional(value: dict[str, Any]) -> None:
    space = vars(torch.nn.functional)
    for name in _functional():
        if name not in value:
            space[name] = _OWN[name]


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (_device, torch.set_default_device),
    "torch's gradient mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "torch's autocast": (_autocast, _set_autocast),
    "torch's deterministic algorithms": (
        _deterministic,
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "torch's float32 matmul precision": (torch._C._get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's attention kernels": (_attention, _set_attention),
    "torch's backend flags": (_flags, _set_flags),
    "torch's anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "torch's denormal numbers": (_flushes_denormals, torch.set_flush_denormal),
    "functions of torch.nn.functional": (_functional, _set_functional),
}


_GETTERS = [get for get, _ in SETTINGS.values()]


class Settings:
    """The current values of all settings."""

    def __init__(self) -> None:
        self._kept = [get() for get in _GETTERS]

    def changed(self) -> list[str]:
        """Return the names of those that have changed."""
        now = [get() for get in _GETTERS]
        with contextlib.suppress(Exception):  # replaced by something else: a tensor, in place of a function
            if now == self._kept:
                return []
        return [name for name, one, kept in zip(SETTINGS, now, self._kept, strict=True) if _differs(one, kept)]

    def restore(self) -> list[str]:
        """Restore changed settings; returns the names of those that could not be restored."""
        differ = self.changed()
        if not differ:
            return []
        for name, kept in zip(SETTINGS, self._kept, strict=True):
            if name in differ:
                with contextlib.suppress(Exception):
                    SETTINGS[name][1](kept)
        return self.changed()


def _differs(now: Any, kept: Any) -> bool:
    try:
        return bool(now != kept)
    except Exception:
        return True


_MUTABLE = (dict, list, set, collections.deque)


class PythonState:
    """A model's Python state on construction. ``overflow``: there is more than is examined."""

    def __init__(self, model: nn.Module, *, settings: bool = True) -> None:
        walk = Walk(model)
        self.places, self.probes, self.reach, self.overflow = walk.places, walk.probes, walk.reach, walk.overflow
        self.settings = Settings() if settings else None
        self._caches = walk.caches
        self._counts = list(map(counts, walk.caches))
        self._hooks = walk.hooks
        self._seen = walk.seen
        several = [place for place in self.places if isinstance(place.view, Fetched)]
        self._fetch = [fetch for place in several for fetch in place.view.fetch]  # type: ignore[attr-defined]
        self._fetched = [value for place in several for value in place.values]
        whole = [place for place in self.places if not isinstance(place.view, Fetched)]
        self._views = [
            place.view.held.values() if isinstance(place.view, ClassEntries) else place.view for place in whole
        ]
        self._flat = [value for place in whole for value in place.values]
        self._lengths = [len(place.values) for place in whole]
        self._keyed = [place for place in self.places if place.keys is not None and place.in_order]
        self._keys = [key for place in self._keyed for key in place.keys or ()]
        # comparing tensors would compute: containers of tensors are compared by identity
        plain = [place for place in whole if not any(issubclass(type(value), torch.Tensor) for value in place.values)]
        owners = [place.view.held if isinstance(place.view, ClassEntries) else place.owner for place in plain]
        self._owners, self._empty = [one for one in owners if one], [one for one in owners if not one]
        self._copies = [copy.copy(owner) if isinstance(owner, _MUTABLE) else dict(owner) for owner in self._owners]
        known = set(map(id, plain))
        tensors = [place for place in whole if id(place) not in known]
        self._held = [place.view for place in tensors]
        self._held_lengths = [len(place.values) for place in tensors]
        self._held_flat = [value for place in tensors for value in place.values]

    # -- comparing ----------------------------------------------------------------------------------------------

    @property
    def is_same(self) -> bool:
        """Whether nothing has changed since; takes some tens of microseconds for a large model."""
        try:
            if list(map(len, self._views)) != self._lengths:  # type: ignore[arg-type]
                return False
            if not all(map(operator.is_, itertools.chain.from_iterable(self._views), self._flat)):
                return False
            if not all(map(operator.is_, fetched_all(self._fetch), self._fetched)):
                return False
            keys = itertools.chain.from_iterable([place.owner for place in self._keyed])
            if not all(map(operator.is_, keys, self._keys)) or any(self._hooks):
                return False
        except RuntimeError:  # another thread changes it just now
            return False
        if (
            any(probe.now() != kept for _, probe, kept in self.probes)
            or list(map(counts, self._caches)) != self._counts
        ):
            return False
        return self.settings is None or not self.settings.changed()

    @property
    def looks_same(self) -> bool:
        """As `is_same`, but a value may have been replaced by an equal one; takes a third of the time."""
        try:
            held = itertools.chain.from_iterable(self._held)
            if (
                any(self._empty)
                or any(self._hooks)
                or self._owners != self._copies
                or list(map(len, self._held)) != self._held_lengths  # type: ignore[arg-type]
                or not all(map(operator.is_, held, self._held_flat))
                or not all(map(operator.is_, fetched_all(self._fetch), self._fetched))
            ):
                return False
        except Exception:  # two tensors, or another thread changes it just now
            return False
        if not self.probes and not self._caches:
            return True
        return self._probes_are_same

    @property
    def _probes_are_same(self) -> bool:
        if self.probes and any(probe.now() != kept for _, probe, kept in self.probes):
            return False
        return not self._caches or list(map(counts, self._caches)) == self._counts

    def changes(self) -> list[StateChange]:
        """Return the changes since."""
        if self.is_same:
            return []
        found = [change for place in self.places for change in place.changes()]
        for name, probe, kept in self.probes:
            now = probe.now()
            if now != kept:
                found.append(StateChange(name, kept, now, can_be_undone=probe.can_be_undone))
        found += [StateChange(name, MISSING, MISSING) for name in (self.settings.changed() if self.settings else ())]
        return found + ([StateChange("hooks of a module", MISSING, MISSING)] if any(self._hooks) else [])

    def restore(self) -> list[str]:
        """Undo changes in place; returns the names of those that could not be undone."""
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
        """The names of generators and iterators, which cannot be rewound."""
        return [name for name, probe, _ in self.probes if probe.only_advances]

    def unrepeatable_result(self) -> str:
        """Return the function whose `functools.lru_cache` keeps another result than it would return now; "" if none."""
        return next((function_of(one) for one in self._caches if not is_repeatable(one)), "")

    def of_threads(self) -> list[threading.local]:
        """Return the thread-local objects found."""
        return [one for one in self._seen.values() if isinstance(one, threading.local)]

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors found."""
        found = [value for place in self.places for value in place.values if isinstance(value, torch.Tensor)]
        frozen = (value for value in self._seen.values() if isinstance(value, (tuple, frozenset)))
        return found + [value for held in frozen for value in held if isinstance(value, torch.Tensor)]


# The plain values on a model's objects: numbers, text, flags that may be changed between two requests.


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MODULE_OWN = frozenset(vars(nn.Module()))
Spot = tuple[int, str]


class Numbers:
    """The values of the attributes of objects in ``state``, except for what the model's own runs change.

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
        """Return the number of the current values; very cheap as long as they are the same objects."""
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
            # for one name alone the getter would not return a tuple
            get.append((operator.itemgetter(*names, names[0]), self._held[place]))
            flat += [*(value for _, _, value in entries), entries[0][2]]
        self._get, self._flat = get, flat
        self._lengths = list(map(len, self._held))
        self._now = self._known.setdefault(content, len(self._known))


def is_plain(value: Any) -> bool:
    """Return whether it is a number, text, None, or a tuple of those."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(is_plain, value)))


def _typed(value: Any) -> Any:
    """Return a key in which 1, 1.0 and True differ, as do 0.0 and -0.0, and nan equals itself."""
    return tuple(map(_typed, value)) if type(value) is tuple else (type(value), repr(value))


# Which changes of Python state last: they would affect a later run, and both sides identify them by the same name.


def lasting_name(change: StateChange, places: Iterable[Container]) -> str:
    """Return the name under which a change is remembered: a list's content counts as a whole, apart from the attribute
    that holds it.
    """
    series = _series_of(change, places)
    return change.name if series is None else _content(series)


def _series_of(change: StateChange, places: Iterable[Container]) -> Container | None:
    if change.is_attribute:
        return None
    of_lists = (place for place in places if _is_series(place))
    return next((one for one in of_lists if change.name == one.name or change.name.startswith(one.name + "[")), None)


def lasting(change: StateChange, places: Iterable[Container]) -> StateChange:
    """Return the same change under its `lasting_name`: for a list, its whole content before and now."""
    series = _series_of(change, places)
    if series is None:
        return change
    return replace(change, name=_content(series), before=list(series.values), now=list(series.owner))


def _content(series: Container) -> str:
    return series.name + "[]"


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One value that a dictionary, list or object holds; ``attribute``: the last one on the path, of ``kind``. A list,
    deque or set is one value.
    """

    value: Any
    attribute: str
    is_attribute: bool
    kind: type


_OF_CLASSES = (
    types.FunctionType, staticmethod, classmethod, property, types.MemberDescriptorType, types.GetSetDescriptorType,
)  # fmt: skip


def entries(state: PythonState, wanted: Callable[[str, bool], bool] = lambda *_: True) -> dict[str, StateEntry]:
    """Return all values by `portable` names as of `lasting_name`, for which ``wanted`` is true of the attribute and
    whether it is one.

    Containers that functions hold (`held_by_code`) are always included, and globals and closure variables that they may
    set.
    """
    found = {}
    rebound = state.reach.names_rebound()
    for place in state.places:
        attribute, code = "" if place.is_attributes else attribute_in(place.name), held_by_code(place.name)
        if code and place.keys is not None and wanted("", False):  # as one value, too
            found[portable(place.name)] = StateEntry(
                dict(zip(place.keys, place.values, strict=True)), attribute, False, object
            )
        if place.keys is not None and (place.is_attributes or code or wanted(attribute, False)):
            for key, value in zip(place.keys, place.values, strict=True):
                if not place.is_attributes or wanted(str(key), True):
                    one = StateEntry(value, attribute or str(key), place.is_attributes, place.kind)
                    found[portable(place.entry(key))] = one
        elif isinstance(place.owner, (list, collections.deque, set)) and (code or wanted(attribute, False)):
            values = set(place.values) if isinstance(place.owner, set) else place.values
            found[portable(_content(place))] = StateEntry(values, attribute, False, object)
        elif place.set_one is not None and (code in rebound if place.kind is object else wanted(attribute, True)):
            found[portable(place.name)] = StateEntry(place.values[0], attribute, place.kind is not object, place.kind)
        elif isinstance(place.view, ClassEntries):
            for key, value in zip(place.view.names, place.values, strict=True):
                if wanted(key, True) and not isinstance(value, _OF_CLASSES):
                    found[portable(place.name + key)] = StateEntry(value, key, True, place.owner)
    return found


def spread(
    state: PythonState, names: Iterable[str], values: Mapping[str, Any] = MappingProxyType({}), *, classes: bool = True
) -> bool:
    """Put poison at ``names``, also where nothing was; returns whether all could be reached. ``state`` has the old
    values.

    ``values``: what is put there instead, by name. ``classes``: also where other objects would find it, in classes and
    globals.
    """
    left = _outermost(set(map(portable, names)))
    inside: dict[str, list[str]] = {}
    for name in left:
        for at, sign in enumerate(name):
            if sign in ".[":
                inside.setdefault(name[: at + (sign == ".")], []).append(name)

    def taken(name: str) -> Any:
        left.discard(name)
        return values[name] if name in values else Poison()

    dictionaries = [
        (place, before, {portable(place.entry(key)): key for key in place.keys})
        for place in state.places
        if place.keys is not None and isinstance(place.owner, dict) and (before := portable(place.name)) in inside
    ]
    there = {name for _, _, keys in dictionaries for name in keys}  # a buffer's name is not set beside it as well
    for place, before, keys in dictionaries:
        for name in left.intersection(inside[before]):
            key = keys.get(name, MISSING if name in there else place.key_of(name[len(before) :]))
            if key is not MISSING:
                dict.__setitem__(place.owner, key, taken(name))
    for place in state.places:
        if place.keys is not None and isinstance(place.owner, dict):
            continue
        if _is_series(place):
            if (name := portable(_content(place))) in left:
                one = taken(name)
                grows = place.values and getattr(place.owner, "maxlen", None) is None
                longer = [*([one] * len(place.values)), Spare() if grows else one]
                content = list(one) if name in values else longer
                place.owner.clear()
                place.owner.extend(content)
        elif isinstance(place.owner, type):
            for key in list(vars(place.owner)):
                if (name := portable(place.name + key)) in left and (classes or name in values):
                    type.__setattr__(place.owner, key, taken(name))
        elif (name := portable(place.name)) in left and place.set_one is not None:
            own = place.kind is not object
            if classes or own or name in values:
                place.set_one(taken(name))
    return not left


def _outermost(names: set[str]) -> set[str]:
    """Return the names that are not inside another one of them."""
    ends = {name: [at for at, sign in enumerate(name) if sign in ".["] for name in names}
    return {name for name in names if not any(name[:end] in names for end in ends[name])}


@contextlib.contextmanager
def poisoned(
    state: PythonState, names: Iterable[str], values: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[bool]:
    """In the block the model has poison, or ``values``, at ``names`` (`spread`, of its own objects); the block may
    raise `Read`. Then ``state`` is restored. Yields whether all were reached.
    """
    state.restore()
    try:
        yield spread(state, names, values, classes=False)
    finally:
        state.restore()


def _is_series(place: Container) -> bool:
    return isinstance(place.owner, (list, collections.deque))


def remains(value: Any, depth: int = 6) -> bool:
    """Return whether a value contains poison."""
    if hasattr(type(value), "is_poison"):
        return bool(type(value).is_poison)
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
    """Return whether any code may read an attribute of this name of objects of this class."""
    return reach.reads(name) or bool(_BY_NAME & reach.names) or name in reach.names_of_others(kind)


def agree(before: Any, now: Any, may_differ: Callable[[Any], bool] = lambda _: False, depth: int = 5) -> bool:
    """Return whether an equal value replaced the old one, and always will: ``may_differ`` is called with each part."""
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
    """Return names of what a run has changed since ``state`` that would tell on a later one if it were not put back;
    but for what is ``known``, by names as `portable` makes them.
    """
    return [change.name for change in left(state) if portable(lasting_name(change, state.places)) not in known]


def left(state: PythonState) -> list[StateChange]:
    """Return what a run has changed since ``state`` that would affect a later one if it were not undone."""
    return [
        change
        for change in state.changes()
        if not agree(change.before, change.now)
        and (not change.is_attribute or is_read(state.reach, change.attribute, change.kind))
    ]


def first_few(names: Iterable[str]) -> str:
    """Return the first few, and how many more."""
    known = list(dict.fromkeys(names))
    return ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")


def portable(name: str) -> str:
    """Return a name that is the same on both sides: without addresses, and not too long."""
    return _ADDRESS.sub("0x", name)[:200]


def _forms_agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both have the same layout in memory, which may affect what is computed from them."""
    plain = one.layout == other.layout == torch.strided and not (one.is_nested or other.is_nested)
    return plain and one.stride() == other.stride()
