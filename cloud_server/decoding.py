"""Decoding sessions: the state of a model behind a cut, kept on the server from one step to the next.

May import models, limits.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from cloud_server.limits import Limits
from cloud_server.models import Begun, Computed, Engine, EngineSession, Following
from protos.isthmus.v1 import split_pb2
from shared_hooks import Parcel
from shared_hooks.errors import BadFrame, Disagreement, ServerUnavailable, SessionLost, StepOutOfOrder, TooLarge
from shared_hooks.generation import StepLink
from shared_hooks.generation.together import Outcome
from shared_hooks.sharing import Holding, Owner, Shares, evictions

__all__ = [
    "REASONS",
    "SessionStep",
    "Sessions",
    "StepWork",
    "Taken",
]


# The decoding sessions of a server: opened, stepped, forked and dropped, each only by its own client. A session
# counts its steps: each must be the next, so none is computed twice, and only one is computed at a time. A refused
# step leaves the session as it was. A session that is evicted (memory, idleness, its worker's end) is remembered by
# name: the client's next step gets the reason, and the client rebuilds the session from its steps.

# How many decoding sessions there are, what they hold, and which are evicted. The caller locks.

Key = tuple[str, str, int]
"""(account, client id, session id), unique on a server."""
Route = tuple[tuple[str, str], ...]
"""The parts after this server's: the server and cut of each."""
MOST_EARLY = 16
"""How many steps ahead of a session's next one a step may arrive and wait."""


class Early(NamedTuple):
    """A step that arrived before its predecessors were done. ``go`` puts it in line."""

    step: SessionStep
    go: Callable[[], object]


@dataclass(eq=False, slots=True)
class StoredSession:
    """One decoding session. ``busy``: a step or a copy of it is in progress. ``handle``: None until it is opened."""

    key: Key
    engine: Engine
    cut: str
    route: Route = ()
    nbytes: int = 0
    steps: int = 0
    busy: bool = True
    dropped: bool = False
    handle: EngineSession | None = None
    branch: int = 0
    queued: list[SessionStep] = field(default_factory=list)
    """Steps that wait for a worker."""
    early: dict[int, Early] = field(default_factory=dict)
    """Steps that wait for earlier ones, by number."""
    is_new: bool = True
    """Its client has received no answer from it yet."""
    used: float = field(default_factory=time.monotonic)

    @property
    def owner(self) -> Owner:
        return Owner(*self.key[:2])

    def is_early(self, step: SessionStep) -> bool:
        """Return whether steps before this one are in progress and must finish first. The caller holds the lock."""
        if step.branch > self.branch:
            return self.busy or bool(self.queued)
        is_ahead = step.branch == self.branch and self.steps < step.number <= self.steps + MOST_EARLY
        before = any(one.step.branch == step.branch and one.step.number < step.number for one in self.early.values())
        return is_ahead and (self.busy or bool(self.queued) or before)

    def leave_line(self, step: SessionStep) -> bool:
        """Remove the step from the line; returns whether it was there. The caller holds the lock."""
        for number, one in enumerate(self.queued):
            if one is step:
                del self.queued[number]
                return True
        return False

    @property
    def idle_seconds(self) -> float:
        """Seconds since its last step; 0 during one."""
        return 0.0 if self.busy else time.monotonic() - self.used

    def __str__(self) -> str:
        return f"decoding session {self.key[2]}"


