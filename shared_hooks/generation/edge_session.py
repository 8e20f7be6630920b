"""The edge's part of one generation: what was sent and received, and the steps kept to rebuild a lost session."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shared_hooks.crossing import Parcel
from shared_hooks.crossing.parcel import has_gaps
from shared_hooks.errors import (
    BadFrame,
    Cancelled,
    CutRefused,
    IsthmusError,
    ModelFailed,
    SessionLost,
    StepOutOfOrder,
)
from shared_hooks.generation.cut import USUAL
from shared_hooks.generation.hidden import is_state_class
from shared_hooks.generation.inputs import LITERALS, SentInputs, version_of
from shared_hooks.generation.mirror import LastSent, Mirror, put_more
from shared_hooks.generation.session import DecodingSession, DecodingTail
from shared_hooks.state import Dice
from shared_hooks.tensors import tensors_in

# How a step is sent to the other side. `InProcess` is for tests and studies: through bytes, without a network.


@dataclass(frozen=True)
class StepReply:
    """An answer. Bytes of headers and payloads, durations in nanoseconds on the server's clock.

    ``batch_size``: the most steps that were computed together, including this one; 1: computed alone.
    """

    header: dict[str, Any]
    tensors: list[torch.Tensor]
    bytes_up: int = 0
    bytes_down: int = 0
    durations: dict[str, int] = field(default_factory=dict)
    batch_size: int = 1


class StepLink(Protocol):
    """The sessions on the other side, by a number that the caller chooses."""

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        fork: tuple[int, int] | None,
    ) -> StepReply:
        """Make the ``number``-th step of a session, from 0; the first one opens it.

        ``fork``: it continues from that session after that many steps. Raises SessionLost if the other side has lost
        it.
        """

    def close(self, session: int) -> None:
        """Release a session. Never raises."""


class PendingStep(Protocol):
    """A step that was sent. ``bytes_up``: of its header and payload."""

    @property
    def bytes_up(self) -> int: ...

    @property
    def is_over(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def result(self, meanwhile: Callable[[], None] | None = None) -> StepReply:
        """Wait for its answer, as `EdgeLink.step`."""
        ...

    def cancel(self, why: IsthmusError) -> None:
        """Cancel it; the server may still compute it. Never raises."""


class EdgeLink(StepLink, Protocol):
    """A link of the side that calls the model."""

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        fork: tuple[int, int] | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> StepReply:
        """As `StepLink.step`. ``meanwhile``: checks of this side, made while the other one computes; an error of theirs
        is raised in place of the answer.
        """

    @property
    def begins(self) -> bool:
        """Whether a session may have several steps in progress (`begin`)."""
        ...

    def begin(
        self, session: int, number: int, header: dict[str, Any], tensors: list[torch.Tensor], branch: int
    ) -> PendingStep:
        """As `step`, without waiting for the answer. The server computes the steps of a session in order.

        ``branch``: how often steps have been taken back; steps of an earlier branch are not computed any more.
        """


class InProcess:
    """A link to a tail in this process. ``record``: a list that gets all bytes in both directions. ``opened``: creates
    special sessions (`middle`).
    """

    def __init__(
        self, tail: DecodingTail, record: list[bytes] | None = None, opened: Callable[[], DecodingSession] | None = None
    ) -> None:
        self._open = opened or tail.open
        self._record = record
        self.sessions: dict[int, DecodingSession] = {}
        self.steps: dict[int, int] = {}
        self._branches: dict[int, int] = {}
        self.begins = True

    def begin(
        self, session: int, number: int, header: dict[str, Any], tensors: list[torch.Tensor], branch: int
    ) -> PendingStep:
        """As `EdgeLink.begin`; the step is computed at once."""
        try:
            if branch > self._branches.get(session, 0) and number <= self.steps.get(session, -1):
                self._branches[session], self.steps[session] = branch, number
            elif branch < self._branches.get(session, 0):
                raise StepOutOfOrder(f"step {number} of session {session} was taken back")
            return _Answered(self.step(session, number, header, tensors, None))
        except IsthmusError as error:
            return _Answered(None, error)

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        fork: tuple[int, int] | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> StepReply:
        """As `StepLink.step`; BadFrame for steps out of order."""
        up = Parcel.of_tensors(header, tensors)
        meta, came = Parcel.tensors(up.header, self._through(up))
        if fork is not None and number == 0:
            if self.steps.get(fork[0]) != fork[1]:
                raise BadFrame(f"session {fork[0]} is not at step {fork[1]}")
            self.sessions[session], self.steps[session] = self.sessions[fork[0]].fork(), 0
        elif number == 0 and self.steps.get(session) != 0:  # if a step is missing, it has arrived meanwhile
            self.sessions[session], self.steps[session] = self._open(), 0
        if self.steps.get(session) != number:
            raise BadFrame(f"session {session} is not at step {number}")
        began = time.perf_counter_ns()
        dice = Dice()  # another process has its own generators
        try:
            answer, made = self.sessions[session].step(meta, came)
        except IsthmusError:
            raise
        except Exception as error:  # as a server reports it
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        finally:
            dice.restore()
        took = {"compute": time.perf_counter_ns() - began}
        if "need" not in answer:
            self.steps[session] = number + 1
        meanwhile()
        down = Parcel.of_tensors(answer, made)
        back, results = Parcel.tensors(down.header, self._through(down))
        return StepReply(back, results, len(up.header) + up.nbytes, len(down.header) + down.nbytes, took)

    def _through(self, parcel: Parcel) -> bytearray:
        data = bytearray().join(parcel.buffers)
        if self._record is not None:
            self._record += [parcel.header, bytes(data)]
        return data

    def close(self, session: int) -> None:
        """As `StepLink.close`."""
        gone = self.sessions.pop(session, None)
        if gone is not None:
            gone.close()
        self.steps.pop(session, None)


@dataclass(frozen=True)
class _Answered:
    """A `PendingStep` whose step is over."""

    reply: StepReply | None
    error: IsthmusError | None = None

    is_over = False  # as it would be on a network

    @property
    def bytes_up(self) -> int:
        return 0 if self.reply is None else self.reply.bytes_up

    def result(self, meanwhile: Callable[[], None] | None = None) -> StepReply:
        if meanwhile is not None:
            meanwhile()
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply

    def cancel(self, why: IsthmusError) -> None:
        """Does nothing: the step is over."""


# The calls of a session: the model's arguments step by step, so that the head can compute the steps again when their
# messages were too large to keep. Token ids are a few bytes each; hidden states are thousands.

SMALL = 4096
"""The number of elements up to which tensors are copied; with larger ones the session can be rebuilt unless they
are written to.
"""


@dataclass(frozen=True)
class SessionCall:
    """One call. ``state``: the name of the argument with the state, if any. ``done``: what was done to it before."""

    values: dict[str, Any]
    versions: list[tuple[torch.Tensor, int]]
    state: str | None
    done: list[Any]

    def kwargs(self, state: Any) -> dict[str, Any]:
        """Return the arguments of the model. Raises SessionLost if one was written to since."""
        if any(version_of(tensor) != version for tensor, version in self.versions):
            raise SessionLost("the session cannot be made again: the inputs of an earlier step were changed since")
        return self.values if self.state is None else {**self.values, self.state: state}


class SessionCalls:
    """The calls of one session in order; ``opening``: the form of its state at the first one."""

    def __init__(self) -> None:
        self.opening: Any = None
        self.entries: list[SessionCall] = []

    def add(self, kwargs: dict[str, Any], done: list[Any]) -> None:
        """Record a call."""
        values, state, versions = {}, None, []
        for name, value in kwargs.items():
            if is_state_class(type(value)):
                state = name
                continue
            if isinstance(value, torch.Tensor):
                value = value.clone() if value.numel() <= SMALL else value
                versions.append((value, 0 if value.is_inference() else value._version))
            elif type(value) not in LITERALS:
                versions += [(tensor, version_of(tensor)) for tensor in tensors_in(value)]
            values[name] = value
        self.entries.append(SessionCall(values, versions, state, list(done)))

    def copied(self) -> SessionCalls:
        """Return a copy for a session that continues from here independently."""
        made = SessionCalls()
        made.opening, made.entries = self.opening, list(self.entries)
        return made


_ids = itertools.count(1)
_SENT = ("up", "down", "around", "coded", "crossing", "structure", "all_leaves", "quiet", "wanted", "random")
SENT_UP = frozenset({"up", "around", "coded", "crossing", "inputs", "reports"})
"""The fields that a message to the other side changes."""
Step = tuple[dict[str, Any], list[torch.Tensor]]
_ONCE = ("keep", "back")
"""The parts of a header about steps that may be taken back, which are left out when a session is rebuilt."""


class History:
    """The steps of a session, as long as they take at most ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0
        self.steps: list[Step] | None = []

    @property
    def nbytes(self) -> int:
        """The bytes that they take."""
        return 0 if self.steps is None else self._bytes

    def add(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Record a step, with copies of its tensors."""
        for tensor in tensors:
            self._bytes += tensor.nbytes
        if self.steps is None or self._bytes > self._most:
            self.steps = None
            return
        once = {name: value for name, value in header.items() if name not in _ONCE}
        self.steps.append((once, [tensor.clone() for tensor in tensors]))

    def copied(self) -> History:
        """Return a copy for a session that continues from here independently."""
        made = History(self._most)
        made._bytes, made.steps = self._bytes, None if self.steps is None else list(self.steps)
        return made


class EdgeSession:
    """One session; `number` is its next step."""

    def __init__(self, link: StepLink, private: frozenset[str] | None, history_bytes: int) -> None:
        self.link = link
        self.id = next(_ids)
        self.number = 0
        self.inputs = SentInputs(private)
        self.up: LastSent = None
        self.down: LastSent = None
        self.downs: list[LastSent] = []
        """What each server behind the next one has reported, in a chain."""
        self.reports: dict[tuple[str, int], Any] = {}
        self.crossing: Any = None
        self.structure: Any = None
        self.extras: list[list[Any]] = []
        self.all_leaves = False
        self.coded: list[int] = []
        """Which of the tensors that cross are coded."""
        self.around: Any = USUAL
        self.quiet: Any = None
        """Values read from data that the other side reads, too: names of places."""
        self.wanted: Any = None
        """The answer that the other side knows to be wanted."""
        self.random: str | None = None
        """The digest of its generator's state, if it draws."""
        self.history = History(history_bytes)
        self.calls = SessionCalls()
        self.foreseen: deque[Any] = deque()
        """Steps after the current one that are in progress (`ahead.Foreseen`)."""
        self.bytes_in_vain = 0
        """Bytes sent for steps that were taken back, since the last step."""
        self.branch = 0
        """How often steps have been taken back."""
        self.takes_back = False
        """Whether the next step must take steps back."""
        self.keeps = False
        """Whether the server has kept the state before the last step."""
        self.remade: Callable[[EdgeSession], None] | None = None
        """Computes the steps again if they are not kept; see `SplitForward`."""
        self._asked = False
        """Whether the other side may have the session."""
        self._fork: tuple[EdgeSession, int] | None = None
        self._copies: list[weakref.ref[EdgeSession]] = []

    def copied(self) -> EdgeSession:
        """Return a session that continues from here independently; it opens with its first step, or before the next one
        here.
        """
        self._decide()
        made = EdgeSession.__new__(EdgeSession)
        made.__dict__.update(self.__dict__)
        made.id, made.number, made._asked = next(_ids), 0, False
        made.inputs, made.downs = self.inputs.copied(), list(self.downs)
        made.reports, made.extras = dict(self.reports), list(self.extras)
        made.history, made.calls = self.history.copied(), self.calls.copied()
        made._copies, made.foreseen, made.branch, made.keeps = [], deque(), 0, False
        made.takes_back = False
        opened = self._fork if self.number == 0 else (self, self.number)
        made._fork = opened
        if opened is not None:
            opened[0]._copies.append(weakref.ref(made))
        return made

    @property
    def is_waited_for(self) -> bool:
        """Whether a copy that continues from here is still to be opened."""
        copies = [one() for one in self._copies]
        return any(copy is not None and not copy.number for copy in copies)

    def marks(self) -> dict[str, Any]:
        """Return what has been sent and received, to restore with `back` if a step fails."""
        own = self.__dict__
        return {
            **dict(zip(_SENT, map(own.__getitem__, _SENT), strict=True)),
            "inputs": self.inputs.copied(),
            "downs": list(self.downs),
            "reports": dict(self.reports),
            "extras": list(self.extras),
        }

    def apply_changes(self, mirror: Mirror, header: dict[str, Any]) -> None:
        """Record what the other side, and the servers behind it in a chain, changed on the state."""
        self.down = mirror.put(self.down, header.get("d", []))
        put_more(mirror, self.downs, header)

    def back(self, marks: dict[str, Any]) -> None:
        """Restore what was sent and received before a step that failed."""
        self.__dict__.update(marks)

    def begin(self, header: dict[str, Any], tensors: list[torch.Tensor], after: int = 0) -> PendingStep:
        """Send a step, whose answer `send` waits for. ``after``: the number of steps in progress before it.

        The session must be open.
        """
        if not after:
            self._hold_copies()
        _add_layouts(header, tensors)
        link: Any = self.link
        pending: PendingStep = link.begin(self.id, self.number + after, header, tensors, self.branch)
        return pending

    def send(
        self,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        pending: PendingStep | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepReply:
        """Make one step; ``pending``: it is in progress. ``meanwhile``: see `EdgeLink.step`. A lost session is rebuilt
        from the steps kept, or SessionLost is raised.
        """
        try:
            if pending is not None:
                try:
                    return pending.result(meanwhile)
                except IsthmusError as error:
                    if "keep" not in header or isinstance(error, SessionLost):
                        raise
                    # it was sent ahead, and is now repeated as a usual step: in any case it is taken back
                    drop(self, always=True)
                    header["back"], self.takes_back = self.number, False
                    del header["keep"]
            self._hold_copies()
            return self._send(header, tensors, meanwhile)
        except (SessionLost, StepOutOfOrder) as lost:
            # out of order: the step was made, and its answer is lost for good
            self._again(lost)
            for name in _ONCE:
                header.pop(name, None)
            return self._send(header, tensors, meanwhile)

    def _hold_copies(self) -> None:
        for copy in [one() for one in self._copies]:
            if copy is not None:
                copy._hold()
        self._copies = []

    def _decide(self) -> None:
        """Confirm all steps, so that none can be taken back and the session can be copied."""
        drop(self)
        if self.takes_back or self.keeps:
            with suppress(IsthmusError):  # then the copy is rebuilt from its steps
                self._send({"still": 1, "back": self.number}, [])
                self.number, self.takes_back, self.keeps = self.number + 1, False, False

    def _send(
        self, header: dict[str, Any], tensors: list[torch.Tensor], meanwhile: Callable[[], None] | None = None
    ) -> StepReply:
        self._asked = True
        if self.branch:
            return self.begin(header, tensors, 0).result(meanwhile)
        _add_layouts(header, tensors)
        fork = None if self._fork is None or self.number else (self._fork[0].id, self._fork[1])
        if meanwhile is None:
            return self.link.step(self.id, self.number, header, tensors, fork)
        link: Any = self.link  # an `EdgeLink`
        reply: StepReply = link.step(self.id, self.number, header, tensors, fork, meanwhile)
        return reply

    def done(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Record that the step just sent was made."""
        self.number += 1
        self._fork = None
        self.keeps = "keep" in header
        self.history.add(header, tensors)

    def _hold(self) -> None:
        """Open the session while the one that it continues from still exists."""
        if self.number == 0 and self._fork is not None:
            try:
                self._send({"still": 1}, [])
            except (SessionLost, StepOutOfOrder) as lost:
                self._again(lost)
                return
            self.number, self._fork = 1, None

    def _again(self, lost: IsthmusError) -> None:
        """Repeat all steps in a new session. Their results are known. After an error the session is still lost."""
        for one in self.foreseen:
            one.pending.cancel(lost)
        self.foreseen.clear()
        steps = self.history.steps
        if steps is None:
            if self.remade is None:
                raise SessionLost(
                    f"{lost}; it cannot be made again: its steps took too much memory to be kept"
                ) from lost
            self.remade(self)
            return
        made = next(_ids)
        try:
            for number, (header, tensors) in enumerate(steps):
                reply = self.link.step(made, number, header, tensors, None)
                if "need" in reply.header:
                    raise CutRefused(f"a lost session cannot be made again: {reply.header.get('why')}") from lost
        except BaseException:
            self.link.close(made)
            raise
        self.id, self.number, self._fork = made, len(steps), None
        self.branch, self.takes_back, self.keeps = 0, False, False

    def close(self) -> None:
        """Release the session on the other side."""
        drop(self)
        if self._asked:
            self.link.close(self.id)


def _add_layouts(header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    """Add the strides of tensors that are packed for the message but not here: kernels round depending on strides."""
    header.pop("l", None)
    if found := [[number, list(one.stride())] for number, one in enumerate(tensors) if has_gaps(one)]:
        header["l"] = found


def drop(session: EdgeSession, *, always: bool = False) -> None:
    """Drop the foreseen steps; the server takes them back with the next step.

    ``always``: a step that is no longer among the foreseen is taken back, too.
    """
    if not (session.foreseen or always):
        return
    for one in session.foreseen:
        session.bytes_in_vain += one.pending.bytes_up
        one.pending.cancel(Cancelled("the step was sent ahead, and another one came"))
    session.foreseen.clear()
    session.branch += 1
    session.takes_back = True
