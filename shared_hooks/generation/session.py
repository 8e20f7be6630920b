"""The cloud's part of one generation: a state whose later half is here, and a step after the other.

    {"in", "f"}     the inputs (`inputs`)            {"new"}  the form of the state, in the first step
    {"do"}          what was done to the state since the step before (`mutators`)
    {"d"}           what the head changed on it      {"x"}    the cut's result: structure, which arguments it passes on
    {"e"}           more values from before the cut  {"b"}    values that Python read from data (`bank`)
    {"t"}           forms of what calls before the cut gave (`call_reports`)      {"w"}  what is wanted back, where new
    {"rng"}         the state of the edge's generator, where the tail's is another (`sampling`)
    {"q"}           which tensors of the cut's result are coded (`hidden`)
    {"l"}           strides of tensors that lie with gaps, or on themselves, on the edge
    {"c"}           what is around the model, where new (`cut.around`)
    {"m"}           what the model keeps that its code may change (`hidden.KeptState.header_data`)
    {"u"}           ... and how it compares with what this side's model keeps (`hidden.KeptState.compared`)
    {"born"}        the forward makes its state itself             {"still"}  nothing is done: a fork is only to be kept
    {"more"}        what servers between the head and this one changed on the state (`middle`)
    {"keep"}        the step may be taken back: its number, and the first step of which that is still so (`ahead`)
    {"back"}        first of all, steps from this number on are taken back

The tensors of a step are those of its inputs, those of the cut's result, and the extra ones. The answer:

    {"o", "r", "d"} results, their structure where it is new, what the tail changed on the state
    {"rng"}         after a word was drawn: digest of the generator's state
    {"more"}        what servers behind this one changed on the state
    {"m"}           what calls have left on the model (`Unchanged.summaries`)
    {"need", "why"} nothing was done: the same step again, with these
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import devices
from shared_hooks.errors import MALFORMED, BadFrame, CutRefused, SessionLost, TooLarge
from shared_hooks.forward.context import restored
from shared_hooks.generation import hidden
from shared_hooks.generation.asking import CallReports
from shared_hooks.generation.bank import TailDiverged
from shared_hooks.generation.cut import USUAL, GenerationCut, check_around, device_of, finder_of
from shared_hooks.generation.head import arguments
from shared_hooks.generation.hidden import InsideCalls, Unchanged, is_state, refusal
from shared_hooks.generation.inputs import ReceivedInputs, check_sizes, has_same_content, with_own_containers
from shared_hooks.generation.mirror import LastSent, Mirror, Snapshot, apply, differences, put_more
from shared_hooks.generation.remote_tensor import (
    STEP_BYTES,
    Extents,
    Origin,
    RemoteRead,
    RemoteTensor,
    SeenSteps,
    kept_here,
    magnitude,
    weight,
)
from shared_hooks.generation.results import TailSampler, Template, digest, packed_result, shortened
from shared_hooks.generation.tail import LearnedOnTheWay, NotReported, Tail
from shared_hooks.modules import attach, fast_path_off, running
from shared_hooks.purity import Turns
from shared_hooks.state import Dice, PoisonRead, PythonState, agree, entries, poisoned, spread
from shared_hooks.tensors import identical, tensors_in, unflatten

# Whether a step draws random numbers on the cloud's side: they would differ from those of the edge's generator.


class Draws(TorchDispatchMode):
    """Compares the generator before and after each kernel that may use it, so that draws of other threads do
    not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = devices.rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(before, devices.rng_state()):
            self.found = func._schema.name.removeprefix("aten::")
        return result


class ForwardLook:
    """Observes one forward. The first is cheap; if it reports that generators were used, a second finds out by what."""

    def __init__(self) -> None:
        self._dice = Dice()
        self._others: list[str] = []
        self.draws: Draws | None = None

    def again(self) -> bool:
        """Return whether a second forward, observed closely, is needed. Called after a forward."""
        if self.draws is not None:
            self._others = self._dice.others
            return False
        if not self._dice.rolled:
            return False
        self.draws, self._dice = Draws(), Dice()
        return True

    @property
    def found(self) -> str:
        """What draws: a kernel, or a library; empty for nothing."""
        if self.draws is None:
            return ""
        if self.draws.found:
            return f"{self.draws.found}()"
        return f"the generator of {', '.join(self._others)}" if self._others else ""


