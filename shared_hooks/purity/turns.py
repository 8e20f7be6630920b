"""Runs of one model: concurrent if its Python provably writes no state, else one after the other, each from the same
state.

What code keeps in an attribute from one line to the next would be another thread's by then, and what it keeps from one
forward to the next would be another caller's: a wrong answer, from another caller's data. So such a model runs in one
thread at a time, and what a run leaves behind is undone after it, whatever path it took.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import ModelChanged, PlanMismatch
from shared_hooks.forward import MemoryKept
from shared_hooks.purity.modules import pure_modules
from shared_hooks.state import PythonState, Settings, first_few
from shared_hooks.tensors import held

_PAST_COUNTERS = {"data", "untyped_storage", "set_"}
"""Attributes and methods by which code can write to a tensor without raising its version counter."""


class Turns:
    """Decides which runs of one model may overlap; determined when it first runs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._lock = threading.RLock()
        self._is_pure: bool | None = None
        self._state: PythonState | None = None
        self._tensors: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []
        self._hides_writes = False
        self.before: PythonState | None = None
        """In a turn of a model that may keep state: its state at the beginning."""
        self.nested = 0
        """The nesting depth of turns of this thread, if the model keeps state."""
        self.looked = False
        """Whether, in this turn, the state was found unchanged, and nothing of the model runs any more."""
        self.broken = ""
        """What a run has changed and cannot be restored; empty if there is none."""

    def one(self, *, writes: bool = False, foreseen: bool = True) -> AbstractContextManager[Any]:
        """A run of the model, or several that belong together; nests in one thread.

        ``writes``: according to a plan it writes in place to its own tensors, with known effect. ``foreseen``: it
        follows a plan to its end; false if data may lead it elsewhere. Raises ModelChanged at the end of a run that
        wrote unforeseen, and from then on for every run until `renew`.
        """
        watches = not foreseen and not writes
        if self._may_run_at_once():
            return self._watched() if watches else nullcontext()
        return self._turn(writes, watches)

    def alone(self) -> AbstractContextManager[Any]:
        """As `one`, for a model that is not cut: what it keeps stays."""
        return nullcontext() if self._may_run_at_once() else self._lock

    def _may_run_at_once(self) -> bool:
        if self._is_pure is None:
            modules = set(self.model.modules())
            self._is_pure = pure_modules(modules) == modules
        return self._is_pure

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A concurrent run, in which only writes in place can stay."""
        self._check()
        with self._lock:
            self.state()
            marks, tensors = self._marks(), self._tensors
        try:
            with self._put_back():
                yield
        finally:
            self._look(marks, tensors)
        self._check()

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Undo writes that torch's version counters miss. Raises PlanMismatch if there were any."""
        if not self._hides_writes:
            yield
            return
        kept = MemoryKept(self._tensors)
        try:
            with kept:
                yield
        finally:
            written = kept.changed()
            kept.restore()
        if written:
            raise PlanMismatch(
                "the model took a path on which it writes to parameters or buffers of its own, which no plan has seen; "
                "they are as they were"
            )

    @contextmanager
    def _turn(self, writes: bool, watches: bool) -> Iterator[None]:
        with self._lock:
            if self.nested:
                self.nested += 1
                try:
                    yield
                finally:
                    self.nested -= 1
                return
            self._check()
            state = self.before = self.state()
            settings, marks, tensors = Settings(), self._marks(), self._tensors
            self.nested += 1
            self.looked = False
            try:
                with self._put_back() if watches else nullcontext():
                    yield
            finally:
                self.nested -= 1
                left = settings.restore()
                if not self.looked and not state.looks_same:
                    left += state.restore()
                if left:
                    self.broken = first_few(left)
                if not writes:
                    self._look(marks, tensors)
            self._check()

    def state(self) -> PythonState:
        """Return the state before a run; determined again only if the model's owner has changed it since the
        last one.
        """
        if self._state is None or not self._state.looks_same:
            self._state = PythonState(self.model, settings=False)
            tensors = {id(one): held(one) for one in (*self.model.parameters(), *self.model.buffers())}
            tensors |= {id(one): one for one in self._state.tensors()}
            self._tensors = [one for one in tensors.values() if one.layout == torch.strided]
            self._counted = [one for one in self._tensors if not one.is_inference()]
            self._hides_writes = not _PAST_COUNTERS.isdisjoint(self._state.reach.names)
        return self._state

    def renew(self) -> None:
        """The model was restored."""
        with self._lock:
            self.broken, self._state = "", None

    def _marks(self) -> tuple[list[int], list[int], list[type]]:
        """Return what shows a write in place to one of the model's tensors, other memory, or another class of one."""
        return (
            [one._version for one in self._counted],
            [one.data_ptr() for one in self._tensors],
            list(map(type, self._tensors)),
        )

    def _look(self, marks: tuple[list[int], list[int], list[type]], tensors: list[torch.Tensor]) -> None:
        """Check after a run whether one of these tensors was written. A class is restored, content cannot be."""
        if self._marks() == marks:
            return
        versions, places, kinds = marks
        for one, kind in zip(tensors, kinds, strict=True):
            if type(one) is not kind:
                one.__class__ = kind
        now = self._marks()
        written = [one for one, was, new in zip(self._counted, versions, now[0], strict=True) if was != new]
        written += [one for one, was, new in zip(tensors, places, now[1], strict=True) if was != new]
        names = {id(one): name for name, one in (*self.model.named_parameters(), *self.model.named_buffers())}
        if written:
            self.broken = first_few(names.get(id(one), "a tensor that it keeps") for one in written)

    def _check(self) -> None:
        if self.broken:
            raise ModelChanged(
                f"the model has changed {self.broken} while it ran, on a path that no plan has seen, which cannot be "
                "put back: load it again"
            )
