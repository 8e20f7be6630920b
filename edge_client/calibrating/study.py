"""The study: every input through head, encode, decode and tail, at every cut and with every codec, in this process.

The whole model runs once for an input, and one head for an input and a cut, which all codecs share. Where a codec left
every tensor as it is, or is lossless, no tail has to run: the answer is the whole model's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import Any, Final

from edge_client.calibrating import inputs
from edge_client.calibrating.inputs import Tally
from edge_client.calibrating.outputs import Compare, Row, comparer, kind_of
from edge_client.given import Given
from edge_client.planning.codecs import CutLosses, LossTable
from edge_client.survey.loading import Loaded
from shared_hooks import WrappedModel
from shared_hooks.codecs import CODECS
from shared_hooks.codecs.basis import Basis, Book
from shared_hooks.crossing import EarlyOutput, books_of
from shared_hooks.errors import CutRefused, InputMismatch, IsthmusError
from shared_hooks.forward import run_plain
from shared_hooks.models.inputs import to_device
from shared_hooks.modules import holder_modules
from shared_hooks.profiling.profiler import identity
from shared_hooks.tensors import ClassFinder, classes_of, copied, flatten, unflatten

# Books for the codec "basis": learnt at every cut from inputs that are set apart, in several steps; one is kept.
#
# Of the steps, from the finest on, each is judged by its own upper bound, until one loses more than is allowed; the
# one before it is taken. Tests in a fixed order need no correction for their number: the bound of what is taken holds
# as if it had been the only one.


STEPS: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Standard deviations of a cut's values to a quantiser's cell."""
LEAST: Final = 8
"""Inputs to learn from."""
MOST: Final = 200
SHARE: Final = 4
"""One input of so many is learnt from."""

Call = tuple[Any, Any]
Books = tuple[Book | None, ...]