Header = dict[str, Any]
Message = tuple[Header, list[torch.Tensor]]
"""The answer to a step."""
LEAVES, CALLS = "leaves", "calls"


class DecodingTail:
    """The tail of a model for generation, cut after ``cut`` (a module's path). Serves any number of sessions.

    ``step_bytes``: the memory limit of one step. ``modules``: those of the `WrappedModel` whose observers see its
    steps. ``turns``: of the same model, if others run it, too. Raises UnknownLayer and CutRefused. `close` removes what
    was attached.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: str,
        *,
        step_bytes: int = STEP_BYTES,
        modules: object = None,
        turns: Turns | None = None,
    ) -> None:
        self.step_bytes = step_bytes
        self.modules = modules
        self.model = model
        self.cut = GenerationCut.of(model, cut)
        self.here = device_of(model)
        self.find = finder_of(model)
        self.template = Template()
        self.turns = turns or Turns(model)
        self.leaves = False
        """Whether any step has left anything on the model, which was restored."""
        self.seen = SeenSteps()
        self.paths = {module: path for path, module in model.named_modules()}
        self._needed: dict[str, attach.Needed] = {}
        self.needed_up_to(None)

    def needed_up_to(self, second: GenerationCut | None) -> attach.Needed:
        """Return the modules that steps ending at ``second`` must see; None: steps that run to the model's end."""
        path, above = ("", frozenset[str]()) if second is None else (second.path, second.above)
        with attach.lock:
            found = self._needed.get(path)
            if found is None:
                found = self._needed[path] = attach.Needed(self.paths, self.cut.above | above)
                found.attach()
            return found

    def open(self) -> DecodingSession:
        """Return a new session, whose first step has the form of its state."""
        return DecodingSession(self)

    def close(self) -> None:
        """Detach from the model. No session may be used afterwards."""
        for needed in self._needed.values():
            needed.detach()


@dataclass
class SessionKnown:
    """What a session has received and sent. A step works on a copy, which replaces it if the step succeeds."""

    inputs: ReceivedInputs
    reports: CallReports
    sampler: TailSampler
    up: LastSent = None
    down: LastSent = None
    crossing: Any = None
    coded: Any = ()
    around: Any = field(default_factory=lambda: USUAL)
    structure: Any = None
    wanted: Any = None
    unchanged: Unchanged = field(default_factory=Unchanged)
    ups: list[LastSent] = field(default_factory=list)
    """What each server before this one has reported, in a chain."""
    behind: frozenset[str] = frozenset()
    """Names of what servers behind this one left on their model: the next step here must not read it."""
    unread: frozenset[str] = frozenset()
    """Those of them that a step has not read."""
    left: Any = None
    """What steps last reported to leave on this side's model."""

    def copied(self) -> SessionKnown:
        return replace(
            self,
            inputs=self.inputs.copied(),
            reports=self.reports.copied(),
            sampler=self.sampler.copied(),
            ups=list(self.ups),
        )

    def nbytes(self, mirror: Mirror | None, *kept: Snapshot) -> int:
        """Return the bytes of everything kept for the session: tensors, each once, and reports. ``kept``: states."""
        tensors = [*self.inputs.tensors(), *(() if mirror is None else mirror.real())]
        tensors += tensors_in(list(self.unchanged.same.values()))
        for one in kept:
            tensors += one.tensors()
        real = [one.untyped_storage() for one in tensors if type(one) is not RemoteTensor]
        reported = (
            self.crossing,
            self.coded,
            self.around,
            self.structure,
            self.wanted,
            self.up,
            self.down,
            self.ups,
            self.left,
        )
        return int(
            sum({one._cdata: one.nbytes() for one in real}.values())
            + self.inputs.nbytes
            + self.reports.nbytes
            + weight(reported)
            + (0 if mirror is None else mirror.form_bytes)
        )


MOST_KEPT = 16
"""The maximum number of a session's steps that may be taken back."""


@dataclass(frozen=True)
class _Before:
    """A session as it was before its step ``number``."""

    number: int
    known: SessionKnown
    mirror: Mirror | None
    state: Snapshot | None


