"""A middle part of a generation, in a chain of servers: a step runs from one cut to a later one, and the next server
computes the rest of it, asked as an edge asks.

For the server before it the session is a tail's, for the next one an edge's (`EdgeSession`). What the edge sent about
inputs, state and calls is passed on unchanged. This part adds its calls to the reports, its changes of the state to
"more", and replaces what crossed the first cut by what crosses the second. The answer goes back likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shared_hooks.errors import MALFORMED, BadFrame, CutRefused
from shared_hooks.forward import HookExitException
from shared_hooks.generation import hidden
from shared_hooks.generation.cut import GenerationCut, check_order
from shared_hooks.generation.edge_session import EdgeSession, StepLink
from shared_hooks.generation.hidden import InsideCalls, KeptState
from shared_hooks.generation.mirror import LastSent, Mirror, differences
from shared_hooks.generation.remote_tensor import Origin, RemoteRead, RemoteTensor, kept_here
from shared_hooks.generation.session import (
    CALLS,
    LEAVES,
    DecodingSession,
    DecodingTail,
    Header,
    Message,
    NeededBehind,
    RunningStep,
    SessionKnown,
    StepAnswer,
)
from shared_hooks.generation.split import HISTORY_BYTES, MOST_TRIES
from shared_hooks.generation.tail import Middle, Tail
from shared_hooks.modules import running
from shared_hooks.state import PythonState

_PASSED_ON = ("in", "f", "new", "do", "c", "w", "rng", "born", "d")
"""The parts of a step's header that are passed on unchanged."""


@dataclass
class _Left(StepAnswer):
    """The state at the second cut. ``inputs``: the tensors of the step that are the model's inputs; ``kept``: what the
    model keeps there; ``left``: what calls have changed on it, as reported to the server before; ``changed``: all
    names.
    """

    runner: Middle
    inputs: list[torch.Tensor]
    changes: Any
    kept: KeptState | None
    left: list[Any]
    changed: frozenset[str]


