"""Run a middle part: resume after one cut and stop at a later one. It is a tail that banks, as a head does.

What crosses the second cut is taken from a plan of this side, of inputs of the form in the first cut's description,
whose values do not matter. Both cuts are of that plan, so a storage that crosses both is the same storage in both: it
is in a slot already. What is made between them is captured where the plan says. If the plan's path differs from the
edge's (its description of the first cut differs), no middle part is possible.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from shared_hooks.crossing import Crossing, EarlyOutput
from shared_hooks.errors import CutRefused, IsthmusError, ModelFailed, UnknownLayer
from shared_hooks.forward import HookExitException, run_plain
from shared_hooks.head import Banking, Diverged, watching
from shared_hooks.modules import ModuleInfo
from shared_hooks.planning import Capture, Cut, Cutting, Follower, Plan, Planner
from shared_hooks.state import Dice
from shared_hooks.tail import TailSession
from shared_hooks.tail.rehearsal import arguments_from
from shared_hooks.tensors import ClassFinder, Structure, View, form_of


@dataclass(frozen=True)
class Span:
    """A plan and two cuts of it: ``first`` with what crossed there, ``last`` with what is to cross, the later one."""

    plan: Plan
    first: Cutting
    last: Cutting
    target: Crossing

    @property
    def has_decisions(self) -> bool:
        """Whether Python reads data between the two."""
        return any(self.first.position < seq < self.last.position for seq in self.plan.trace.dynamic)


def span_between(planner: Planner, early: EarlyOutput, end: Cut, device: torch.device, find: ClassFinder) -> Span:
    """Return the span from ``early``'s cut to ``end``; inputs of its form are planned if needed.

    Raises UnknownLayer, and CutRefused with the reason.
    """
    wrong: Exception | None = None
    for args, kwargs in likely_inputs(early.crossing, device, find):
        try:
            return span_of(planner.plans_for(args, kwargs), early, end)
        except Exception as error:  # the model's own, too: these inputs are made up
            wrong = wrong or error
    if isinstance(wrong, CutRefused | UnknownLayer):
        raise wrong
    raise CutRefused(f"inputs of this form cannot be planned here: {type(wrong).__name__}: {wrong}") from wrong


def span_of(plans: Iterable[Plan], early: EarlyOutput, end: Cut) -> Span:
    """Return the span of the plan whose path ``early`` took. Raises UnknownLayer, and CutRefused with the reason."""
    crossing, wrong = early.crossing, "no plan of this side takes the path that the first part took"
    for plan in plans:
        last_one = plan.resolve(end)
        try:
            begin = plan.place_at(crossing.layer_id, crossing.layer_name)
            if plan.position(end) < plan.position(begin):
                name = "input" if last_one is None else last_one.name
                raise CutRefused(
                    f"end={name!r} comes before start={crossing.layer_name!r}, where the middle part begins"
                )
        except UnknownLayer:
            continue  # on this path that layer does not run
        known = _known_values(plan, begin)
        wide = known is None or list(early.values) != known
        try:
            first, mine = plan.cutting(begin, wide=wide)
        except CutRefused as error:
            wrong = str(error)
            continue
        if not _is_same(mine, crossing):
            continue
        last, target = plan.cutting(end, wide=wide)
        # the plan that is compared at the end is the edge's
        if target.plan_digest != crossing.plan_digest:
            target = replace(target, plan_digest=crossing.plan_digest, cache={})
        return Span(plan, first, last, target)
    raise CutRefused(f"between {crossing.layer_name} and {end}: {wrong}")


def _known_values(plan: Plan, cut: Cut) -> list[Structure] | None:
    """Return what the plan's own run read from data before a cut; None if there is no such cut."""
    try:
        banked = plan.cutting(cut)[0].banked
    except CutRefused:
        return None
    return [plan.trace.ops[ordinal].structure or ["v", None] for ordinal in banked]


def _is_same(mine: Crossing, theirs: Crossing) -> bool:
    """Return whether both are of one path, with the same storages; more of a storage may cross there than here."""
    slots = [[(slot.dtype, slot.elements) for slot in one.slots] for one in (mine, theirs)]
    return (
        mine.path_digest == theirs.path_digest
        and slots[0] == slots[1]
        and mine.reads == theirs.reads
        and mine.marks == theirs.marks
        and set(mine.generators) <= set(theirs.generators)
    )


