"""The judge: a program's model, cut everywhere, against the whole one, over requests in a row."""

from __future__ import annotations

import enum
import traceback
import types
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import IsthmusError
from studies.fuzz.alarm import TooLong, alarm
from studies.fuzz.calls import inputs
from studies.fuzz.compare import difference
from studies.fuzz.party import FILE, Party, world_kept
from studies.fuzz.program import Program
from studies.fuzz.source import source_of

MAX_BYTES = 1 << 20
MAX_CUTS = 6  # of a program, spread over its layers
AGAIN = 2  # cuts that are run a second time
MAX_REBUILDS = 2
SECONDS = 20.0


class Outcome(enum.Enum):
    """What became of one request at one cut."""

    EXACT = "exact"
    REFUSED = "refused"  # by the plan or the head
    LATE = "refused late"  # by the tail
    WRONG = "wrong"
    OUTSIDE = "outside errors"  # an error that is not of the tree
    FAILS = "invalid"  # the reference model itself fails


BAD = (Outcome.WRONG, Outcome.OUTSIDE)


@dataclass(frozen=True)
class Verdict:
    """``where``: the cut and the request. ``kind``: what tells one failure from another (an error's class)."""

    outcome: Outcome
    where: str
    detail: str = ""
    kind: str = ""

    @property
    def bad(self) -> bool:
        """Silently wrong, or an error outside of the tree."""
        return self.outcome in BAD


@dataclass(frozen=True)
class Subject:
    """A model to judge: the text of a Python module, the name of the class in it, and how it is called."""

    text: str
    features: frozenset[str] = frozenset()
    name: str = "Model"
    inputs: str = "one"
    training: bool = False
    second: bool = False
    depth: int | None = None
    file: str = FILE

    @classmethod
    def of(cls, program: Program) -> Subject:
        """A generated one."""
        source = source_of(program)
        how = {"inputs": program.inputs, "training": program.training, "second": program.second, "depth": program.depth}
        return cls(source.text, source.features, **how)  # type: ignore[arg-type]


@dataclass
class Judgement:
    """All that was seen of one model."""

    subject: Subject
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def failure(self) -> Verdict | None:
        """The first silent wrong answer or error outside of the tree."""
        return next((verdict for verdict in self.verdicts if verdict.bad), None)

    @property
    def valid(self) -> bool:
        """Whether the reference model ran at all."""
        return bool(self.verdicts) and self.verdicts[0].outcome is not Outcome.FAILS

    def counts(self) -> Counter[Outcome]:
        """Cuts by outcome."""
        return Counter(verdict.outcome for verdict in self.verdicts)

    def reported(self) -> str:
        """What is printed and kept of a failure: a file that can be run up to the model."""
        failure = self.failure
        said = "" if failure is None else f"{failure.outcome.value} at {failure.where}\n{failure.detail}"
        notes = "".join(f"# {line}\n" for line in said.splitlines())
        called = (
            f"# inputs: {self.subject.inputs}; training mode: {self.subject.training}; depth: {self.subject.depth}\n"
        )
        return f"{notes}{called}# {', '.join(sorted(self.subject.features))}\n\n{self.subject.text}"