class MiddleDecodingSession(DecodingSession):
    """A session of ``tail`` that ends at ``second``, a later call's path, and asks the server behind ``link`` for the
    rest.

    Raises UnknownLayer, and CutRefused if the second cut cannot follow the first.
    """

    takes_back = False

    def __init__(self, tail: DecodingTail, second: str, link: StepLink, onward: EdgeSession | None = None) -> None:
        super().__init__(tail)
        self._link = link
        self._second = GenerationCut.of(tail.model, second)
        check_order(tail.cut, self._second)
        self._onward = EdgeSession(link, None, HISTORY_BYTES) if onward is None else onward
        self._up: LastSent = None

    def fork(self) -> DecodingSession:
        """Return a copy, which continues independently."""
        made = MiddleDecodingSession(self._tail, self._second.name, self._link, self._onward.copied())
        made._known, made._spoilt, made._up = self._known.copied(), self._spoilt, self._up
        made._mirror = None if self._mirror is None else self._mirror.copied()
        return made

    def close(self) -> None:
        """Release the session on the next server."""
        self._onward.close()

    def _stepped(self, known: SessionKnown, header: Header, tensors: list[torch.Tensor]) -> StepAnswer:
        return _MiddleStep(self._second, self._tail, known, self._mirror, header, tensors).run()

    @property
    def nbytes(self) -> int:
        """The bytes that it keeps, including steps that may be repeated for the next server."""
        return super().nbytes + self._onward.history.nbytes

    def _completed(
        self, known: SessionKnown, answer: StepAnswer, undone: Callable[[BaseException], Message]
    ) -> Message | Callable[[], Message]:
        assert isinstance(answer, _Left)
        return partial(self._continued, known, answer, undone)

    @torch.no_grad()
    def _continued(self, known: SessionKnown, answer: _Left, undone: Callable[[BaseException], Message]) -> Message:
        """Make the step at the next server, and return the answer."""
        onward = self._onward
        marks = onward.marks()
        try:
            header, tensors, up = self._message(answer)
            reply = self._sent(answer, header, tensors)
            answered = self._answered(known, answer, reply.header, reply.tensors)
        except BaseException as error:
            onward.back(marks)  # if the next server has made the step, the step number shows it
            if isinstance(error, NeededBehind):
                onward.reports = {}  # reported again with the same step
            return undone(error)
        onward.done(header, tensors)
        self._up = up
        return self._done(known, answered)

    def _message(self, answer: _Left) -> tuple[Header, list[torch.Tensor], LastSent]:
        up = self._up
        given, head, onward = answer.header, answer.runner.head, self._onward
        header = {name: given[name] for name in _PASSED_ON if name in given}
        if answer.kept is not None:
            header["m"] = answer.kept.header_data()
        if answer.mirror is not None:
            message, up = differences(answer.changes, up)
            header["more"] = [*given.get("more", []), message]
        entries = [*given.get("b", []), *head.watch.entries]
        if entries:
            header["b"] = entries
        reported = {(one[0], one[1]): one for one in head.reports()}
        changed = [one for key, one in reported.items() if onward.reports.get(key) != one]
        if changed or "t" in given:
            header["t"] = [*given.get("t", []), *changed]
        onward.reports = reported
        tensors = list(answer.inputs)
        self._add_crossing(answer, header, tensors)
        return header, tensors, up

    def _add_crossing(self, answer: _Left, header: Header, tensors: list[torch.Tensor]) -> None:
        onward, head = self._onward, answer.runner.head
        passed = [-1] * len(head.leaves) if onward.all_leaves else head.passed
        crossing = [head.structure, passed, int(head.is_shared)]
        if crossing != onward.crossing:
            header["x"] = onward.crossing = crossing
        leaves = [leaf for leaf, number in zip(head.leaves, passed, strict=True) if number < 0]
        if any(type(leaf) is RemoteTensor for leaf in leaves):
            raise CutRefused(f"{self._second.name} gives a value that is not on this side")
        tensors += leaves
        if onward.extras:
            header["e"] = list(onward.extras)
            tensors += [self._extra(answer, one, "it needs it again") for one in onward.extras]

    def _extra(self, answer: _Left, need: Any, why: object) -> torch.Tensor:
        """Return what the next server needs of a call before its cut. Raises NeededBehind if only the edge has it."""
        try:
            origin = Origin("call", str(need[0]), int(need[1]), int(need[2]))
        except MALFORMED as error:
            raise BadFrame(f"malformed answer to a step: {error!s:.120}") from error
        own = answer.runner.head.value(origin)
        found = own if own is not None and type(own) is not RemoteTensor else answer.runner.sent.get(origin)
        if found is None:
            raise NeededBehind(need, why)
        return found

    def _sent(self, answer: _Left, header: Header, tensors: list[torch.Tensor]) -> Any:
        onward = self._onward
        for _ in range(MOST_TRIES):
            reply = onward.send(header, tensors)
            need, why = reply.header.get("need"), reply.header.get("why")
            if need is None:
                return reply
            if need == CALLS:
                raise NeededBehind(need, why)
            if need == LEAVES and not onward.all_leaves:
                onward.all_leaves = True
            elif isinstance(need, list) and need[:1] == [hidden.KEPT] and answer.kept is not None:
                header["u"] = _compared(answer.kept, need[1], answer.header.get("u", []), why)
            elif isinstance(need, list) and need not in onward.extras:
                self._extra(answer, need, why)
                onward.extras.append(need)
            else:
                break
            del tensors[len(answer.inputs) :]
            self._add_crossing(answer, header, tensors)
        raise CutRefused(f"the tail after {self._second.name} cannot be run: {reply.header.get('why')!s:.300}")

    def _answered(self, known: SessionKnown, answer: _Left, header: Header, tensors: list[torch.Tensor]) -> StepAnswer:
        """Return the next server's answer for the one before, with what this part did and what only it has."""
        tensors, head = list(tensors), answer.runner.head
        leaves = []
        try:
            for leaf in header["o"]:
                if leaf[0] == "call":
                    own = head.value(Origin("call", str(leaf[1]), int(leaf[2]), int(leaf[3])))
                    if own is not None and type(own) is not RemoteTensor:
                        tensors.append(own)
                        leaf = ["s", len(tensors) - 1]
                leaves.append(leaf)
            left = list((dict(answer.left) | dict(header.get("m", []))).items())
            behind = frozenset(str(name) for name, _ in header.get("m", []))
            known.behind = behind - answer.changed - known.unread
        except MALFORMED as error:
            raise BadFrame(f"malformed answer to a step: {error!s:.120}") from error
        reply: Header = {"o": leaves, **{name: header[name] for name in ("r", "rng") if name in header}}
        if left and left != known.left:
            reply["m"] = known.left = left
        if answer.mirror is not None:
            self._onward.apply_changes(answer.mirror, header)
            reply["d"], known.down = differences(answer.changes, known.down)
            reply["more"] = [header.get("d", []), *header.get("more", [])]
        return StepAnswer(reply, tensors, answer.mirror)