class SessionQuota:
    """Counts sessions and their bytes by account and client, and picks the sessions to evict."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.number = Shares(limits.max_sessions)
        self.memory = Shares(limits.max_sessions_bytes)

    def add(self, session: StoredSession) -> None:
        self.number.add(session.owner, 1)
        self.memory.add(session.owner, session.nbytes)

    def remove(self, session: StoredSession) -> None:
        self.number.remove(session.owner, 1)
        self.memory.remove(session.owner, session.nbytes)

    def resize(self, session: StoredSession, nbytes: int) -> None:
        """Records that the session holds ``nbytes`` now."""
        self.memory.add(session.owner, nbytes - session.nbytes)
        session.nbytes = nbytes

    def room(self, owner: Owner, number: int, nbytes: int, others: Iterable[StoredSession]) -> dict[StoredSession, str]:
        """Picks sessions of ``others`` to evict, each with the bound that was met, to make room for ``number`` sessions
        and ``nbytes`` of ``owner``.

        Raises ServerUnavailable, naming the bound, where none may be evicted.
        """
        gone: dict[StoredSession, str] = {}
        for bound, shares, amount, of_memory in self._bounds(owner, number, nbytes):
            if shares.has_room(amount):
                continue
            holdings = [self._holding(one, one.nbytes if of_memory else 1, owner) for one in others]
            give = evictions(shares, owner, amount, holdings)
            if give is None:
                raise ServerUnavailable(
                    f"no room for decoding sessions: {shares.total} {'bytes' if of_memory else 'of them'} are held, "
                    f"{shares.account(owner.account)} by this account; {bound} is {shares.limit}"
                )
            gone |= dict.fromkeys(give, f"{bound} is {shares.limit}")
        return gone

    def _bounds(self, owner: Owner, number: int, nbytes: int) -> Iterator[tuple[str, Shares, int, bool]]:
        """Yields (name of a bound, current shares, amount requested, whether that is bytes)."""
        limits, account = self._limits, owner.account
        if number:
            own = self.number.of(account, limits.max_sessions_per_account)
            yield "max_sessions_per_account", own, number, False
            yield "max_sessions", self.number, number, False
        # `of` copies, so it is called only where the bound is met
        if self.memory.account(account) + nbytes > limits.max_sessions_bytes_per_account:
            own = self.memory.of(account, limits.max_sessions_bytes_per_account)
            yield "max_sessions_bytes_per_account", own, nbytes, True
        yield "max_sessions_bytes", self.memory, nbytes, True

    def _holding(self, session: StoredSession, amount: int, newcomer: Owner) -> Holding[StoredSession]:
        """Return what a session holds, for eviction: the least recently used goes first.

        Sessions of the client that needs room may go whenever no step of theirs is in progress; those of the account's
        other clients, which would only be built again, once they have been idle for a while.
        """
        is_idle = not session.busy and (session.owner == newcomer or session.idle_seconds > self._limits.idle_seconds)
        return Holding(session, session.owner, amount, None if session.busy else (session.used,), is_idle)


# What a request wants from a decoding session.

MAX_NAME = 1024
"""The maximum length of a layer's name, in characters."""


@dataclass(frozen=True)
class SessionStep:
    """A step of a session.

    ``fork_of``: 0, or the session that this one starts as a copy of, once that has done ``fork_step`` steps.
    ``together``: how many steps its client sends at once, including this one, to be batched; 0: compute it alone.
    ``branch``: how often steps of the session have been taken back.
    """

    session: int
    number: int
    cut: str
    fork_of: int
    fork_step: int
    close: bool
    together: int = 0
    route: Route = ()
    branch: int = 0

    @classmethod
    def of(cls, frame: split_pb2.RequestHeader) -> SessionStep | None:
        """Return the step that a request header describes; None for an ordinary request. Raises BadFrame if it is
        contradictory.
        """
        decoding = frame.decoding
        if not frame.HasField("decoding"):
            if frame.session_id or frame.step:
                raise BadFrame("session_id and step are of decoding sessions, and must be 0 in other requests")
            return None
        if not frame.session_id:
            raise BadFrame("a step of decoding session 0; sessions are numbered from 1")
        if frame.cut_digest or frame.HasField("file"):
            raise BadFrame("a step of a decoding session names its cut, and has no description of one, nor a file")
        if len(decoding.cut) > MAX_NAME:
            raise BadFrame(f"a layer's name of {len(decoding.cut)} characters; at most {MAX_NAME} are taken")
        if decoding.fork_of == frame.session_id:
            raise BadFrame(f"decoding session {frame.session_id} cannot begin as a copy of itself")
        if decoding.close and (decoding.fork_of or frame.header or frame.payload_bytes):
            raise BadFrame("a decoding session is closed by a request without a header, a payload or a fork")
        if not (frame.header or decoding.close):
            raise BadFrame("a step of a decoding session has no header")
        if decoding.fork_of and frame.step:
            raise BadFrame(f"step {frame.step} of a decoding session; only step 0 opens it as a copy")
        fork = decoding.fork_of, decoding.fork_step
        route = tuple((hop.server, hop.cut) for hop in frame.route)
        reported = decoding.cut, *fork, decoding.close, decoding.together, route, decoding.branch
        return cls(frame.session_id, frame.step, *reported)


@dataclass(frozen=True)
class Taken:
    """A session whose step is in progress, and the step."""

    session: StoredSession
    begun: Begun


