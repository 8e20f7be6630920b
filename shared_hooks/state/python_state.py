"""All mutable Python state that a model's code can reach (`state_walk`), as it is at one moment: to compare, and to put
back.

Comparing is made to be cheap, since planning does it after many layers: one pass over all containers, in C.
"""

from __future__ import annotations

import collections
import copy
import itertools
import operator

import torch
from torch import nn

from shared_hooks.state.places import MISSING, Change, ClassEntries, Fetched, fetched_all
from shared_hooks.state.settings import Settings
from shared_hooks.state.walk import Walk

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
