"""A model whose ``forward`` is split: every call runs its head here and its tail on the other side.

``model.generate`` of transformers runs unchanged: it calls the forward step by step, and keeps a cache of keys and
values between the calls. The part of the cache that the head writes stays here; the rest is in a session on the other
side.
"""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as _every_module
from torch.utils._pytree import tree_map_only

from shared_hooks.errors import MALFORMED, BadFrame, Cancelled, CutRefused, InputMismatch, IsthmusError, SessionLost
from shared_hooks.forward import HookExitException
from shared_hooks.generation import hidden
from shared_hooks.generation.ahead import (
    ASKS,
    MOST_AHEAD,
    AnswerGrowth,
    CallForesight,
    Foreseen,
    NextCall,
    foresight,
    unchanging,
)
from shared_hooks.generation.asking import Asking
from shared_hooks.generation.cut import GenerationCut, around, device_of, finder_of
from shared_hooks.generation.edge_session import (
    SENT_UP,
    EdgeLink,
    EdgeSession,
    History,
    PendingStep,
    StepReply,
    drop,
)
from shared_hooks.generation.head import GenerationHead
from shared_hooks.generation.hidden import InsideCalls, Settled, is_state, is_state_class
from shared_hooks.generation.inputs import LITERALS
from shared_hooks.generation.mirror import Forms, Handle, Mirror, Snapshot, differences, handle_of
from shared_hooks.generation.remote_tensor import Origin, RemoteRead, RemoteTensor
from shared_hooks.generation.results import SHORT, Answer, digest, state_now, unpacked_result, widened, written
from shared_hooks.generation.session import CALLS, LEAVES
from shared_hooks.modules import attach, fast_path_off, running
from shared_hooks.state import Dice, PoisonRead, PythonState, poisoned
from shared_hooks.tensors import identical

# The timings of one step.


@dataclass(frozen=True)
class StepRecord:
    """What a step took. Times in nanoseconds on the edge's clock: of the head, from its end to the answer, and to
    process the answer. Bytes of headers and payloads, including those of steps that were sent ahead in vain.

    ``server``: nanoseconds on the server's clock, by name. ``batch_size``: the most steps that a side computed
    together, including this one; with 1 the result is exact. ``codec``: that of the hidden states; empty if they were
    sent as they are.
    """

    head_ns: int
    wait_ns: int
    answer_ns: int
    bytes_up: int
    bytes_down: int
    server: dict[str, int]
    batch_size: int = 1
    codec: str = ""

    @property
    def total_ns(self) -> int:
        """Nanoseconds of the whole step on the edge."""
        return self.head_ns + self.wait_ns + self.answer_ns


HISTORY_BYTES = 256 << 20
MOST_TRIES = 64
RECORDS_KEPT = 100_000
MOST_MISJUDGED = 3
"""After a state was foreseen wrongly this often, nothing of it is foreseen any more."""


class HeadRunner(Protocol):
    """Runs heads, possibly together with those of other generations."""

    def run(self, head: Callable[[], None]) -> int:
        """Run a head; returns how many were computed together. Raises its error."""
        ...

    def answered(self) -> None:
        """The step has its answer: the next head will follow soon."""
        ...


