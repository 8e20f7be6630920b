"""Run the study: inputs through head, encode, decode and tail, at every cut and with every codec, in this process.

It works in rounds. The first takes a few inputs and a few codecs through every cut; each later one takes more inputs
through what is still on the Pareto front: a codec at a cut is suspended while another one, at that cut or an earlier
one, sends no more bytes, loses no more and takes no more time. If that changes, it catches up. In a round the whole
model runs once per input, and one head per input and cut, which all codecs share. If a codec left every tensor
unchanged, or is lossless, no tail needs to run: the answer is the whole model's.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import Any, Final

from edge_client.calibrating import inputs
from edge_client.calibrating.inputs import LossTally
from edge_client.calibrating.outputs import Compare, ComparedRow, comparer, kind_of
from edge_client.planning.codecs import DOMINATED, TOO_LOSSY, CutLosses, LossTable
from edge_client.user_input import LoadedModel, NamedInput
from shared_hooks import WrappedModel
from shared_hooks.codecs import CODECS, by_wire
from shared_hooks.codecs.basis import Basis, Book
from shared_hooks.crossing import EarlyOutput, books_of
from shared_hooks.errors import CutRefused, InputMismatch, IsthmusError
from shared_hooks.forward import run_plain
from shared_hooks.models.inputs import to_device
from shared_hooks.modules import holder_modules
from shared_hooks.profiling.profiler import identity
from shared_hooks.tensors import ClassFinder, classes_of, copied, flatten, unflatten

# Codebooks for the codec "basis": learnt at every cut from held-out inputs, in several steps; one is kept.
#
# Each step, from the finest on, is judged by its own upper bound, until one loses more than is allowed; the one
# before it is taken. Tests in a fixed order need no correction for their number: the bound of the chosen step holds
# as if it had been the only one.


STEPS: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Width of a quantiser's cell, in standard deviations of a cut's values."""
LEAST: Final = 8
"""Minimum inputs to calibrate on."""
MOST: Final = 200
SHARE: Final = 4
"""One input of so many is used to calibrate."""

Call = tuple[Any, Any]
Books = tuple[Book | None, ...]