def set_apart(count: int, wanted: int | None) -> list[int]:
    """The numbers of inputs to learn from, spread over all of them; none where they would be too few.

    ``wanted``: less than ``count``; None: one of `SHARE`.
    """
    learnt = min(MOST, count // SHARE) if wanted is None else wanted
    if learnt < LEAST and wanted is None:
        return []
    return sorted({number * count // learnt for number in range(learnt)}) if learnt > 0 else []


def learn(wrapped: WrappedModel, cut: str, calls: Sequence[Call]) -> dict[float, Books]:
    """By step, the books of a cut; empty where nothing can be learnt. Raises what the model raises."""
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


def coarsest(tallies: Sequence[Tally], max_loss: float) -> Tally | None:
    """The coarsest step of one codec at one cut that loses no more than is allowed; the finest step comes first."""
    chosen = None
    for tally in tallies:
        if chosen is not None and (tally.stopped or tally.bounds()[1] > max_loss):
            break
        chosen = tally
    return chosen


TOO_LOSSY = 2.0
"""A codec that surely loses so many times the loss that is allowed is not measured to the end."""
LOSSLESS_INPUTS = 32
"""Inputs whose bytes are counted where nothing can be lost."""
Progress = Callable[[int, int], None]


@dataclass
class _Cut:
    layer_id: int
    name: str
    frontier_bytes: int
    tallies: list[Tally]
    refused: str = ""
    books: dict[float, Books] = field(default_factory=dict)

    @property
    def cut(self) -> str:
        """As `WrappedModel.head` takes it."""
        return "input" if self.layer_id < 0 else self.name

    @property
    def open(self) -> list[Tally]:
        """What still has to be measured here."""
        if self.refused:
            return []
        return [one for one in self.tallies if not one.stopped and not (one.lossless and one.inputs >= LOSSLESS_INPUTS)]

    def kept(self, max_loss: float) -> list[Tally]:
        """What goes into the table: of a codec that was learnt, one step."""
        steps = [one for one in self.tallies if one.step is not None and one.inputs and one.used]
        best = coarsest(steps, max_loss)
        return [one for one in self.tallies if one.step is None or one is best]

    def losses(self, max_loss: float) -> CutLosses:
        found = tuple(one.result() for one in self.kept(max_loss) if one.used)
        return CutLosses(self.name, self.layer_id, self.frontier_bytes, found if not self.refused else (), self.refused)


@dataclass
class Study:
    """``cuts``: layers' ids, -1 for "input". ``kind``: of `outputs.KINDS`; None: found by the first output."""

    loaded: Loaded
    cuts: Sequence[str]
    codecs: Sequence[str]
    max_loss: float
    kind: str | None = None
    confidence: float = inputs.CONFIDENCE
    seconds: float | None = None
    """No input is begun after as many."""
    learnt: Sequence[Given] = ()
    """Inputs that the codec "basis" learns from, and that nothing is judged by."""
    done: int = field(default=0, init=False)
    _whole_right: list[bool] = field(default_factory=list, init=False)

    @cached_property
    def _find(self) -> ClassFinder:
        return classes_of(holder_modules(self.loaded.wrapped.model))

    def run(self, items: Sequence[Given], on_progress: Progress = lambda done, total: None) -> LossTable:
        """Raises InputMismatch (an output of another kind), and what reading, planning and the model raise."""
        until = None if self.seconds is None else time.monotonic() + self.seconds
        compare: Compare | None = None
        places: list[_Cut] = []
        labelled = 0
        for number, item in enumerate(items):
            if number and until is not None and time.monotonic() > until:
                break
            args, kwargs = (to_device(each, self.loaded.wrapped.device) for each in item.read(self.loaded.spec))
            whole = self._kept(run_plain(self.loaded.wrapped.model, *copied(args, kwargs)))
            if compare is None:
                any_label = any(one.truth is not None for one in items)
                self.kind = self.kind or kind_of(whole, self.loaded.spec, any_label)
                compare = comparer(self.kind, self.loaded.spec)
                places = self._places()
                self._learn(places)
            unchanged = compare(whole, whole, label=item.truth)
            labelled += item.truth is not None
            self._whole_right += [row.whole_right for row in unchanged if row.whole_right is not None]
            judge = partial(compare, whole, label=item.truth)
            for place in places:
                self._at(place, (args, kwargs), judge, unchanged)
            self.done += 1
            on_progress(self.done, len(items))
        return self._table(places, labelled)

    def _learn(self, places: Sequence[_Cut]) -> None:
        """In place of a codec that is learnt, one tally for each of its steps."""
        device = self.loaded.wrapped.device
        reads = [item.read(self.loaded.spec) for item in self.learnt] if Basis.name in self.codecs else []
        calls = [(to_device(args, device), to_device(kwargs, device)) for args, kwargs in reads]
        for place in places:
            place.tallies = [one for one in place.tallies if one.codec != Basis.name]
            if calls and not place.refused:
                place.books = learn(self.loaded.wrapped, place.cut, calls)
            place.tallies += [
                Tally(Basis.name, False, self.kind == "classes", self.confidence, step) for step in place.books
            ]

    def _places(self) -> list[_Cut]:
        wrapped, is_share = self.loaded.wrapped, self.kind == "classes"
        plan, found = wrapped.plan(*self.loaded.args, **self.loaded.kwargs), []
        for cut in self.cuts:
            info = plan.resolve(cut)
            number = -1 if info is None else info.layer_id
            tallies = [Tally(one, CODECS[one].lossless, is_share, self.confidence) for one in self.codecs]
            try:
                found.append(_Cut(number, cut, plan.frontier_bytes(cut), tallies))
            except CutRefused as error:
                found.append(_Cut(number, cut, 0, tallies, str(error)))
        return found

    def _at(
        self, place: _Cut, call: tuple[Any, Any], compare: Callable[[Any], list[Row]], unchanged: Sequence[Row]
    ) -> None:
        """One input at one cut, with every codec that is still of interest."""
        measured = place.open
        if not measured:
            return
        args, kwargs = copied(*call)
        try:
            head = self.loaded.wrapped.head(place.cut, *args, **kwargs)
        except InputMismatch:
            raise
        except IsthmusError as error:  # this input takes a path that has no such cut
            place.refused = f"{type(error).__name__}: {error}"
            return
        for tally in measured:
            early = self._with_books(head, place.books[tally.step]) if tally.step is not None else head
            parcel = early.pack(tally.codec)
            tally.sent(len(parcel.header) + parcel.nbytes, tally.codec in parcel.codecs)
            if tally.lossless:
                continue
            if all(CODECS[name].lossless for name in parcel.codecs):
                tally.take(unchanged)
                continue
            payload = bytearray().join(parcel.buffers)
            most = len(payload) + early.nbytes + (1 << 20)
            came = EarlyOutput.unpack(early.crossing, parcel.header, payload, most, disposable=True)
            try:
                output = self.loaded.wrapped.tail(came)
            except Exception:  # what came was so far off that the model's own code gave up
                tally.take([Row(1.0) for _ in unchanged])
                tally.stopped = True
                continue
            tally.take(compare(self._kept(output)))
            tally.stop_if_worse_than(TOO_LOSSY * self.max_loss)

    def _with_books(self, head: EarlyOutput, books: Books) -> EarlyOutput:
        if len(books) != len(head.crossing.grains):  # this input sends other pieces
            return head
        return replace(head, crossing=head.crossing.with_books(books))

    def _kept(self, output: Any) -> Any:
        """On the CPU, and nobody else's: a model may give out memory that its next run overwrites."""
        structure, tensors = flatten(output)
        return unflatten(structure, [one.detach().cpu().clone() for one in tensors], self._find)

    def _table(self, places: Sequence[_Cut], labelled: int) -> LossTable:
        assert self.kind is not None
        right = self._whole_right
        return LossTable(
            model=identity(self.loaded.wrapped, self.loaded.spec.model_id, self.loaded.plan_digest),
            kind=self.kind,
            inputs=self.done,
            labelled=labelled,
            confidence=self.confidence,
            max_loss=self.max_loss,
            whole_accuracy=sum(right) / len(right) if right else None,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            cuts=tuple(place.losses(self.max_loss) for place in places),
            books={
                place.name: place.books[tally.step]
                for place in places
                for tally in place.kept(self.max_loss)
                if tally.step is not None
            },
        )