class SplitForward:
    """Splits the forward of ``model`` while the ``with`` block runs.

    ``cut``: the path of a module, after whose call the head ends. ``link``: the connection to the tail.

    ``private``: names of inputs that never leave this side, instead of those recognised by name. ``history_bytes``: how
    much of its steps a session keeps to be rebuilt if the server has lost it. ``modules``: those of the `WrappedModel`
    whose observers see the steps.

    ``answer``: what of the logits comes back. None: all; ``("top", k)``: the k likeliest; ``("token",)``: the likeliest
    token alone; the others are minus infinity. A ``generate()`` that needs more raises CutRefused. ``("least",)``: the
    least that each ``generate()`` needs. ``("sample",)``: the server also samples, with this side's generator and
    processors; the tokens are the same, but the server knows them.

    ``codec``: "int8", "int6", "int5" or "int4" sends hidden states with that many bits per number (`hidden`), which is
    lossy. None sends them as they are. ``heads``: runs the heads of steps after the prompt; None: each alone.

    Raises UnknownLayer, CutRefused and SpecError. A call that cannot be split raises an IsthmusError.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: str,
        link: EdgeLink,
        *,
        private: frozenset[str] | None = None,
        answer: Answer = None,
        history_bytes: int = HISTORY_BYTES,
        modules: object = None,
        codec: str | None = None,
        heads: HeadRunner | None = None,
    ) -> None:
        self.model = model
        self._heads = heads
        self._codec = hidden.check(codec)
        self.cut = GenerationCut.of(model, cut)
        self._link = link
        self._private = private
        self._asking = Asking(answer)
        self._history_bytes = history_bytes
        self._modules = modules
        self._here = device_of(model)
        self._find = finder_of(model)
        self._left_there: Any = None
        """What a step last reported to leave on the other side's model."""
        self._behind: dict[str, tuple[Any, Any]] = {}
        """What steps have left there and this side's model lacks (`hidden.left_behind`): code before the cut must not
        read it.
        """
        self._looked_for: set[str] = set()
        """Those names of it that no head has read so far."""
        self._settled = Settled(model)
        # the size of the vocabulary is the size of some weight
        self._most_words = max((size for one in model.parameters() for size in one.shape), default=0)
        self._paths = {module: path for path, module in model.named_modules() if path}
        self._needed = attach.Needed(self._paths, self.cut.above)
        self._lock = threading.RLock()
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._sessions: list[tuple[weakref.ref[Handle], EdgeSession]] = []
        self._plain: Handle | None = None
        self.records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self._shim: attach.Shim | None = None
        self._signature = inspect.Signature()

    def __enter__(self) -> SplitForward:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def attach(self) -> None:
        """Split the model's calls from now on. Raises CutRefused if they are split already."""
        if self._shim is not None:
            return
        shim = attach.attach(self.model)
        if shim.entry is not None:
            attach.detach(self.model)
            raise CutRefused("the model is split already")
        self._shim, shim.entry = shim, self._called
        self._signature = inspect.signature(shim.forward)
        self._needed.attach()
        self._asking.attach(self.model)

    def detach(self) -> None:
        """Restore the model and close its sessions."""
        if self._shim is None:
            return

        self._asking.detach()
        self._shim.entry = None
        self._shim = None
        attach.detach(self.model)
        self._needed.detach()
        for _, session in self._sessions:
            session.close()
        if self._plain is not None:
            self._plain.session.close()
        self._sessions, self._plain = [], None
        for handle in list(self._handles):
            handle.take_off()

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = _counted(_taken(self._signature, _named(self._signature, args, kwargs)))
        with self._lock, torch.inference_mode(False), torch.no_grad(), fast_path_off():
            return self._split(kwargs)

    # One call of the model

    def _split(self, kwargs: dict[str, Any]) -> Any:
        began = time.perf_counter_ns()
        states = [(name, value) for name, value in kwargs.items() if is_state_class(type(value))]
        if len(states) > 1:
            raise CutRefused(f"the model is given two states: {', '.join(name for name, _ in states)}")
        handle = self._handle(states[0][1]) if states else self._stateless()
        sight = foresight.get()
        if sight is not None and sight.model is not self.model:  # a draft model may be split, too
            sight = None
        output, _ = self._stepped(kwargs, handle, began, sight)
        return output

    def _stepped(
        self, kwargs: dict[str, Any], handle: Handle, began: int, sight: CallForesight | None = None
    ) -> tuple[Any, Handle]:
        """Return the output of one call, and the handle of its session (a forward may create its own state). ``sight``:
        what will be called next.
        """
        if handle.spoilt:
            raise SessionLost("a step failed after the model had written to its state in place: begin with a new state")
        if handle.mirror is not None:
            handle.note()
        snapshot = None if handle.mirror is None else handle.mirror.snapshot()
        opening = handle.opening()
        session: EdgeSession = handle.session
        marks = session.marks()
        shared = [(one, 0 if one.is_inference() else one._version) for one in session.inputs.shared(kwargs)]
        message: tuple[dict[str, Any], list[torch.Tensor]] = {}, []
        foreseen = self._come_true(handle, kwargs) if session.foreseen else None
        pending = None if foreseen is None else foreseen.pending
        unheard = pending is not None  # its answer is not awaited yet
        direct = self._heads is None or opening is not None or handle.mirror is None or self._is_unproven
        wanted = direct and (InsideCalls.wanted(session.number) or self._is_unproven)
        look = InsideCalls(self.model, self._settled.state) if wanted else None
        dice, kept = None if look is None else Dice(), None
        head = self._head(seek=handle.mirror is None, look=look) if foreseen is None else foreseen.head
        try:
            handle.busy = True
            run = partial(self._run_head, head, kwargs)
            if foreseen is not None:
                beside = 1
            elif self._heads is None or direct:
                beside = run() or 1
                if look is not None and dice is not None:
                    head = self._judged(kwargs, head, handle, snapshot, look, dice)
            else:
                beside = self._heads.run(run)
            made = None if head.born is None else head.born.state  # kept until the output has it
            if head.born is not None:
                handle = self._adopted(handle, head.born)
                session, marks = handle.session, handle.session.marks()
            for one, version in shared:
                if version != (0 if one.is_inference() else one._version):
                    raise CutRefused("the model writes in place to an input that both sides have: each would do it")
            headed = time.perf_counter_ns()
            if foreseen is None:
                message = self._message(head, kwargs, handle, opening, born=head.born is not None)
                if look is not None and (session.number == 0 or look.changed()):
                    kept = hidden.KeptState.of(look.state()).with_left(self._behind)
                    if kept.summaries:
                        message[0]["m"] = kept.header_data()
                if session.takes_back:
                    message[0]["back"], session.takes_back = session.number, False
            else:
                message = foreseen.message
            if sight is not None and self._may_look_ahead(handle, message[0], sight):
                if pending is None:
                    pending, unheard = session.begin(*message), True
                self._look_ahead(handle, sight, pending)
            unheard = False
            check = self._settled.check
            reply, up, down = self._sent(session, head, *message, pending=pending, kept=kept, meanwhile=check)
            up, session.bytes_in_vain = up + session.bytes_in_vain, 0
            if foreseen is not None and "keep" not in message[0]:
                handle.misjudged += 1
            answered = time.perf_counter_ns()
            if self._heads is not None:
                self._heads.answered()
            looks = handle.mirror is not None and (sight is not None or bool(session.foreseen))
            before = handle.mirror.snapshot() if looks and handle.mirror is not None else None
            with _reading():
                output = self._output(reply, head, kwargs, handle)
            if before is not None:
                self._learn(handle, before, 0 if sight is None else sight.tokens)
            del made
        except BaseException:
            drop(session, always=foreseen is not None)
            if pending is not None and unheard:
                pending.cancel(Cancelled("the call that the step is of was given up"))
            session.takes_back = session.takes_back or "back" in message[0]
            if handle.mirror is not None and snapshot is not None and not handle.mirror.back_to(snapshot):
                handle.spoilt = True
            session.back(marks)
            raise
        finally:
            handle.busy = False
        session.wanted = message[0].get("w", session.wanted)
        session.random = reply.header.get("rng")
        session.done(*message)
        self._needed.end_run()
        if opening is not None:
            session.calls.opening = opening
        session.calls.add(kwargs, handle.done)
        handle.done = []
        times = headed - began, answered - headed, time.perf_counter_ns() - answered
        codec = self._codec or "" if session.coded else ""
        met = max(beside, reply.batch_size)
        record = StepRecord(*times, up, down, reply.durations, met, codec)
        self.records.append(record)
        if foreseen is None:
            handle.last = record
        return output, handle

    # Future calls (`ahead`)

    def _come_true(self, handle: Handle, kwargs: dict[str, Any]) -> Foreseen | None:
        """Return the step that was sent ahead for this call; None if it was for another call, and is taken back."""
        session: EdgeSession = handle.session
        found: Foreseen = session.foreseen[0]
        mirror = handle.mirror
        same = mirror is not None and found.is_of(kwargs, handle.done) and self._asking.now() == session.wanted
        if not same or around(self._paths, self.model, _run(found.head)) != found.marks["around"]:
            drop(session)
            return None
        assert mirror is not None
        session.foreseen.popleft()
        mirror.back_to(found.after)
        session.back(found.marks)
        return found

    def _may_look_ahead(self, handle: Handle, header: dict[str, Any], sight: CallForesight) -> bool:
        """Return whether the calls after this one can be foreseen: the message has nothing new, only the model sees its
        modules called, and the state can be restored.
        """
        return (
            bool(sight.tokens)
            and handle.growth is not None
            and handle.mirror is not None
            and handle.session.random is None
            and ASKS.isdisjoint(header)
            and self._heads is None
            and not self._is_unproven
            and self._link.begins
            and not (attach.watchers or _every_module._global_forward_hooks or _every_module._global_forward_pre_hooks)
            and not any(one._forward_hooks or one._forward_pre_hooks for one in self._paths)
        )

    def _look_ahead(self, handle: Handle, sight: CallForesight, pending: PendingStep) -> None:
        """While a step is in progress (``pending``), run the heads of the next calls and send their steps."""
        session: EdgeSession = handle.session
        mirror, growth, last = handle.mirror, handle.growth, handle.last
        assert mirror is not None and growth is not None
        here, marks, done, dice = mirror.snapshot(), session.marks(), handle.done, Dice()
        saved = 0 if last is None else last.total_ns - sum(last.server.values())
        computed = 0 if last is None else last.server.get("compute", 0)
        tokens = sight.tokens
        try:
            if session.foreseen:
                tokens = session.foreseen[-1].tokens
                mirror.back_to(session.foreseen[-1].after)
                session.back(session.foreseen[-1].marks)
                session.inputs = session.inputs.copied()
            while len(session.foreseen) < MOST_AHEAD and not pending.is_over and growth.apply(mirror, tokens):
                expected, handle.done, handle.busy = mirror.forms(), [], False
                call = sight.next(len(session.foreseen), saved, computed)
                if call is None:
                    break
                if not self._sent_ahead(handle, call, expected) or dice.rolled:
                    handle.misjudged += 1
                    break
                tokens = call.tokens
        except (IsthmusError, RuntimeError, *MALFORMED):
            handle.misjudged += 1  # an error will be raised by the call itself
        finally:
            if dice.rolled:
                drop(session)
                dice.restore()
            handle.done, handle.busy = done, True
            session.back(marks)
            if not mirror.back_to(here):
                handle.spoilt = True
        if handle.spoilt:
            raise SessionLost("a call that was foreseen has written to the state in place: begin with a new state")

    def _sent_ahead(self, handle: Handle, call: NextCall, expected: Forms) -> bool:
        """Send the step of a foreseen call; returns False if it may depend on answers before it."""
        session: EdgeSession = handle.session
        kwargs = _counted(_taken(self._signature, _named(self._signature, (), call.kwargs)))
        given = unchanging(kwargs)
        handle.note()
        done = list(handle.done)
        head = self._head()
        handle.busy = True
        self._run_head(head, kwargs)
        header, tensors = self._message(head, kwargs, handle, None, born=False)
        number = session.number + 1 + len(session.foreseen)
        header["keep"] = [number, session.number + 1]
        assert handle.mirror is not None
        after = handle.mirror.snapshot()
        if not ASKS.isdisjoint(header):
            return False
        reported = {name: value for name, value in session.marks().items() if name in SENT_UP}
        pending = session.begin(header, tensors, number - session.number)
        foreseen = Foreseen(given, call.tokens, expected, done, head, (header, tensors), pending, reported, after)
        session.foreseen.append(foreseen)
        return True

    def _learn(self, handle: Handle, before: Snapshot, tokens: int) -> None:
        """Learn from an answer about later ones. What was foreseen from another state is taken back."""
        session: EdgeSession = handle.session
        assert handle.mirror is not None
        first = session.foreseen[0] if session.foreseen else None
        if first is not None and first.expected != handle.mirror.forms():
            drop(session)
            handle.misjudged += 1
        known = before.is_whole and handle.misjudged < MOST_MISJUDGED
        handle.growth = AnswerGrowth.seen(handle.mirror, before, tokens) if known else None

    def _head(self, *, seek: bool = False, look: InsideCalls | None = None) -> GenerationHead:
        return GenerationHead(
            self.cut, self._paths, self._here, self._needed, seek=seek, modules=self._modules, look=look
        )

    def _judged(
        self,
        kwargs: dict[str, Any],
        first: GenerationHead,
        handle: Handle,
        snapshot: Snapshot | None,
        look: InsideCalls,
        dice: Dice,
    ) -> GenerationHead:
        """Return the head whose values cross, starting from a ``first`` one.

        If that has changed the model, it runs once more, from the state that it left: a table that is built on first
        use exists now. If it changes the model again, or gives another result, or if the other side keeps something
        that this side does not, it runs with poison in place of all that. Raises CutRefused if it reads any of it.
        """
        head, names = first, set(self._behind)
        changed = look.changed() - self._settled.rewritten

        def again(closely: InsideCalls | None) -> GenerationHead:
            mirror = handle.mirror
            if mirror is not None and (snapshot is None or not mirror.back_to(snapshot)):  # it was written in place
                look.refuse()
                raise hidden.refusal(min(names | changed))
            dice.restore()
            made = self._head(seek=mirror is None, look=closely)
            self._run_head(made, kwargs)
            return made

        if changed or look.given or look.outside:
            second = InsideCalls(self.model)
            head = again(second)
            second.refuse()
            if (more := second.changed()) or not _same_calls(first, head):
                names |= changed | more
        if names:
            is_unread = False
            with suppress(PoisonRead, Exception), poisoned(PythonState(self.model, settings=False), names) as reached:
                head = again(None)
                is_unread = reached and _same_calls(first, head)
            if not is_unread:
                raise hidden.refusal(min(names))
            self._settled.rewritten |= names - self._behind.keys()
            self._looked_for |= self._behind.keys()
        return head

    @property
    def _is_unproven(self) -> bool:
        return not self._behind.keys() <= self._looked_for

    def _session(self) -> EdgeSession:
        made = EdgeSession(self._link, self._private, self._history_bytes)
        made.remade = self._remade
        return made

    def _stateless(self) -> Handle:
        """Return the handle of calls without a state: all of them are steps of one session, which keeps nothing."""
        if self._plain is None:
            self._plain = Handle(self._session())
            self._plain.session.history = History(0)
        self._plain.session.calls.entries.clear()
        return self._plain

    def _sweep(self) -> None:
        """Close the sessions of states that no longer exist. Called when the next session begins."""
        for handle, session in [one for one in self._sessions if one[0]() is None and not one[1].is_waited_for]:
            self._sessions.remove((handle, session))
            session.close()

    def _remade(self, lost: EdgeSession) -> None:
        """Compute all steps of a session again, in a new session that replaces it on the other side."""
        if lost.random is not None:
            raise SessionLost("the session cannot be made again: the server has drawn random numbers for it")
        handle, dice = Handle(self._session()), Dice()
        if lost.calls.opening is not None:
            mirror = Mirror.built(lost.calls.opening, self._here)
            if mirror.has_shadows:
                raise SessionLost("the session cannot be made again: its state was not empty when it began")
            handle.put_on(mirror.state, self._here)
        for call in list(lost.calls.entries):
            handle.repeat(call.done)
            state = None if handle.mirror is None else handle.mirror.state
            _, handle = self._stepped(call.kwargs(state), handle, time.perf_counter_ns())
        if dice.rolled:
            dice.restore()
            raise SessionLost("the session cannot be made again: the model draws random numbers before the cut")
        made: EdgeSession = handle.session
        lost.id, lost.number, lost.wanted = made.id, made.number, made.wanted
        lost.branch, lost.takes_back, lost.keeps = 0, False, False
        made.number = 0  # it must not close the session

    def _handle(self, state: Any) -> Handle:
        """Return the handle of a state: its own, that of a copy, or a new one."""
        handle = handle_of(state)
        if handle is not None and handle.session.link is not self._link:
            raise CutRefused("the state belongs to another model that is split")
        if handle is not None and handle.mirror is not None:
            if handle.mirror.state is not state:
                raise CutRefused("the state is a shallow copy of one that is in use: use copy.deepcopy")
            return handle
        self._sweep()
        if handle is None:
            handle = Handle(self._session())
        else:
            handle.session = handle.fork
        handle.put_on(state, self._here)
        assert handle.mirror is not None
        if handle.fork is None and handle.mirror.has_shadows:
            handle.take_off()
            raise CutRefused("a part of this state is in a session that it does not belong to")
        self._kept(handle)
        return handle

    def _adopted(self, handle: Handle, born: Mirror) -> Handle:
        """Attach the session to a state that the forward has created."""
        if handle is self._plain:
            handle = Handle(self._session())
        handle.put_on(born.state, self._here)
        handle.mirror = born
        born.loosen()
        self._kept(handle)
        return handle

    def _kept(self, handle: Handle) -> None:
        self._handles.add(handle)
        self._sessions.append((weakref.ref(handle), handle.session))

    def _run_head(self, head: GenerationHead, kwargs: dict[str, Any]) -> None:
        """Run the model up to the cut. Raises CutRefused if it ends without reaching it."""
        shim = self._shim
        assert shim is not None
        token = running.set(head)
        try:
            with head.watch:
                shim(**kwargs)
        except HookExitException as leaving:
            if leaving is not head.exit:
                raise
            head.exit.__traceback__ = None
            if head.failure is not None:
                raise head.failure from None
            return
        except RemoteRead as error:
            raise CutRefused(f"cut after {self.cut.name}: {error}") from error
        finally:
            running.reset(token)
        raise CutRefused(
            f"{self.cut.name} is not called in this step, and so all of it would run here: cut after a module that "
            "every step calls (where a text is encoded first, one of the decoder's)"
        )

    def _message(
        self, head: GenerationHead, kwargs: dict[str, Any], handle: Handle, opening: Any, *, born: bool
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        session: EdgeSession = handle.session
        header: dict[str, Any] = {}
        tensors: list[torch.Tensor] = []
        session.inputs.add_to(kwargs, header, tensors)
        if opening is not None:
            header["new"] = opening
        if handle.done:
            header["do"] = list(handle.done)
        if handle.mirror is not None:
            changes = handle.mirror.look()
            if handle.mirror.moved:
                name = ".".join(map(str, handle.mirror.moved[0]))
                raise CutRefused(f"code before the cut puts a tensor of the other side at {name} of the state")
            header["d"], session.up = differences(changes, session.up)
        if born:
            header["born"] = 1
        context = around(self._paths, self.model, _run(head))
        if context != session.around:
            header["c"] = session.around = context
        self._add_wanted(session, header)
        self._add_read(head, session, header)
        reported = {(one[0], one[1]): one for one in head.reports()}
        changed = [one for key, one in reported.items() if session.reports.get(key) != one]
        if changed:
            header["t"] = changed
            session.reports = reported
        self._add_crossing(head, session, header, tensors)
        return header, tensors

    def _add_wanted(self, session: EdgeSession, header: dict[str, Any]) -> None:
        """Add to the header which answer is wanted, and this side's generator, unless the other side knows them."""
        answer = self._asking.now()
        if answer != session.wanted:
            header["w"] = answer
        if answer is not None and answer[0] == "sample":
            if self._here.type != "cpu":
                raise CutRefused(f"the server samples as a CPU does, and this model is on {self._here.type}")
            state = state_now()
            if digest(state) != session.random:
                header["rng"] = written(state)

    def _add_read(self, head: GenerationHead, session: EdgeSession, header: dict[str, Any]) -> None:
        """Add to the header the values that Python read, unless the other side reads all of them itself."""
        entries = head.watch.entries
        if entries and [entry[:2] for entry in entries] != session.quiet:
            header["b"] = entries

    def _add_crossing(
        self, head: GenerationHead, session: EdgeSession, header: dict[str, Any], tensors: list[torch.Tensor]
    ) -> None:
        passed = [-1] * len(head.leaves) if session.all_leaves else head.passed
        crossing = [head.structure, passed, int(head.is_shared)]
        if crossing != session.crossing:
            header["x"] = session.crossing = crossing
        crossing_leaves = [leaf for leaf, number in zip(head.leaves, passed, strict=True) if number < 0]
        coded = [None if self._codec is None else hidden.encoded(leaf, self._codec) for leaf in crossing_leaves]
        numbers = [number for number, leaf in enumerate(coded) if leaf is not None]
        if numbers != session.coded:
            header["q"] = session.coded = numbers
        tensors += [raw if leaf is None else leaf for raw, leaf in zip(crossing_leaves, coded, strict=True)]
        if session.extras:
            header["e"] = list(session.extras)
            tensors += [_extra(head, one) for one in session.extras]

    def _sent(
        self,
        session: EdgeSession,
        head: GenerationHead,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        pending: PendingStep | None = None,
        kept: hidden.KeptState | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[StepReply, int, int]:
        """Send a step, again with what the other side lacks; returns the answer, and all bytes up and down.

        ``pending``: the step is in progress already. ``kept``: what the model keeps here. ``meanwhile``: see
        `EdgeLink.step`.
        """
        up = down = compared = 0
        for _ in range(MOST_TRIES):
            reply, pending = session.send(header, tensors, pending, meanwhile), None
            up, down = up + reply.bytes_up, down + reply.bytes_down
            need = reply.header.get("need")
            if need is None:
                return reply, up, down
            drop(session)
            crossing = len(tensors) - len(session.extras) - sum(number < 0 for number in session.crossing[1])
            if need == CALLS and "t" not in header:
                header["t"] = head.reports()
            elif need == LEAVES and not session.all_leaves:
                session.all_leaves = True
            elif isinstance(need, list) and need[:1] == [hidden.KEPT]:
                compared += 1
                if kept is None or compared > hidden.MOST_COMPARED:
                    break
                with _reading():
                    header["u"] = [*header.get("u", ()), *kept.compared(need[1])]
            elif isinstance(need, list) and need not in session.extras:
                session.extras.append(need)
            else:
                break
            del tensors[crossing:]
            with _reading():
                self._add_crossing(head, session, header, tensors)
        head_of_words = getattr(self.model, "get_output_embeddings", lambda: None)()
        if head_of_words is not None and self._paths.get(head_of_words) == self.cut.path:
            raise CutRefused(
                f"after {self.cut.name}, which gives the logits, nothing is left for a server: cut before it"
            )
        raise CutRefused(f"the tail after {self.cut.name} cannot be run: {reply.header.get('why')}")

    def _output(self, reply: StepReply, head: GenerationHead, kwargs: dict[str, Any], handle: Handle) -> Any:
        session: EdgeSession = handle.session
        session.structure = reply.header.get("r", session.structure)
        if "m" in reply.header and reply.header["m"] != self._left_there:
            self._left_there = reply.header["m"]
            self._behind |= hidden.left_behind(self._left_there, self.model)
            if len(self._behind) > hidden.MOST_KEPT:
                raise CutRefused(f"steps leave {len(self._behind)} values on the server's model")
            if self._is_unproven:
                drop(session)
        if "nb" in reply.header:
            session.quiet = [entry[:2] for entry in head.watch.entries]
        state = None
        if handle.mirror is not None:
            state = handle.mirror.state
            session.apply_changes(handle.mirror, reply.header)

        def leaf(reported: Any) -> torch.Tensor:
            kind = reported[0]
            if kind == "s":
                found: torch.Tensor = reply.tensors[reported[1]]
                return found.to(self._here)
            if kind in SHORT:
                return widened(reported, reply.tensors, self._most_words).to(self._here)
            if kind == "in":
                given: torch.Tensor = session.inputs.leaves[reported[1]]
                return given
            return _extra(head, reported[1:])

        return unpacked_result(session.structure, reply.header.get("o"), self._find, leaf, state)


@contextmanager
def _reading() -> Iterator[None]:
    """In the block, errors of reading the other side's message become BadFrame."""
    try:
        yield
    except MALFORMED as error:
        raise BadFrame(f"malformed answer to a step: {type(error).__name__}: {error!s:.120}") from error


def _same_calls(one: GenerationHead, other: GenerationHead) -> bool:
    """Return whether the calls of two heads gave the same values."""
    before, now = one.given_by_calls(), other.given_by_calls()
    return len(before) == len(now) and all(map(_same_leaf, before, now))


def _same_leaf(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (type(one) is type(other) and (isinstance(one, RemoteTensor) or identical(one, other)))


def _run(head: GenerationHead) -> set[str]:
    """Return the paths of the calls before the cut."""
    return {call.path for call in head.calls[:-1]}


def _named(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name. Raises InputMismatch if they have none."""
    if not args:
        return kwargs
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputMismatch(f"the model is called with other arguments than it takes: {error}") from error
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise InputMismatch("a model that takes any number of positional arguments cannot be split step by step")
        found.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return found


def _taken(signature: inspect.Signature, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without tokenizers that the model has no parameter for: ``generate()`` passes on its own."""
    names = signature.parameters
    return {name: value for name, value in kwargs.items() if name in names or not _is_tokenizer(value)}


def _is_tokenizer(value: Any) -> bool:
    return callable(getattr(value, "encode", None)) and callable(getattr(value, "convert_ids_to_tokens", None))


def _counted(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with copies of inference tensors, whose writes torch does not count."""
    found = {}
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            value = _ordinary(value) if value.is_inference() else value
        elif type(value) not in LITERALS and not is_state(value):
            value = tree_map_only(torch.Tensor, _ordinary, value)
        found[name] = value
    return found


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def _extra(head: GenerationHead, place: list[Any]) -> torch.Tensor:
    found = head.value(Origin("call", *place))
    if found is None:
        raise CutRefused(f"the tail needs what {place[0]} gives, which is called by no code around the cut")
    return found