@dataclass(frozen=True)
class StepWork:
    """Computes a step: from header and payload to the answer. ``begin`` and ``end`` do the same in two halves, between
    which it is computed with others (`Engine.step_batching`).
    """

    step: SessionStep
    compute: Callable[[bytes, memoryview], Computed]
    begin: Callable[[bytes, memoryview], Taken]
    end: Callable[[Taken, Outcome[None]], Computed]


log = logging.getLogger("cloud_server")

REASONS = ("room", "idle", "lost")
"""Why sessions are dropped: a bound was reached; no step for too long; its worker or its state is gone."""
REMEMBERED = 4096
"""How many ended sessions are remembered, with the reason."""


class Sessions:
    """The decoding sessions of all clients. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._sessions: dict[Key, StoredSession] = {}
        self._quota = SessionQuota(limits)
        self._ends: OrderedDict[Key, str] = OrderedDict()
        self.steps = 0
        """The number of computed steps."""
        self.dropped: Counter[str] = Counter()
        """Dropped sessions by reason (`REASONS`)."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def nbytes(self) -> int:
        """The bytes that all sessions hold."""
        return self._quota.memory.total

    def task(self, engine: Engine, owner: Owner, step: SessionStep, link: StepLink | None = None) -> StepWork:
        """Return what a worker does with the step's header and payload. ``link``: to the next server of a chain, if
        there is one.
        """
        run, begin = partial(self.run, engine, owner, step, link=link), partial(self.begin, engine, owner, step)
        return StepWork(step, run, begin, self.end)

    def run(
        self,
        engine: Engine,
        owner: Owner,
        step: SessionStep,
        header: bytes,
        payload: memoryview,
        link: StepLink | None = None,
    ) -> Computed:
        """Compute the step, or close its session. In the middle of a chain the result has `Computed.rest`, still to be
        done.

        Raises SessionLost, StepOutOfOrder, Disagreement (another model or cut), TooLarge, ServerUnavailable without
        room, and what the engine raises.
        """
        key = (*owner, step.session)
        if step.close:
            self._close(key)
            return _nothing()
        session = self._session(engine, key, step, link)
        with self._stepping(session):
            assert session.handle is not None
            computed = session.handle.step(header, payload)
        if computed.rest is not None:
            return replace(computed, rest=partial(self._rest, session, computed.rest))
        self._stepped(session, computed)
        return computed

    def _rest(self, session: StoredSession, rest: Callable[[], Computed]) -> Computed:
        with self._stepping(session):
            computed = rest()
        self._stepped(session, computed)
        return computed

    def begin(self, engine: Engine, owner: Owner, step: SessionStep, header: bytes, payload: memoryview) -> Taken:
        """Run the first half of `run`, up to where the step is computed with others. `end` must follow in
        any case.
        """
        session = self._session(engine, (*owner, step.session), step)
        with self._stepping(session):
            assert session.handle is not None and engine.step_batching is not None
            return Taken(session, engine.step_batching.begin(session.handle, header, payload))

    def end(self, taken: Taken, outcome: Outcome[None]) -> Computed:
        """Run the second half of `run`."""
        with self._stepping(taken.session):
            computed = taken.begun.end(outcome)
        self._stepped(taken.session, computed)
        return computed

    def line_up(self, owner: Owner, step: SessionStep, go: Callable[[], object]) -> tuple[bool, Callable[[], None]]:
        """Register a step before it waits for a worker.

        Returns whether it must wait for earlier steps that are in progress, and a function to call if it is given up.
        ``go`` is called once they are done; if they fail, the step is refused with the reason.
        """
        with self._lock:
            session = self._sessions.get((*owner, step.session))
            if session is None or step.close:
                return False, _nothing_waits
            number = next(_numbers)
            if waits := session.is_early(step):
                session.early[number] = Early(step, go)
            else:
                session.queued.append(step)
        return waits, partial(self._given_up, session, step, number)

    def _given_up(self, session: StoredSession, step: SessionStep, number: int) -> None:
        with self._lock:
            session.early.pop(number, None)
            due: list[Early] = []
            if session.leave_line(step) and not (session.busy or session.queued):
                due = self._due(session, False)
        for one in due:
            one.go()

    @contextmanager
    def _stepping(self, session: StoredSession) -> Iterator[None]:
        """Undo a step that fails in the block, or end the session if that is impossible."""
        try:
            yield
        except SessionLost as error:
            self._drop(session, str(error), "lost")
            raise SessionLost(f"{session} is lost: {error}") from error
        except BaseException:
            if session.is_new:
                self._drop(session, "its first step failed")
            else:
                self._give_back(session)
            raise

    def _session(self, engine: Engine, key: Key, step: SessionStep, link: StepLink | None = None) -> StoredSession:
        """Return the session of a step, marked busy."""
        with self._lock:
            opens = step.number == 0 and key not in self._sessions
        return self._open(engine, key, step, link) if opens else self._take(engine, key, step)

    def _take(self, engine: Engine, key: Key, step: SessionStep) -> StoredSession:
        """Return the existing session, marked busy for its next step."""
        with self._lock:
            session = self._known(engine, key, step)
            session.leave_line(step)
            if step.branch < session.branch:
                raise StepOutOfOrder(f"step {step.number} of {session} was taken back")
            if step.branch > session.branch and step.number <= session.steps:
                # the engine takes its part back, identified by the header
                session.branch, session.steps = step.branch, step.number
            if step.number != session.steps:
                raise StepOutOfOrder(f"step {step.number} of {session} came, and its next is {session.steps}")
            if session.nbytes > self._limits.max_session_bytes:
                most = f"a session takes no step beyond {self._limits.max_session_bytes} (max_session_bytes)"
                raise TooLarge(f"{session} holds {session.nbytes} bytes; {most}")
            session.busy = True
            return session

    def _known(self, engine: Engine, key: Key, step: SessionStep) -> StoredSession:
        """Return the session if it exists, is at this cut and is not busy. The caller holds the lock."""
        session = self._sessions.get(key)
        if session is None:
            why = self._ends.get(key, "it was never opened here, or this server was started since")
            raise SessionLost(f"there is no decoding session {key[2]} of this client: {why}")
        if (session.engine, session.cut, session.route) != (engine, step.cut, step.route):
            raise Disagreement(
                f'{session} is of model "{session.engine.identity.model_id}" cut after "{session.cut}"'
                f'{_onward(session.route)}; the request is of "{engine.identity.model_id}" cut after '
                f'"{step.cut[:256]}"{_onward(step.route)}'
            )
        if session.busy:
            raise StepOutOfOrder(f"{session} is at step {session.steps}, which is not over")
        return session

    def _open(self, engine: Engine, key: Key, step: SessionStep, link: StepLink | None) -> StoredSession:
        """Return a new session, or a copy of one, marked busy."""
        owner = Owner(*key[:2])
        with self._lock:
            if key in self._sessions:
                raise StepOutOfOrder(f"{self._sessions[key]} cannot be opened: it is there")
            parent = self._known(engine, (*owner, step.fork_of), step) if step.fork_of else None
            if parent is not None and parent.steps != step.fork_step:
                raise StepOutOfOrder(f"a copy of {parent} after {step.fork_step} steps: it has done {parent.steps}")
            if parent is not None:
                parent.busy = True  # nor is it evicted
            try:
                gone = self._room(owner, 1, parent.nbytes if parent else 0)
            except BaseException:
                if parent is not None:
                    parent.busy = False
                raise
            session = StoredSession(key, engine, step.cut, step.route, parent.nbytes if parent else 0)
            self._sessions[key] = session
            self._quota.add(session)
            self._ends.pop(key, None)
            closing = self._remove(gone)
        self._close_all(closing)
        try:
            if parent is None:
                following = None if link is None else Following(step.route[0][1], link)
                session.handle = engine.open_session(step.cut, following)
            else:
                assert parent.handle is not None
                session.handle = parent.handle.fork()
        except BaseException as error:
            self._drop(session, f"it could not be opened: {error}")
            raise
        finally:
            if parent is not None:
                self._give_back(parent, failed=False)
        return session

    def _stepped(self, session: StoredSession, computed: Computed) -> None:
        """Record a step and what the session holds now; evicts others, or this session, if a limit is exceeded."""
        with self._lock:
            session.steps += computed.is_done
            session.is_new = False
            self.steps += 1
            closing: list[StoredSession] = []
            if not session.dropped:
                self._quota.resize(session, computed.session_bytes)
                try:
                    closing = self._remove(self._room(session.owner, 0, 0))
                except ServerUnavailable as error:
                    self._remove([Drop(session, f"its last step took too much: {error}", "room")])
            due = self._free(session, bool(computed.is_done))
        self._close_all(closing)
        self._freed(session, due)

    def _give_back(self, session: StoredSession, failed: bool = True) -> None:
        """Mark the session as not busy. ``failed``: the step was not made, and those that wait for it are refused."""
        with self._lock:
            due = self._free(session, not failed)
        self._freed(session, due)

    def _free(self, session: StoredSession, made: bool) -> list[Early]:
        """Mark the session as not busy, and return the steps whose turn it is. The caller holds the lock."""
        session.busy = False
        session.used = time.monotonic()
        return self._due(session, made)

    def _due(self, session: StoredSession, made: bool) -> list[Early]:
        """Return the steps that stop waiting: the one that can be made now, or all that are refused. The caller holds
        the lock.
        """
        early = session.early
        due = [number for number, one in early.items() if not made or session.dropped or not session.is_early(one.step)]
        newest = max(due, key=lambda number: (early[number].step.branch, -early[number].step.number), default=None)
        if newest is not None and not session.dropped and early[newest].step.branch >= session.branch + (not made):
            due = [newest]  # the others follow when it is done
            session.queued.append(early[newest].step)
        return [early.pop(number) for number in due]

    def _freed(self, session: StoredSession, due: list[Early]) -> None:
        """Close a session that was dropped meanwhile, and start the ``due`` steps."""
        if session.dropped:
            self._close_all([session])
        for one in due:
            one.go()

    def _room(self, owner: Owner, number: int, nbytes: int) -> list[Drop]:
        """Pick what to evict for ``owner``. The caller holds the lock. Raises ServerUnavailable."""
        gone = self._quota.room(owner, number, nbytes, self._sessions.values())
        return [
            Drop(one, f"it was not used for longest, and there was no more room ({why})", "room")
            for one, why in gone.items()
        ]

    def _remove(self, gone: Iterable[Drop]) -> list[StoredSession]:
        """Remove sessions from the table; returns those to close now (busy ones close later). The caller holds the
        lock.
        """
        closing = []
        for session, why, word in gone:
            if session.dropped:
                continue
            session.dropped = True
            del self._sessions[session.key]
            self._quota.remove(session)
            self._ends[session.key] = why
            if word:
                self.dropped[word] += 1
                log.info("%s of %s is dropped: %s", session, session.key[1], why)
            if not session.busy:
                closing.append(session)
        while len(self._ends) > REMEMBERED:
            self._ends.popitem(last=False)
        return closing

    def _drop(self, session: StoredSession, why: str, word: str = "") -> None:
        """End a session, even during a step."""
        with self._lock:
            self._remove([Drop(session, why, word)])
        self._give_back(session)

    def _close(self, key: Key) -> None:
        """Close a session at its client's request; no effect if there is none."""
        with self._lock:
            session = self._sessions.get(key)
            closing = self._remove([Drop(session, "it was closed", "")]) if session else []
        self._close_all(closing)

    def _close_all(self, sessions: Iterable[StoredSession]) -> None:
        for session in sessions:
            if session.handle is not None:
                session.handle.close()

    def sweep(self) -> None:
        """Drop sessions that were idle for too long, and those whose state is gone."""
        most = self._limits.session_idle_seconds
        with self._lock:
            gone = [
                Drop(one, f"it had no step for {most:g} s (session_idle_seconds)", "idle")
                for one in self._sessions.values()
                if one.idle_seconds > most
            ]
            lost = [one for one in self._sessions.values() if not one.busy and one.handle and one.handle.lost]
            closing = self._remove([*gone, *(Drop(one, one.handle.lost, "lost") for one in lost if one.handle)])
        self._close_all(closing)

    def close(self) -> None:
        """Close all sessions."""
        with self._lock:
            closing = self._remove([Drop(one, "the server has ended", "") for one in list(self._sessions.values())])
        self._close_all(closing)


class Drop(NamedTuple):
    """A session to drop: the reason, and one of `REASONS` (empty if its client closed it, which is not counted)."""

    session: StoredSession
    why: str
    word: str


_numbers = itertools.count()


def _onward(route: Route) -> str:
    """Return the rest of the route, for messages."""
    return "".join(f', and at "{server[:256]}" after "{cut[:256]}"' for server, cut in route)


def _nothing_waits() -> None:
    """Does nothing: the function to call for a step that is in no line."""


def _nothing() -> Computed:
    """Return the answer to a request that needs no computing."""
    return Computed.of(Parcel.of_tensors({}, []).header, (), 0)