def set_apart(count: int, wanted: int | None) -> list[int]:
    """Return the indices of the inputs to calibrate on, spread over all of them; none if there are too few.

    ``wanted``: less than ``count``; None: one of `SHARE`.
    """
    learnt = min(MOST, count // SHARE) if wanted is None else wanted
    if learnt < LEAST and wanted is None:
        return []
    return sorted({number * count // learnt for number in range(learnt)}) if learnt > 0 else []


def learn(wrapped: WrappedModel, cut: str, calls: Sequence[Call]) -> dict[float, Books]:
    """Return the books of a cut by step; empty if it cannot be calibrated. Raises what the model raises."""
    heads: list[EarlyOutput] = []
    for args, kwargs in calls:
        args, kwargs = copied(args, kwargs)
        try:
            heads.append(wrapped.head(cut, *args, **kwargs))
        except IsthmusError:  # this input takes a path without that cut
            continue
    pieces = len(heads[0].pieces) if heads else 0
    heads = [head for head in heads if len(head.pieces) == pieces]
    if len(heads) < 2:
        return {}
    found = {step: books_of(heads, step) for step in STEPS}
    return {step: books for step, books in found.items() if any(book is not None for book in books)}


def coarsest(tallies: Sequence[LossTally], max_loss: float) -> LossTally | None:
    """Return the coarsest step of one codec at one cut within the allowed loss; the finest step comes first."""
    chosen = None
    for tally in tallies:
        if chosen is not None and (tally.stopped or tally.bounds()[1] > max_loss):
            break
        chosen = tally
    return chosen


TOO_LOSSY_TIMES = 2.0
"""Multiple of the allowed loss from which a codec, if surely that lossy, is not measured to the end."""
FEW_INPUTS: Final = 4
FEW_CODECS: Final = ("fp16", "int8", "int4")
"""Codecs of the first round at every cut, beside the lossless ones."""
EFFORT: Final[Mapping[str, int]] = {"raw": 0, "bf16": 0, "fp16": 0, "basis": 2}
"""A codec's cost in time, as a rank; 1 for the others. None is suspended for a more expensive one."""
SIMILAR: Final = 1.02
"""Relative difference in bytes between two cuts that does not justify the later one."""


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` measurements, each of one input with one codec at one cut; ``left``: seconds."""

    done: int
    total: int
    left: float


State = dict[str, Any]
"""JSON data: the measurements so far, from which `Study.run` resumes."""


@dataclass
class _Cut:
    layer_id: int
    name: str
    frontier_bytes: int
    tallies: list[LossTally]
    refused: str = ""
    books: dict[float, Books] | None = None
    """By step; None: not calibrated yet."""
    digest: str | None = None
    """Identifies the books."""
    seconds: float = 0.0
    """Seconds of its measurements, of which there were ``runs``."""
    runs: int = 0

    @property
    def cut(self) -> str:
        """The cut as `WrappedModel.head` takes it."""
        return "input" if self.layer_id < 0 else self.name

    @property
    def open(self) -> list[LossTally]:
        """What may still have to be measured here."""
        return [] if self.refused else [one for one in self.tallies if not one.stopped]

    def kept(self, max_loss: float) -> list[LossTally]:
        """Return the tallies for the table: of a calibrated codec, one step."""
        steps = [one for one in self.tallies if one.step is not None and one.inputs and one.used]
        best = coarsest(steps, max_loss)
        return [one for one in self.tallies if (one.inputs and one.step is None) or (best and one is best)]

    def losses(self, max_loss: float, inputs: int) -> CutLosses:
        found = [
            replace(one.result(), stopped=TOO_LOSSY if one.stopped else DOMINATED if one.inputs < inputs else "")
            for one in self.kept(max_loss)
            if one.used
        ]
        found = [replace(one, stopped="") if one.lossless else one for one in found]
        return CutLosses(self.name, self.layer_id, self.frontier_bytes, () if self.refused else (*found,), self.refused)


@dataclass
class Study:
    """A calibration study. ``cuts``: layers' ids, -1 for "input". ``kind``: of `outputs.KINDS`; None: detected on the
    first output.

    ``every_cut``, ``every_codec``: measure all of them with all inputs, on the front or not, as they were given by
    name.
    """

    loaded: LoadedModel
    cuts: Sequence[str]
    codecs: Sequence[str]
    max_loss: float
    kind: str | None = None
    confidence: float = inputs.CONFIDENCE
    seconds: float | None = None
    """No input is begun after as many seconds."""
    learnt: Sequence[NamedInput] = ()
    """Inputs that the codec "basis" is calibrated on, and that are not used for evaluation."""
    every_cut: bool = False
    every_codec: bool = False
    done: int = field(default=0, init=False)
    """Number of inputs used."""
    complete: bool = field(default=False, init=False)
    """Whether all that is on the front was measured with all inputs."""
    last: State | None = field(default=None, init=False)
    """The measurements after the last complete input: an interruption may come at any time."""
    _places: list[_Cut] = field(default_factory=list, init=False)
    _labelled: int = field(default=0, init=False)
    _whole: list[int] = field(default_factory=lambda: [0, 0], init=False)
    """Labelled rows that the whole model gets right, and all labelled rows."""
    _compare: Compare | None = field(default=None, init=False)

    @cached_property
    def _find(self) -> ClassFinder:
        return classes_of(holder_modules(self.loaded.wrapped.model))

    @cached_property
    def _calls(self) -> list[Call]:
        device = self.loaded.wrapped.device
        reads = [item.read(self.loaded.spec) for item in self.learnt] if Basis.name in self.codecs else []
        return [(to_device(args, device), to_device(kwargs, device)) for args, kwargs in reads]

    def run(
        self,
        items: Sequence[NamedInput],
        on_progress: Callable[[Progress], None] = lambda one: None,
        state: State | None = None,
        on_input: Callable[[], None] = lambda: None,
    ) -> LossTable:
        """Run the study. ``state``: of an earlier run of the same study. ``on_input`` is called after each input.

        Raises InputMismatch (an output of another kind), and what reading, planning and the model raise.
        """
        until = None if self.seconds is None else time.monotonic() + self.seconds
        self._begin(items, state)
        total, few = len(items), not self.every_codec and state is None
        for end in self._ends(total):
            while True:
                front = self._few() if few else self._front()
                wanted = [pair for pair in front if pair[1].inputs < (min(end, pair[1].most or end))]
                if not wanted:
                    break
                everything = [(place, one) for place in self._places for one in place.open] if few else front
                for number in range(min(one.inputs for _, one in wanted), end):
                    if self.done and until is not None and time.monotonic() > until:
                        return self.table()
                    self._input(items, number, wanted)
                    self.last = self._state()
                    on_input()
                    on_progress(self._progress(total, everything))
            few = False
        self.complete = True
        self.last = self._state()
        return self.table()

    def back(self) -> LossTable:
        """Return the table as of `last`, which must exist."""
        assert self.last is not None
        self._restore(self.last)
        return self.table()

    def _ends(self, total: int) -> Iterator[int]:
        """Yield the number of inputs after each round."""
        at = FEW_INPUTS
        while at < total:
            yield at
            at *= 4 if at < 64 else 2
        yield total

    def _begin(self, items: Sequence[NamedInput], state: State | None) -> None:
        (args, kwargs), any_label = self._read(items[0]), any(one.truth is not None for one in items)
        whole = self._kept(run_plain(self.loaded.wrapped.model, *copied(args, kwargs)))
        self.kind = self.kind or kind_of(whole, self.loaded.spec, any_label)
        self._compare = comparer(self.kind, self.loaded.spec)
        self._compare(whole, whole, label=items[0].truth)
        self._places = self._made()
        if state is not None:
            self._restore(state)

    def _read(self, item: NamedInput) -> Call:
        device = self.loaded.wrapped.device
        args, kwargs = item.read(self.loaded.spec)
        return to_device(args, device), to_device(kwargs, device)

    def _input(self, items: Sequence[NamedInput], number: int, wanted: Sequence[tuple[_Cut, LossTally]]) -> None:
        """Measure one input with those of ``wanted`` that have measured all inputs before it."""
        assert self._compare is not None
        item = items[number]
        args, kwargs = self._read(item)
        whole = self._kept(run_plain(self.loaded.wrapped.model, *copied(args, kwargs)))
        unchanged = self._compare(whole, whole, label=item.truth)
        judge = partial(self._compare, whole, label=item.truth)
        for place in {id(place): place for place, _ in wanted}.values():
            tallies = [
                one
                for its, one in wanted
                if its is place and one.inputs == number and not one.stopped and (one.most or number + 1) > number
            ]
            if tallies and not place.refused:
                began = time.monotonic()
                self._at(place, tallies, (args, kwargs), judge, unchanged)
                place.seconds += time.monotonic() - began
                place.runs += len(tallies)
        if number == self.done:
            self.done += 1
            self._labelled += item.truth is not None
            right = [row.whole_right for row in unchanged if row.whole_right is not None]
            self._whole = [self._whole[0] + sum(right), self._whole[1] + len(right)]

    def _few(self) -> list[tuple[_Cut, LossTally]]:
        """Return the measurements of the first round."""
        some = [name for name in FEW_CODECS if name in self.codecs]
        return [
            (place, one)
            for place in self._places
            for one in place.open
            if one.lossless or one.codec in some or not some
        ]

    def _front(self) -> list[tuple[_Cut, LossTally]]:
        """Return, by cut, what is not dominated; where something is not, unmeasured codecs, too."""
        found: list[tuple[_Cut, LossTally]] = []
        earlier: list[LossTally] = []
        for place in self._places:
            known = [one for one in place.open if one.inputs]
            mine = [one for one in known if not self._dominated(one, known, earlier)]
            if not self.every_cut and place.layer_id >= 0:  # sending the input is not a cut, and not always wanted
                earlier += mine
            if not mine and known:
                continue
            if place.books is None and not place.refused:
                self._learn(place)
            mine += [one for one in place.open if not one.inputs]
            if any(one.step is not None for one in mine):  # they are judged from the finest step on
                mine += [one for one in place.open if one.step is not None and one not in mine]
            found += [(place, one) for one in mine]
        return found

    def _dominated(self, tally: LossTally, here: Sequence[LossTally], earlier: Sequence[LossTally]) -> bool:
        """Return whether a codec at this cut or an earlier one sends no more, loses no more and takes no more time."""

        def is_as_good(one: LossTally) -> bool:
            return _effort(one) <= _effort(tally) and one.mean_loss <= tally.mean_loss

        return any(is_as_good(one) and one.mean_bytes <= SIMILAR * tally.mean_bytes for one in earlier) or (
            not self.every_codec
            and any(is_as_good(one) and one.mean_bytes < tally.mean_bytes and one.codec != tally.codec for one in here)
        )

    def _learn(self, place: _Cut) -> None:
        """Replace a codec that is calibrated by one tally for each of its steps."""
        place.books = learn(self.loaded.wrapped, place.cut, self._calls) if self._calls else {}
        place.digest = _digest(place.books)
        place.tallies = [one for one in place.tallies if one.codec != Basis.name]
        place.tallies += [
            LossTally(Basis.name, False, self.kind == "classes", self.confidence, step) for step in place.books
        ]

    def _made(self) -> list[_Cut]:
        wrapped, is_share = self.loaded.wrapped, self.kind == "classes"
        plan, found = wrapped.plan(*self.loaded.args, **self.loaded.kwargs), []
        codecs = [one for one in self.codecs if one != Basis.name]
        for cut in self.cuts:
            info = plan.resolve(cut)
            number = -1 if info is None else info.layer_id
            tallies = [LossTally(one, CODECS[one].lossless, is_share, self.confidence) for one in codecs]
            try:
                found.append(_Cut(number, cut, plan.frontier_bytes(cut), tallies))
            except CutRefused as error:
                found.append(_Cut(number, cut, 0, tallies, str(error)))
        return found

    def _progress(self, total: int, front: Sequence[tuple[_Cut, LossTally]]) -> Progress:
        """Return the progress, from the time of each cut's measurements."""
        runs = sum(place.runs for place in self._places)
        mean = sum(place.seconds for place in self._places) / max(1, runs)
        left, steps = 0.0, 0
        for place, one in front:
            if not one.stopped and not place.refused:
                missing = max(0, min(total, one.most or total) - one.inputs)
                steps += missing
                left += missing * (place.seconds / place.runs if place.runs else mean)
        done = sum(one.inputs for place in self._places for one in place.tallies)
        return Progress(done, done + steps, left)

    def _at(
        self,
        place: _Cut,
        tallies: Sequence[LossTally],
        call: Call,
        compare: Callable[[Any], list[ComparedRow]],
        unchanged: Sequence[ComparedRow],
    ) -> None:
        """Measure one input at one cut, with these codecs."""
        args, kwargs = copied(*call)
        try:
            head = self.loaded.wrapped.head(place.cut, *args, **kwargs)
        except InputMismatch:
            raise
        except IsthmusError as error:  # this input takes a path that has no such cut
            place.refused = f"{type(error).__name__}: {error}"
            return
        for tally in tallies:
            early = self._with_books(head, place.books[tally.step]) if tally.step is not None and place.books else head
            parcel = early.pack(tally.codec)
            tally.sent(len(parcel.header) + parcel.nbytes, tally.codec in parcel.codecs)
            if tally.lossless:
                continue
            if all(codec is not None and codec.lossless for codec in map(by_wire, parcel.codecs)):
                tally.take(unchanged)
                continue
            payload = bytearray().join(parcel.buffers)
            most = len(payload) + early.nbytes + (1 << 20)
            came = EarlyOutput.unpack(early.crossing, parcel.header, payload, most, disposable=True)
            try:
                output = self.loaded.wrapped.tail(came)
            except Exception:  # the decoded values were so far off that the model's own code raised
                tally.take([ComparedRow(1.0) for _ in unchanged])
                tally.stopped = True
                continue
            tally.take(compare(self._kept(output)))
            tally.stop_if_worse_than(TOO_LOSSY_TIMES * self.max_loss)

    def _with_books(self, head: EarlyOutput, books: Books) -> EarlyOutput:
        if len(books) != len(head.crossing.grains):  # this input sends other pieces
            return head
        return replace(head, crossing=head.crossing.with_books(books))

    def _kept(self, output: Any) -> Any:
        """Return a private copy on the CPU: a model may return memory that its next run overwrites."""
        structure, tensors = flatten(output)
        return unflatten(structure, [one.detach().cpu().clone() for one in tensors], self._find)

    def _state(self) -> State:
        """Return all measurements so far."""
        return {
            "complete": self.complete,
            "inputs": self.done,
            "labelled": self._labelled,
            "whole": list(self._whole),
            "cuts": [
                {
                    "refused": place.refused,
                    "seconds": place.seconds,
                    "runs": place.runs,
                    "books": place.digest,
                    "tallies": [one.state() for one in place.tallies],
                }
                for place in self._places
            ],
        }

    def _restore(self, state: State) -> None:
        """Restore the state. Books are calibrated again; where they differ, "basis" is measured again at that cut."""
        self.done, self._labelled, self._whole = state["inputs"], state["labelled"], list(state["whole"])
        for place, known in zip(self._places, state["cuts"], strict=True):
            place.refused, place.seconds, place.runs = known["refused"], known["seconds"], known["runs"]
            if known["books"] is not None and place.books is None:
                self._learn(place)
            elif known["books"] is None:
                place.books = place.digest = None
                place.tallies = [one for one in place.tallies if one.step is None]
            if place.digest == known["books"]:
                for one, tally in zip(place.tallies, known["tallies"], strict=True):
                    one.restore(tally)
            else:
                for one, tally in zip(place.tallies, known["tallies"], strict=False):
                    if one.step is None:
                        one.restore(tally)

    def table(self) -> LossTable:
        """Return the measurements so far as a table of losses."""
        assert self.kind is not None
        right, rows = self._whole
        return LossTable(
            model=identity(self.loaded.wrapped, self.loaded.spec.model_id, self.loaded.plan_digest),
            kind=self.kind,
            inputs=self.done,
            labelled=self._labelled,
            confidence=self.confidence,
            max_loss=self.max_loss,
            whole_accuracy=right / rows if rows else None,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            cuts=tuple(place.losses(self.max_loss, self.done) for place in self._places),
            books={
                place.name: place.books[tally.step]
                for place in self._places
                for tally in place.kept(self.max_loss)
                if tally.step is not None and place.books
            },
        )


def _effort(tally: LossTally) -> int:
    return EFFORT.get(tally.codec, 1)


def _digest(books: Mapping[float, Books]) -> str:
    text = json.dumps([[one and one.to_json() for one in books[step]] for step in sorted(books)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