class DecodingSession:
    """The tail's part of one generation; see the module. After an error a session is as before the step."""

    takes_back = True
    """Whether steps may be taken back."""

    def __init__(self, tail: DecodingTail) -> None:
        self._tail = tail
        self._steps = 0
        self._kept: list[_Before] = []
        received = ReceivedInputs(tail.here, tail.find)
        self._known = SessionKnown(received, CallReports(tail.here), TailSampler())
        self._mirror: Mirror | None = None
        self._spoilt = ""

    @property
    def nbytes(self) -> int:
        """The bytes of what it keeps."""
        states = [one.state for one in self._kept if one.state is not None]
        held = self._known.nbytes(self._mirror, *states) + sum([one.form_bytes for one in states])
        return held + sum([one.known.nbytes(None) for one in self._kept])

    def fork(self) -> DecodingSession:
        """Return a copy, which continues independently. Raises SessionLost while steps may be taken back."""
        if self._kept:
            raise SessionLost("its last steps may be taken back: nothing is copied before that is decided")
        made = DecodingSession(self._tail)
        made._known, made._spoilt = self._known.copied(), self._spoilt
        made._mirror = None if self._mirror is None else self._mirror.copied()
        return made

    def step(self, header: Header, tensors: list[torch.Tensor]) -> tuple[Header, list[torch.Tensor]]:
        """Make one step. Raises BadFrame for malformed messages, CutRefused for what this cut does not support, and
        what the model raises.
        """
        begun = self.begin(header, tensors)
        return begun() if callable(begun) else begun

    def begin(self, header: Header, tensors: list[torch.Tensor]) -> Message | Callable[[], Message]:
        """Runs the model for one step, and gives the answer, or what makes it: where other servers have to be asked,
        for which the model is not needed. Call that once, in any thread, before anything else is done with the session.
        """
        if not isinstance(header, dict):
            raise BadFrame("a step is a JSON object")
        if self._spoilt:
            raise CutRefused(self._spoilt)
        if "back" in header:
            self._take_back(header["back"])
        first = self._first_kept(header)
        self._kept = [one for one in self._kept if one.number >= first]
        if header.get("still"):
            self._steps += 1
            return {}, []
        before = None if self._mirror is None else self._mirror.snapshot()
        was, known = self._mirror, self._known.copied()
        undone = partial(self._undone, was, before)
        kept = _Before(self._steps, self._known, was, before)
        try:
            with self._tail.turns.one(foreseen=False):
                answer = self._stepped(known, header, tensors)
        except BaseException as error:
            return undone(error)
        if "keep" in header:
            self._kept.append(kept)
        return self._completed(known, answer, undone)

    def _first_kept(self, header: Header) -> int:
        """Return the number of the first step that may still be taken back; a huge one if this step may not.

        Raises BadFrame, and CutRefused if none can be.
        """
        if "keep" not in header:
            return 1 << 63
        if not self.takes_back:
            raise CutRefused("steps are not taken back here: other servers have computed a part of them")
        try:
            number, first = map(operator.index, header["keep"])
        except MALFORMED as error:
            raise BadFrame(f"malformed number of a step: {error!s:.120}") from error
        if number != self._steps or not number < first + MOST_KEPT:
            raise BadFrame(f"step {number} cannot be kept with those from {first} on: the next is {self._steps}")
        return first

    def _take_back(self, number: Any) -> None:
        """Restore the session as it was before step ``number``. Raises BadFrame, and SessionLost if that is no longer
        known.
        """
        if type(number) is not int:
            raise BadFrame(f"malformed number of a step: {number!r:.40}")
        if number == self._steps:
            return
        before = next((one for one in self._kept if one.number == number), None)
        self._kept = [one for one in self._kept if one.number < number]
        if before is None or (before.mirror and before.state and not before.mirror.back_to(before.state)):
            raise SessionLost(f"the state before step {number} is not there any more")
        self._known, self._mirror, self._steps = before.known, before.mirror, number

    def _undone(self, mirror: Mirror | None, snapshot: Any, error: BaseException) -> Message:
        """Restore the session as it was before a step; returns the answer that says what is needed. Raises ``error`` if
        nothing is.
        """
        self._mirror = mirror
        if mirror is not None and snapshot is not None and not mirror.back_to(snapshot):
            self._spoilt = f"a step failed in the middle of writing to the state: {error!s:.200}"
        needed = _needed(error)
        if needed is None:
            raise error
        return {"need": needed, "why": f"{error!s:.300}"}, []

    def _done(self, known: SessionKnown, answer: StepAnswer) -> Message:
        self._known, self._mirror = known, answer.mirror
        self._steps += 1
        return answer.header, answer.tensors

    def _stepped(self, known: SessionKnown, header: Header, tensors: list[torch.Tensor]) -> StepAnswer:
        return RunningStep(self._tail, known, self._mirror, header, tensors).run()

    def _completed(
        self, known: SessionKnown, answer: StepAnswer, undone: Callable[[BaseException], Message]
    ) -> Message | Callable[[], Message]:
        """Finish a step after the model has run; ``undone`` is called if it fails."""
        return self._done(known, answer)

    def close(self) -> None:
        """Release the session."""