class _Refused(Exception):
    """This cut of this request is over; the verdict says how."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


class Judge:
    """Judges one model. ``cold``: each tail runs on a model of its own that never ran before."""

    def __init__(self, subject: Subject, cold: bool = False) -> None:
        self.subject = subject
        self.cold = cold
        self.code: types.CodeType = compile(subject.text, subject.file, "exec")
        self.changes = "later" in subject.text
        self.found = Judgement(subject)
        self.request = 0

    def moving(self) -> Judgement:
        """Each cut once, the cut moving from request to request, then some again; the whole model in the end."""
        return self._all(self._run)

    def staying(self, requests: int) -> Judgement:
        """So many requests in a row at each cut, on instances of their own."""
        return self._all(lambda: self._stay(requests))

    def _all(self, run: Callable[[], None]) -> Judgement:
        with world_kept(), alarm(SECONDS), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                self._meet()
                run()
            except _Refused as over:
                self.found.verdicts.append(over.verdict)
            except TooLong:
                self.found.verdicts.append(Verdict(Outcome.OUTSIDE, f"request {self.request}", "hangs", "TooLong"))
        return self.found

    # -- the three parties ----------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Three processes begin: edge and reference from equal generators, the cloud from its own."""
        self.changed = 0
        self.edge, self.reference, self.cloud = (self._party(seed) for seed in (1, 1, 2))
        with self._outside("making"):
            with self.edge:
                self.head_of = WrappedModel(self.edge.model, self.subject.depth, metrics=False)
            self._tail()

    def _tail(self) -> None:
        with self.cloud:
            self.tail_of = WrappedModel(self.cloud.model, self.subject.depth, metrics=False)

    def _party(self, seed: int) -> Party:
        subject = self.subject
        return Party(subject.text, self.code, name=subject.name, training=subject.training, seed=seed)

    def _expected(self, batch: int) -> Any:
        """The next request of the reference model. Ends the program if the model itself fails."""
        self.request += 1
        self.edge.reseed(self.request)
        self.reference.reseed(self.request)
        with self.reference as party:
            args, kwargs = self._inputs(party, batch)
            try:
                return party.model(*args, **kwargs)
            except Exception as error:
                raise _Refused(Verdict(Outcome.FAILS, f"request {self.request}", repr(error))) from None

    def _inputs(self, party: Party, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs(party, self.subject.inputs, self.request, batch)

    # -- requests -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        rebuilds = 0
        for cut, batch in self._schedule():
            try:
                self._cut(cut, batch)
            except _Refused as over:
                self.found.verdicts.append(over.verdict)
                rebuilds += 1
                if over.verdict.outcome in (*BAD, Outcome.FAILS) or rebuilds > MAX_REBUILDS:
                    return
                self._meet()
                self._plan()
        self._whole()

    def _stay(self, requests: int) -> None:
        cuts: list[int | str] = ["input", *self._plan()]
        self.found.verdicts += [Verdict(Outcome.REFUSED, layer.name, layer.reason) for layer in self.refused]
        for cut in cuts:
            self._meet()
            self._plan()
            try:
                for _ in range(requests):
                    self._cut(cut, 2)
            except _Refused as over:
                self.found.verdicts.append(over.verdict)
        self._meet()
        self._whole()

    def _plan(self) -> list[int | str]:
        """Ids of the layers, and names of the blocks, that may be cut after; the others are counted as refused."""
        try:
            with self._outside("planning"), self.edge as party:
                args, kwargs = self._inputs(party, 2)
                self.head_of.plan(*args, **kwargs)
                places = self.head_of.cuts
        except _Refused as over:
            if over.verdict.outcome is Outcome.OUTSIDE:
                self._expected(2)  # the model's own error, perhaps
            raise
        self.refused = [one for one in places if not one.can_split]
        return [one.name if one.is_block else one.layer_id for one in places if one.can_split]

    def _schedule(self) -> Iterator[tuple[int | str, int]]:
        """(cut, batch): each cut once, then some again, where the program says so on another signature."""
        cuts: list[int | str] = ["input", *self._plan()]
        self.found.verdicts += [Verdict(Outcome.REFUSED, layer.name, layer.reason) for layer in self.refused]
        if len(cuts) > MAX_CUTS:
            cuts = [cuts[round(i * (len(cuts) - 1) / (MAX_CUTS - 1))] for i in range(MAX_CUTS)]
        for cut in cuts:
            yield cut, 2
        for cut in cuts[len(cuts) // 2 :][:AGAIN]:
            yield cut, 3 if self.subject.second else 2

    def _cut(self, cut: int | str, batch: int) -> None:
        expected = self._expected(batch)
        where = f"cut {cut!r}, request {self.request}"
        with self._outside(f"{where}, head"), self.edge as party:
            args, kwargs = self._inputs(party, batch)
            head = getattr(self.head_of, "head", None)
            early = head(cut, *args, **kwargs) if head else self.head_of.forward(*args, end=cut, **kwargs)
            data = early.to_bytes()
        if self.cold:
            self.cloud = self._party(1000 + self.request)
            self._tail()
            if self.changes:
                self._change(self.cloud, self.changed)
        with self._outside(f"{where}, tail", Outcome.LATE), self.cloud:
            got = self.tail_of.forward(EarlyOutput.from_bytes(data, MAX_BYTES), start=cut)
        self._compare(got, expected, where)
        self.found.verdicts.append(Verdict(Outcome.EXACT, where))
        if self.changes:  # somebody changes the models between two requests, all alike
            self.changed += 1
            for party in (self.edge, self.reference, self.cloud):
                self._change(party, 1)

    @staticmethod
    def _change(party: Party, times: int) -> None:
        for module in party.model.modules():
            if hasattr(module, "later"):
                module.later += 0.5 * times

    def _whole(self) -> None:
        """After all requests: the edge's model whole, and what the tails left of the cloud's."""
        expected = self._expected(2)
        where = f"whole, request {self.request}"
        with self._outside(f"{where}, on the edge"), self.edge as party:
            args, kwargs = self._inputs(party, 2)
            got = self.head_of.forward(*args, **kwargs) if "end" not in kwargs else party.model(*args, **kwargs)
        self._compare(got, expected, f"{where}, on the edge")

    def _compare(self, got: Any, expected: Any, where: str) -> None:
        with self._outside(where):
            text = difference(got, expected)
        if text:
            raise _Refused(Verdict(Outcome.WRONG, where, text, "wrong"))

    @contextmanager
    def _outside(self, where: str, refused: Outcome = Outcome.REFUSED) -> Iterator[None]:
        try:
            yield
        except IsthmusError as error:
            raise _Refused(Verdict(refused, where, f"{type(error).__name__}: {error}", type(error).__name__)) from None
        except (KeyboardInterrupt, SystemExit, _Refused):
            raise
        except BaseException as error:  # HookExitException is no Exception
            last = "".join(traceback.format_exception(error, limit=-4))
            raise _Refused(Verdict(Outcome.OUTSIDE, where, last, type(error).__name__)) from None


def judge(program: Program, before: Callable[[str], None] = lambda text: None) -> Judgement:
    """Every verdict on one program; ``before`` is called with its source. Every second one has cold tails."""
    subject = Subject.of(program)
    before(subject.text)
    return Judge(subject, cold=zlib.crc32(subject.text.encode()) % 2 == 0).moving()
