"""All mutable Python state that a model's code can reach (`state_walk`), as it is at one moment: to compare, and to put
back.

Comparing is made to be cheap, since planning does it after many layers: one pass over all containers, in C.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from shared_hooks.state.places import MISSING, Change, ClassEntries, Fetched, fetched_all
from shared_hooks.state.walk import Walk

# The settings of the process and of the thread that a forward may change. Random numbers are `dice`'s.

_DEVICES = ("cpu", "cuda")


def _device() -> torch.device | None:
    """What tensors are made on by default. `torch.get_default_device` says the same in ten times the time,
    and planning asks after many a layer.
    """
    for place in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)


def _set_autocast(value: tuple[Any, ...]) -> None:
    for device, (enabled, dtype) in zip(_DEVICES, value, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _attention() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def _set_attention(value: tuple[bool, ...]) -> None:
    torch.backends.cuda.enable_flash_sdp(value[0])
    torch.backends.cuda.enable_mem_efficient_sdp(value[1])
    torch.backends.cuda.enable_math_sdp(value[2])


def _flags() -> tuple[Any, ...]:
    backends = torch.backends
    return (
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cuda.matmul.allow_tf32,
        backends.cudnn.allow_tf32,
    )


def _set_flags(value: tuple[Any, ...]) -> None:
    backends: Any = torch.backends
    torch._C._set_mkldnn_enabled(value[0])
    backends.cudnn.enabled, backends.cudnn.benchmark = value[1:3]
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = value[3:]


def _flushes_denormals() -> bool:
    """Whether this thread does. torch offers no way to ask, but Python divides by the same unit."""
    return sys.float_info.min / 2 == 0.0


_OWN = {name: value for name, value in vars(torch.nn.functional).items() if callable(value)}


def _functional() -> dict[str, Any]:
    """Functions that stand in place of torch's own. Others in this process may have put some there for a while (a
    compiler does): what was there before a run and is not torch's is nobody's to put back.
    """
    space = vars(torch.nn.functional)
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
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's attention kernels": (_attention, _set_attention),
    "torch's backend flags": (_flags, _set_flags),
    "torch's anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "torch's denormal numbers": (_flushes_denormals, torch.set_flush_denormal),
    "functions of torch.nn.functional": (_functional, _set_functional),
}


def _differs(now: Any, kept: Any) -> bool:
    try:
        return bool(now != kept)
    except Exception:  # something else has been put there: a tensor, in place of a function
        return True


class Settings:
    """All of them as they are now."""

    def __init__(self) -> None:
        self._kept = {name: get() for name, (get, _) in SETTINGS.items()}

    def changed(self) -> list[str]:
        """Names of those that differ now."""
        return [name for name, value in self._kept.items() if _differs(SETTINGS[name][0](), value)]

    def restore(self) -> list[str]:
        """Put back what differs; names of what could not be."""
        for name in self.changed():
            with contextlib.suppress(Exception):
                SETTINGS[name][1](self._kept[name])
        return self.changed()


_MUTABLE = (dict, list, set, collections.deque)


class PythonState:
    """A model's Python state at the moment this is made. ``overflow``: there is more than is looked at."""

    def __init__(self, model: nn.Module, *, settings: bool = True) -> None:
        walk = Walk(model)
        self.places, self.probes, self.reach, self.overflow = walk.places, walk.probes, walk.reach, walk.overflow
        self.settings = Settings() if settings else None
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
        # a comparison of tensors would compute: containers of tensors are compared by identity
        plain = [place for place in whole if not any(isinstance(value, torch.Tensor) for value in place.values)]
        self._owners = [place.view.held if isinstance(place.view, ClassEntries) else place.owner for place in plain]
        self._copies = [copy.copy(owner) if isinstance(owner, _MUTABLE) else dict(owner) for owner in self._owners]
        known = set(map(id, plain))
        tensors = [place for place in whole if id(place) not in known]
        self._held = [place.view for place in tensors]
        self._held_lengths = [len(place.values) for place in tensors]
        self._held_flat = [value for place in tensors for value in place.values]

    # -- comparing ----------------------------------------------------------------------------------------------

    @property
    def is_same(self) -> bool:
        """Whether nothing has changed since; some tens of microseconds for a large model."""
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
        if any(probe.now() != kept for _, probe, kept in self.probes):
            return False
        return self.settings is None or not self.settings.changed()

    @property
    def looks_same(self) -> bool:
        """As `is_same`, but a value may have become an equal one; a third of its time."""
        try:
            held = itertools.chain.from_iterable(self._held)
            if (
                self._owners != self._copies
                or any(self._hooks)
                or list(map(len, self._held)) != self._held_lengths  # type: ignore[arg-type]
                or not all(map(operator.is_, held, self._held_flat))
                or not all(map(operator.is_, fetched_all(self._fetch), self._fetched))
            ):
                return False
        except Exception:  # two tensors, or another thread changes it just now
            return False
        return all(probe.now() == kept for _, probe, kept in self.probes)

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