def _needed(error: BaseException) -> Any:
    if isinstance(error, NotReported):
        return CALLS
    if isinstance(error, _LeafMissing):
        return LEAVES
    if isinstance(error, (NeededBehind, _Compared)):
        return error.need
    if isinstance(error, RemoteRead) and error.need is not None:
        return [error.need.path, error.need.count, error.need.number]
    return None


class NeededBehind(Exception):
    """The next server of a chain needs more, which the edge has. ``need``: as that server reported it."""

    def __init__(self, need: Any, why: object) -> None:
        super().__init__(f"{why!s:.300}")
        self.need = need


class _Compared(Exception):
    """Only the edge can compare what its model keeps with what this side's does."""

    def __init__(self, there: list[Any]) -> None:
        super().__init__("what the model keeps is to be compared")
        self.need = [hidden.KEPT, there]


class _LeafMissing(Exception):
    """A part of the cut's result is an argument of the cut module that is not on this side."""


@dataclass
class StepAnswer:
    header: Header
    tensors: list[torch.Tensor]
    mirror: Mirror | None


def _lay_out(tensors: list[torch.Tensor], layouts: Any, most_bytes: int) -> None:
    """Lay out tensors in memory as on the edge. Raises BadFrame, and TooLarge before memory is taken."""
    last, taken = -1, 0
    try:
        for number, stride in layouts:
            if type(number) is not int or not last < number < len(tensors):
                raise BadFrame(f"the layout of tensor {number!r:.20}, after that of {last}")
            packed, last = tensors[number], number
            check_sizes(tuple(packed.shape), tuple(stride))
            extent = 1 + sum([(size - 1) * step for size, step in zip(packed.shape, stride, strict=True)])
            taken += extent * packed.element_size() + 8 * packed.numel()  # and the index of each number
            if not packed.dim() or not packed.numel() or taken > most_bytes:
                raise TooLarge(f"a tensor of {extent} elements, gaps included, is announced")
            room = torch.zeros(extent, dtype=packed.dtype, device=packed.device)
            places = torch.zeros((), dtype=torch.int64, device=packed.device)
            for size, step in zip(packed.shape, stride, strict=True):
                places = places.unsqueeze(-1) + torch.arange(size, device=packed.device) * step
            room[places] = packed
            tensors[number] = room.as_strided(packed.shape, stride)
    except MALFORMED as error:
        raise BadFrame(f"malformed layout of a tensor: {error!s:.120}") from error


def _parts(value: Any) -> list[int]:
    """Identifies a value; changes if something is added to a list."""
    return [*map(id, value)] if type(value) in (list, set) else [id(value)]  # the contents of poison cannot be read