def likely_inputs(
    crossing: Crossing, device: torch.device, find: ClassFinder
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield inputs of the form of a cut's, to plan with: values that many models accept, then others."""
    dice = torch.Generator().manual_seed(0)
    for number in (0, 1):
        tensors = []
        for form in crossing.inputs:
            whole = torch.full((View(form.shape, form.stride, 0).end,), number, dtype=form.dtype)
            if form.dtype.is_floating_point and whole.itemsize >= 2:
                whole = torch.rand(whole.shape, generator=dice).to(form.dtype)
            tensors.append(whole.to(device).as_strided(form.shape, form.stride))
        yield arguments_from(crossing.input_structure, tensors, find)


class MiddleSession(Banking, TailSession):
    """A tail of ``span.first`` that stops at ``span.last`` with an `EarlyOutput`."""

    ends = False

    def __init__(self, span: Span, *tail: Any) -> None:
        TailSession.__init__(self, *tail)
        self.span = span
        read = dict(zip(span.first.banked, self.values, strict=True))
        self.stop_at(span.plan, span.last, span.target, None, span.first.position, read)
        slots = dict(zip(span.first.storages, self.placing.slots, strict=True))
        numbers = {storage: number for number, storage in enumerate(span.first.storages)}
        self.placing.filled = {}
        self.passed_on: dict[int, int] = {}
        """Slots of the second cut that are slots of the first."""
        if span.has_decisions:
            self.follower = Follower.of_storages(slots)
        captures = []
        for number, (storage, capture) in enumerate(zip(span.last.storages, span.last.captures, strict=True)):
            if storage in numbers and capture.kind != "nothing":
                self.passed_on[number] = numbers[storage]
                # this side's memory belongs to the request, unless the frontier was passed on unchanged
                capture = Capture("slot", None, 0, View((storage.elements,), (1,), 0), copy=True)
            elif capture.kind != "nothing" and storage.created <= span.first.position:
                raise CutRefused(f"{_between(span)}: memory that the model had before crosses the second cut only")
            else:
                self.want(number, capture)
            captures.append(capture)
        self.cutting = replace(span.last, captures=tuple(captures))
        self.watchers = ExitStack()

    @property
    def is_watched(self) -> bool:
        return self.resumed and super().is_watched

    def begin(self) -> None:
        self.watchers.enter_context(watching(self))
        super().begin()

    def _resume(self) -> None:
        self.in_operation = True  # our own work is not an operation of the model
        try:
            with torch._C.DisableTorchFunction():
                super()._resume()
        finally:
            self.in_operation = False

    def leave(self, *, only_on_top: bool = False) -> None:
        super().leave(only_on_top=only_on_top)
        if not only_on_top:
            self.watchers.close()

    def through(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EarlyOutput:
        """Return what crosses the second cut. Raises CutRefused if the model leaves the plan's path."""
        try:
            try:
                model(*args, **kwargs)
            except HookExitException as leaving:
                if leaving is not self.exit:
                    raise
            except Exception:
                if not self.stopped:  # cleanup code of the model may read values that were not sent
                    raise
            if not self.stopped:
                raise Diverged
            early = self.early()
            if [form_of(value) for value in early.values] != [read.form for read in early.crossing.reads]:
                raise Diverged
            return early
        except Diverged:
            raise CutRefused(f"{_between(self.span)} the model took another path than the plan of this side") from None

    def early(self) -> EarlyOutput:
        filled = self.placing.filled or {}
        for number, slot in self.passed_on.items():  # constants stay where the model's own code made them
            self.found[number] = filled.get(slot, self.placing.slots[slot])
        return super().early()

    def failed(self, error: BaseException) -> None:
        if not self.stopped:
            super().failed(error)

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        was_resumed = self.resumed
        output = super().call(module, forward, args, kwargs)
        if self.resumed and not was_resumed and not self.stopped:  # it was entered before the first cut
            info = self.modules.get(module)
            if info is not None:
                self.bank_module(info.path, self.counts.get(info.path, 1), output)
        return output

    def run(self, info: ModuleInfo, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call behind the first cut."""
        if self.stopped:
            raise self.exit  # the model has caught it
        self.in_opaque += info.opaque
        try:
            return super().run(info, forward, args, kwargs)
        finally:
            self.in_opaque -= info.opaque

    def module_done(self, info: ModuleInfo, call: int, output: Any) -> None:
        self.bank_module(info.path, call, output)

    def layer_done(self, info: ModuleInfo, call: int, output: Any) -> None:
        super().layer_done(info, call, output)
        self.bank_layer(self.next_layer, info.path)

    def release(self) -> None:
        super().release()
        self.release_bank()


def _between(span: Span) -> str:
    first = span.plan.trace.places.calls
    begins = [call.name for call in first if call.exit == span.first.position]
    return f"between {begins[0] if begins else 'input'} and {span.target.layer_name}"


# A model in a process of its own, for `verify`: nothing that one process shares between models (globals, attributes
# of classes, settings, generators) can hide an error there.


Make = Callable[[], nn.Module]
SECONDS = 5.0
"""Seconds for a process to end by itself."""


class Gone(Exception):
    """The process cannot answer: it has ended, or its input or output cannot be sent to another process. Says nothing
    about the model's answer.
    """


class Apart:
    """A process that runs cold models. ``make`` is called there, and ``wrap`` for what runs tails of the model.

    As always with Python's ``multiprocessing``, both must be importable there, and a script guards what it runs by ``if
    __name__ == "__main__"``. Use as a context manager. Raises `Gone` if they are not importable.
    """

    def __init__(self, make: Make, wrap: Callable[[nn.Module], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_answer, args=(theirs, make, wrap, torch.get_num_threads()), daemon=True, name="isthmus-verify"
        )
        try:
            with _starting_without_interrupts():
                self._process.start()
        except Exception as error:
            self._pipe.close()
            raise Gone(f"the model cannot be made in another process: {error!s:.200}") from error
        finally:
            theirs.close()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any], dice: Dice) -> Any:
        """Run a new model there, whose generators start with ``dice``, and return its output.

        Raises ModelFailed with the model's own error, and `Gone`.
        """
        return self._call("whole", (args, kwargs, dice))

    def tail(self, data: bytes) -> Any:
        """Run a tail there, of `EarlyOutput.to_bytes`, and return its output.

        Raises ModelFailed, `Gone`, and IsthmusError for a refusal.
        """
        return self._call("tail", data)

    def _call(self, what: str, given: Any) -> Any:
        try:
            self._pipe.send((what, given))
            reported, value = self._pipe.recv()
        except Exception as error:
            raise Gone(f"the process that runs the model alone: {type(error).__name__}: {error}") from error
        if reported != "gave":
            raise {"refused": IsthmusError, "failed": ModelFailed}.get(reported, Gone)(value)
        return value


@contextlib.contextmanager
def _starting_without_interrupts() -> Iterator[None]:
    """Block Ctrl-C in a process that is started in this block: a terminal sends it to both, and the parent ends it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answer(pipe: Connection, make: Make, wrap: Callable[[nn.Module], Any], threads: int) -> None:
    """Serve requests in the process until there are no more. It ends with its parent, whatever the model does then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be blocked
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    wrapped = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            what, given = pipe.recv()
            try:
                if what == "whole":
                    args, kwargs, dice = given
                    model = make()
                    dice.restore()
                    output = run_plain(model, args, kwargs)
                else:
                    wrapped = wrapped or wrap(make())
                    early = EarlyOutput.from_bytes(given, max_bytes=1 << 40)
                    torch.manual_seed(1)  # another process's generators have an unrelated state
                    output = wrapped.tail(early)
                reported: tuple[str, Any] = "gave", output
            except IsthmusError as error:
                reported = "refused", str(error)
            except MemoryError as error:
                reported = "gone", f"no memory: {error}"
            except Exception as error:
                reported = "failed", f"{type(error).__name__}: {error}"
            try:
                pipe.send(reported)
            except (EOFError, OSError):
                raise
            except Exception as error:  # an output that cannot be sent to another process
                pipe.send(("gone", f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