def _compared(kept: KeptState, there: Any, reported: list[Any], why: object) -> list[Any]:
    """As `KeptState.compared`; for what this part does not know, the edge has ``reported`` it. Raises NeededBehind if
    it has not, and BadFrame.
    """
    try:
        requested = {name: at_cut for name, at_cut, _ in there if kept.summaries.get(name) is None}
        if rest := hidden.read_comparison(reported, requested)[2]:
            raise NeededBehind([hidden.KEPT, [row for row in there if row[0] in rest]], why)
        return [
            *kept.compared([row for row in there if row[0] not in requested]),
            *[row for row in reported if row[0] in requested],
        ]
    except MALFORMED as error:
        raise BadFrame(f"malformed answer to a step: {error!s:.120}") from error


class _MiddleStep(RunningStep):
    def __init__(self, second: GenerationCut, *step: Any) -> None:
        super().__init__(*step)
        self._second = second
        self.needed = self._tail.needed_up_to(second)
        self._kept: KeptState | None = None
        """What the model keeps at the second cut, if the edge reports what its own keeps at the first."""
        if "new" in self._header or "born" in self._header or self._mirror is None:
            self._look = InsideCalls(self._tail.model, self._tail.turns.before)

    def _runner(self, make: Callable[..., Tail] = Tail) -> Tail:
        return super()._runner(partial(Middle, self._second, self._look))

    def _output(self, kwargs: dict[str, Any], given: Mirror | None) -> tuple[Any, Tail]:
        found = super()._output(kwargs, given)
        if self._meets and "m" in self._header and self._tail.turns.before is not None:
            self._kept = KeptState.of(PythonState(self._tail.model, settings=False))
        return found

    def _called(self, running_tail: Tail, kwargs: dict[str, Any]) -> Any:
        assert isinstance(running_tail, Middle)
        try:
            super()._called(running_tail, kwargs)
        except HookExitException as leaving:
            if leaving is not running_tail.head.exit:
                raise
            leaving.__traceback__ = None
            return running_tail.head.leaves
        raise CutRefused(f"{self._second.name} is not called behind {self._tail.cut.name}")

    def _arrive(self, running_tail: Tail, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = super()._arrive(running_tail, args, kwargs)
        assert isinstance(running_tail, Middle)
        self._around.enter_context(running_tail.head.watch)
        return made

    def _answer(self, output: Any, running_tail: Tail) -> StepAnswer:
        assert isinstance(running_tail, Middle)
        if running_tail.head.failure is not None:
            raise running_tail.head.failure
        if self._mirror is None and self._header.get("born"):
            raise CutRefused(f"no module up to {self._tail.cut.name} is given the state that the model makes itself")
        token = running.set(running_tail)
        try:
            changes = None if self._mirror is None else self._mirror.look(kept_here)
        except RemoteRead as error:
            if error.need is not None:  # the edge can send it
                raise
            raise self._refused(error) from error
        finally:
            running.reset(token)
        self._extents.passed()
        self.needed.end_run()
        inputs = self._tensors[: self._used]
        kept = self._kept if self._kept is None else self._kept.without(self._other - self._as_left)
        return _Left(self._header, [], self._mirror, running_tail, inputs, changes, kept, self._left, self._changed)