class RunningStep:
    """One step in progress."""

    def __init__(
        self,
        tail: DecodingTail,
        known: SessionKnown,
        mirror: Mirror | None,
        header: Header,
        tensors: list[torch.Tensor],
    ) -> None:
        self._tail = tail
        self._known = known
        self._mirror = mirror
        self._header = header
        # tensors of one message share one memory: each needs versions of its own, or a write to one would count for
        # all
        self._tensors = [tensor.to(tail.here).data for tensor in tensors]
        if "l" in header:
            _lay_out(self._tensors, header["l"], tail.step_bytes)
        self._used = 0
        self.needed = tail.needed_up_to(None)
        self._extents = Extents(tail.step_bytes, tail.seen)
        self._start: Any = None
        self._look: InsideCalls | None = None
        """Observes what calls change that the next server of a chain does not make."""
        self._changed: frozenset[str] = frozenset()
        """Names of what the model's calls have changed on it, which is restored."""
        self._left: list[Any] = []
        """What the model's calls have changed on it, which is restored, as reported."""
        self._asked: dict[str, Any] = {}
        """What the edge is asked to compare: this side's summaries at the cut."""
        self._other: set[str] = set()
        """Names of what the edge's model keeps at the cut and this side's does not."""
        self._as_left: set[str] = set()
        """Those that it also has at the step's end."""
        self._same: dict[str, Any] = {}
        """Their values."""
        self._put: dict[str, Any] = {}
        """What was put there for a run that does not read it."""
        self._untouched: set[str] = set()
        """Names of it that a step would not have written if it had been there."""
        self._meets, self._spreads = True, False
        """Whether that is found out at the cut; whether poison takes its place."""
        self._apart: list[tuple[torch.Tensor, int]] = []
        """Tensors that crossed, and may share memory on the edge."""

    def run(self) -> StepAnswer:
        header, known, tail = self._header, self._known, self._tail
        if "new" in header:
            self._mirror = Mirror.built(header["new"], tail.here)
        mirror = self._mirror
        if mirror is not None:
            apply(mirror, header.get("do", ()), tail.step_bytes)
        kwargs, self._used = known.inputs.read(header, self._tensors, None if mirror is None else mirror.state)
        known.crossing = header.get("x", known.crossing)
        known.coded = header.get("q", known.coded)
        known.around = header.get("c", known.around)
        check_around(known.around, tail.paths, tail.model)
        if "t" in header:
            known.reports.apply(header["t"])
        known.wanted = header.get("w", known.wanted)
        if "rng" in header:
            known.sampler.take(header["rng"])
        self._start = None if mirror is None else mirror.snapshot()
        turns = tail.turns
        alone = turns.nested <= 1
        output, running_tail = self._output(kwargs, mirror)
        self._meets, first = False, None
        if self._asked and turns.before is not None:
            end = hidden.changed_since(turns.before)
            raise _Compared([[name, one, end.get(name, one)] for name, one in self._asked.items()])

        def again(look: InsideCalls | None = None) -> bool:
            nonlocal output, running_tail, first
            first = self._copies(output) if first is None else first
            self._mirror = mirror
            self._back()
            self._look = look
            output, running_tail = self._output(kwargs, mirror)
            now = self._copies(output)
            return len(first) == len(now) and all(map(identical, first, now))

        if self._look is not None:
            self._look.refuse_given()
            if self._look.outside:
                look = InsideCalls(tail.model)
                again(look)
                look.refuse()
        before = turns.before
        if before is not None:
            known.unchanged, here, unproven = known.unchanged.check(before, turns, again if alone else None)
            tail.leaves |= bool(here)
            self._changed = frozenset(here)
            if names := unproven | known.behind | self._other:
                self._same = {name: one.now for name, one in here.items() if name in self._as_left - unproven}
                if not alone or not self._reads_none(before, names, again):
                    raise refusal(min(names))
                known.unchanged = known.unchanged.proven(unproven, here)
                known.unread |= known.behind
                known.behind = frozenset()
            self._left = [one for one in known.unchanged.summaries(here) if one[0] not in self._untouched]
        return self._answer(output, running_tail)

    def _reads_none(self, before: PythonState, names: set[str], again: Callable[[], bool]) -> bool:
        """Return whether a step gives the same with poison in place of ``names`` at its beginning, and in place of what
        else the edge has at the cut; where the step itself leaves that, with its value. ``again`` repeats the step.
        """
        is_unread, self._tail.turns.looked = False, False
        with suppress(PoisonRead, Exception), poisoned(before, names, self._same) as reached:
            is_unread = reached and again()
        if not is_unread or not self._other:
            return is_unread
        is_unread, self._spreads = False, True
        with suppress(PoisonRead, Exception), poisoned(before, ()):
            is_same = again()
            now = entries(PythonState(self._tail.model, settings=False))
            self._untouched = {
                name for name, one in self._put.items() if name in now and _parts(now[name].value) == one
            }
            is_left = all(name in now and agree(one, now[name].value) for name, one in self._same.items())
            is_unread = is_same and is_left
        return is_unread

    def _meet(self, reported: Any, before: PythonState) -> None:
        """At the cut: compare what the edge's model keeps there with this side's."""
        if self._meets:
            found, requested = hidden.differing(reported, self._now(before))
            self._other |= found
            other, as_left, rest = hidden.read_comparison(self._header.get("u", ()), requested)
            self._other |= other
            self._as_left |= as_left
            self._asked = {name: requested[name] for name in rest}
        if self._spreads:
            if not spread(self._now(before), self._other, self._same, classes=False):
                raise PoisonRead
            now = entries(PythonState(self._tail.model, settings=False))
            self._put = {name: _parts(now[name].value) for name in self._other if name in now}

    def _now(self, before: PythonState) -> PythonState:
        return before if before.looks_same else PythonState(self._tail.model, settings=False)

    def _answer(self, output: Any, running_tail: Tail) -> StepAnswer:
        header, known = self._header, self._known
        token = running.set(running_tail)
        try:
            structure, leaves, tensors = packed_result(
                output, known.inputs.leaves, shortened(known.wanted, known.sampler.draw)
            )
            self._check_states(output)
            changes = None if self._mirror is None else self._mirror.look(kept_here)
        except RemoteRead as error:
            if error.need is not None:  # the edge can send it
                raise
            raise self._refused(error) from error
        finally:
            running.reset(token)
        reply: Header = {"o": leaves}
        if known.sampler.drawn and known.sampler.state is not None:
            reply["rng"] = digest(known.sampler.state)
        if structure != known.structure:
            reply["r"] = known.structure = structure
        if changes is not None:
            reply["d"], known.down = differences(changes, known.down)
        if header.get("b") and not running_tail.replay.answered:
            reply["nb"] = 1
        if self._left and self._left != known.left:
            reply["m"] = known.left = self._left
        self._extents.passed()
        self.needed.end_run()
        return StepAnswer(reply, tensors, self._mirror)

    def _output(self, kwargs: dict[str, Any], given: Mirror | None) -> tuple[Any, Tail]:
        """Return the model's output, and the `Tail` that ran it; ``given``: the state's mirror at the step's
        beginning.
        """
        tail, look = self._tail, ForwardLook()
        inputs = [(leaf, leaf._version) for leaf in self._known.inputs.leaves if type(leaf) is not RemoteTensor]
        while True:
            running_tail = self._runner()
            try:
                output = self._forward(running_tail, kwargs, look)
            except LearnedOnTheWay:
                self._back()
                continue
            if any(leaf._version != version for leaf, version in inputs):
                raise CutRefused("the model writes in place to an input that both sides have: each would do it")
            if any(one._version != version for one, version in (*self._apart, *running_tail.views)):
                raise CutRefused(
                    f"cut after {tail.cut.name}: code behind it writes in place to a value that is known before it"
                )
            if not look.again():
                break
            self._mirror = given
            self._back()
        if look.found:
            raise CutRefused(
                f"{look.found} draws random numbers on this side of the cut {tail.cut.name}, which are not those that "
                "the edge would draw: put the model into evaluation (model.eval())"
            )
        return output, running_tail

    def _runner(self, make: Callable[..., Tail] = Tail) -> Tail:
        tail, header = self._tail, self._header
        return make(
            tail.cut,
            tail.paths,
            tail.template,
            self._known.reports,
            header.get("b", []),
            self._arrive,
            tail.find,
            tail.here,
            self.needed,
            seek=bool(header.get("born")),
            modules=tail.modules,
        )

    def _called(self, running_tail: Tail, kwargs: dict[str, Any]) -> Any:
        """Return the model's output. Hooks of the model itself run on the edge, which has the answer."""
        state = None if self._mirror is None else self._mirror.state
        own = {name: value if value is state else with_own_containers(value) for name, value in kwargs.items()}
        output = self._tail.model.forward(**own)
        if not all(own[name] is value or has_same_content(own[name], value) for name, value in kwargs.items()):
            raise CutRefused("the model changes a list or dictionary that it is given: the caller's stays as it was")
        return output

    def _copies(self, output: Any) -> list[torch.Tensor]:
        """Copies of a forward's output and of what it left in the state."""
        state = () if self._mirror is None else self._mirror.real()
        return [one.clone() for one in (*tensors_in(output), *state) if type(one) is not RemoteTensor]

    def _forward(self, running_tail: Tail, kwargs: dict[str, Any], look: ForwardLook) -> Any:
        token = running.set(running_tail)
        try:
            with torch.no_grad(), restored(self._known.around), fast_path_off(), ExitStack() as self._around:
                self._extents.begin()
                known = self._known
                reported = (
                    known.inputs.magnitude(),
                    known.reports.magnitude(),
                    magnitude([known.wanted, self._header.get("b")]),
                )
                self._around.enter_context(self._extents.around(*reported, self._state_magnitude()))
                if look.draws is not None:
                    self._around.enter_context(look.draws)
                running_tail.replay.on(bool(self._header.get("b")))
                output = self._called(running_tail, kwargs)
        except TailDiverged as error:
            raise CutRefused(f"at {self._tail.cut.name} the two sides part before the cut: {error}") from error
        except RemoteRead as error:
            if error.need is not None:  # the edge can send it
                raise
            raise self._refused(error) from error
        finally:
            running_tail.replay.off()
            running.reset(token)
        if running_tail.failure is not None:
            raise running_tail.failure
        if not running_tail.resumed:
            raise CutRefused(f"{self._tail.cut.name} is not called in this step")
        return output

    def _refused(self, error: RemoteRead) -> CutRefused:
        return CutRefused(f"cut after {self._tail.cut.name}: {error}")

    def _arrive(self, running_tail: Tail, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """At the cut: set the state to the edge's there, and return the cut's result."""
        if "m" in self._header and (before := self._tail.turns.before) is not None:
            self._meet(self._header["m"], before)
        gone: list[torch.Tensor] = []
        if running_tail.born is not None and self._mirror is None:
            self._mirror = running_tail.born
            gone += self._mirror.real()
        else:
            self._back(gone)
        if self._mirror is not None and "d" in self._header:
            self._known.up = self._mirror.put(self._known.up, self._header["d"])
            put_more(self._mirror, self._known.ups, self._header)
        rest = magnitude([one.shape for one in self._tensors[self._used :]])
        self._around.enter_context(self._extents.around(rest, self._state_magnitude()))
        made, sent = self._crossed(args, kwargs)
        # the edge's state has these, in memory of its own
        self._apart += [(one, 0 if one.is_inference() else one._version) for one in gone]
        running_tail.sent = sent
        return made

    def _state_magnitude(self) -> Any:
        return None if self._mirror is None else self._mirror.magnitude()

    def _back(self, gone: list[torch.Tensor] | None = None) -> None:
        """Undo what the replay of the prefix did to the state; ``gone`` gets what it put there."""
        if self._mirror is not None and not self._mirror.back_to(self._start, gone):
            raise CutRefused("code before the cut writes to the part of the state that is behind it")

    def _crossed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[Origin, torch.Tensor]]:
        try:
            structure, passed, is_shared = self._known.crossing
            extra = [Origin("call", str(one[0]), int(one[1]), int(one[2])) for one in self._header.get("e", ())]
            rest = self._tensors[self._used :]
            injected = rest[: len(rest) - len(extra)]
            for number in self._known.coded:
                decoded = hidden.decoded(injected[number], self._tail.step_bytes)
                injected[number] = decoded.to(self._tail.here)
            sent = dict(zip(extra, rest[len(injected) :], strict=True))
            given = arguments(args, kwargs)
            waiting = iter(injected)
            leaves = [next(waiting) if number < 0 else given[number] for number in passed]
        except (*MALFORMED, StopIteration) as error:
            raise BadFrame(f"malformed description of what crosses: {error!s:.120}") from error
        if next(waiting, None) is not None:
            raise BadFrame("more tensors than cross")
        kept = [*leaves, *sent.values()] if is_shared else list(sent.values())
        self._apart = [(one, one._version) for one in kept if type(one) is not RemoteTensor]
        if any(type(leaf) is RemoteTensor for leaf in leaves):
            raise _LeafMissing("a part of the cut's result is an argument that is not on this side")
        return unflatten(structure, leaves, self._tail.find), sent

    def _check_states(self, output: Any) -> None:
        values = (
            output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else (output,)
        )
        mine = None if self._mirror is None else self._mirror.state
        if any(is_state(value) and value is not mine for value in values):
            raise CutRefused("the model gives a state other than the one that it was given")
