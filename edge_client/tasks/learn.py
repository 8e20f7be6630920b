"""Train a codec for one cut on the user's own inputs, without labels."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from edge_client.calibrating.inputs import Data, inputs_of, share
from edge_client.calibrating.outputs import KINDS, MEANS
from edge_client.calibrating.study import Study
from edge_client.learning.examples import Examples, examples_of
from edge_client.learning.training import Trainer, TrainingTerms, ladder, parted
from edge_client.options import LearnOptions
from edge_client.planning.codecs import CodecLoss, LossTable, loss_of, write
from edge_client.screen import Row, Tabular, printable, size, table
from edge_client.screen import progress as bar
from edge_client.survey import Say
from edge_client.sweeping.settings import continued, installed
from edge_client.tasks.calibrate import percent
from edge_client.tasks.subject import Model, subject_of
from edge_client.user_input import LoadedModel, NamedInput
from edge_client.user_text import either, option
from edge_client.user_text import size as parse_size
from shared_hooks.codecs import Codec, Coded, Grain, temporary
from shared_hooks.codecs.basis import Basis
from shared_hooks.codecs.learned import PREFIX, Design, LearnedFile, read
from shared_hooks.errors import CutRefused, SpecError, near
from shared_hooks.files import JournalFile, make_folder
from shared_hooks.options import takes

TIMED: Final = 20
DEFAULT_LOSS: Final = 0.005
LEAST: Final = 40
LEAST_TO_CHOOSE: Final = 10
"""Minimum number of validation inputs."""
MOST_JUDGED: Final = 1000
MOST_EPOCHS: Final = 240
STEPS: Final = 3000
"""Approximate number of training batches of one encoder."""
FILE: Final = "codec.safetensors"
TABLE: Final = "calibration.json"
JOURNAL: Final = "journal.jsonl"
FORMAT: Final = "isthmus learning 1"
OTHERS: Final = ("raw", "int8", "int4", "int2", "int1", "basis")
"""Codecs to compare with."""


@dataclass(frozen=True)
class Rung:
    """One trained encoder. ``nbytes``: size of its encodings without a header; ``loss``: on the validation inputs."""

    number: int
    file: str
    codec: str
    nbytes: float
    loss: float
    epochs: int
    seconds: float


@dataclass(frozen=True, repr=False)
class Learned(Tabular):
    """Result of `edge_client.learn`. A row is a codec at the cut.

    ``file``: the codec, as ``codec="learned:FILE"`` takes it; ``codec``: its name on the wire. ``table``: what all
    codecs lose on ``table.inputs`` test inputs, used neither for training nor validation. ``payloads``: by codec, bytes
    without the header. ``rungs``: all trained encoders. ``encode_ms``, ``decode_ms``: medians for one input, here.
    """

    file: Path
    codec: str
    cut: str
    table: LossTable
    payloads: dict[str, float]
    rungs: tuple[Rung, ...]
    max_loss: float
    rate: int | None
    encode_ms: float
    decode_ms: float
    seconds: float
    learnt_from: int
    met: bool
    """Whether it met the goal on the validation inputs."""
    warnings: tuple[str, ...] = ()

    shown = {  # noqa: RUF012
        "codec": "codec",
        "payload": "payload",
        "bytes_up": "bytes up",
        "loss": "loss",
        "loss_high": "at most",
        "accuracy": "accuracy",
    }

    @property
    def losses(self) -> Sequence[CodecLoss]:
        """The codecs of the table, most bytes first."""
        return sorted(self.table.cuts[0].codecs, key=lambda one: -one.bytes_up)

    @property
    def chosen(self) -> CodecLoss:
        return next(one for one in self.losses if one.codec == self.codec)

    def title(self) -> str:
        one = self.chosen
        return (
            f"{self.table.model.model_id} after {printable(self.cut)}: {size(round(self.payloads[self.codec]))} and a "
            f"header, {percent(one.loss)} loss on {self.table.inputs} inputs it has not seen"
        )

    def rows(self) -> list[Row]:
        return [
            {
                "codec": one.codec,
                "payload": self.payloads.get(one.codec),
                "bytes_up": one.bytes_up,
                "loss": one.loss,
                "loss_low": one.low,
                "loss_high": one.high,
                "accuracy": one.accuracy,
                "chosen": one.codec == self.codec,
            }
            for one in self.losses
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "file": str(self.file),
            "codec": self.codec,
            "cut": self.cut,
            "max_loss": self.max_loss,
            "rate": self.rate,
            "encode_ms": self.encode_ms,
            "decode_ms": self.decode_ms,
            "seconds": self.seconds,
            "learnt_from": self.learnt_from,
            "rows": self.rows(),
            "warnings": list(self.warnings),
        }

    def text(self) -> str:
        """Format a line per codec, with the chosen one marked."""
        raw = next(one for one in self.losses if one.codec == "raw")
        lines = []
        for one in self.losses:
            payload = self.payloads.get(one.codec)
            lines.append(
                [
                    f"{one.codec}{' *' if one.codec == self.codec else ''}",
                    "-" if payload is None else size(round(payload)),
                    size(round(one.bytes_up)),
                    f"{raw.bytes_up / one.bytes_up:.1f}x",
                    percent(one.loss),
                    percent(one.high),
                    percent(one.accuracy),
                ]
            )
        headers = ["codec", "payload", "bytes up", "smaller", "loss", "at most", "accuracy"]
        server = f"cloud-server --codec {PREFIX}{self.file}"
        used = either(f"--codec {PREFIX}{self.file}", f'EdgeClient(..., codec="{PREFIX}{self.file}")')
        return "\n".join(
            [
                table(headers, lines, right=(1, 2, 3, 4, 5, 6)),
                "",
                f"loss: {MEANS.get(self.table.kind, self.table.kind)}, on {self.table.inputs} inputs that had no part "
                f"in training or choosing; trained on {self.learnt_from} in {self.seconds:.0f} s",
                f"* chosen; to encode takes {self.encode_ms:.2f} ms here, to decode {self.decode_ms:.2f} ms",
                f"use it after {printable(self.cut)} with {used}, and on the server {server}",
            ]
        )


@takes(LearnOptions)
def learn(model: Model, inputs: Data, split: str, *, options: LearnOptions) -> Learned:
    """Train an encoder and a decoder for what crosses after ``split`` (docs/learned-codecs.md), in this process.

        found = edge_client.learn("digits", "unlabelled/", "stage1", max_loss="0.5%", output="learnt")
        client = edge_client.EdgeClient(server, "digits", split="stage1", codec=f"learned:{found.file}")

    ``inputs``: as for `calibrate`; 13 of 20 are for training, 3 for validation, 4 for testing (at most 1,000); with
    ``choose_by`` those are for validation, and 16 for training: better if inputs resemble each other, as frames of a
    video do. ``rate``: the maximum mean size of a payload in bytes; without it, the fewest bytes with a loss of at most
    ``max_loss`` (0.5 %) are searched for. ``labels``: a CSV file, only for the accuracy in the table. ``kind`` of the
    output: as for `calibrate`. ``epochs``: for each encoder; None: by the number of inputs. ``seconds``: training stops
    after as many and uses what there is. ``output``: a folder for ``codec.safetensors``, the table
    (``calibration.json``) and a journal: the same call resumes an interrupted run, ``fresh`` starts over.

    The model's weights do not change. Raises SpecError (an invalid option, too few inputs, the folder of another
    study), UnknownLayer, CutRefused (no floats cross there, or more than tensors), InputMismatch.
    """
    goal = _Goal(
        None if options.rate is None else int(parse_size(option("rate", options.rate), str(options.rate))),
        loss_of(DEFAULT_LOSS if options.max_loss is None else options.max_loss),
    )
    if options.rate is not None and options.max_loss is not None:
        raise SpecError(f"{option('rate')} and {option('max_loss')}: the one or the other is looked for")
    if options.kind is not None and options.kind not in KINDS:
        raise SpecError(
            f"{option('kind', options.kind)}: must be one of {', '.join(KINDS)}.{near(options.kind, KINDS)}"
        )
    if options.epochs is not None and (type(options.epochs) is not int or options.epochs < 1):
        raise SpecError(f"{option('epochs', options.epochs)}: expected a whole number of at least 1")
    items, others = inputs_of(inputs, options.labels), [] if options.choose_by is None else inputs_of(options.choose_by)
    if options.choose_by is not None and len(others) < LEAST_TO_CHOOSE:
        raise SpecError(f"{option('choose_by')}: {len(others)} inputs are too few: {LEAST_TO_CHOOSE} at least")
    if len(items) < LEAST:
        raise SpecError(f"{len(items)} inputs are too few to train, choose and judge by: {LEAST} at least")
    folder = make_folder(options.output, option("output"))
    subject = subject_of(model, items[:1])
    loaded = subject.load(on_inputs=subject.by_name is False)
    with loaded.wrapped, ExitStack() as stack:
        items, chosen_by = [*items, *others], len(items)
        with bar("heads", len(items), options.progress) as advance:
            examples = examples_of(loaded, split, items, lambda: advance(""))
        if len(examples) < LEAST:
            raise SpecError(f"only {len(examples)} of {len(items)} inputs cross after {split} in one form")
        chooses = [place for place, at in enumerate(examples.used) if at >= chosen_by]
        if others and len(chooses) < LEAST_TO_CHOOSE:
            raise SpecError(
                f"{option('choose_by')}: of its inputs {len(chooses)} cross after {split} in the others' form and fit "
                f"in memory beside them; {LEAST_TO_CHOOSE} are needed at least"
            )
        learning = _Learning(
            loaded, examples, items, chooses, goal, options.kind, options.epochs, options.seconds, options.seed
        )
        file, lines = continued(folder / JOURNAL, "learning", FORMAT, learning.settings(), options.fresh)
        stack.enter_context(file)
        if lines:
            options.say(f"{folder}: continuing after {len(lines)} encoders")
        known = [Rung(**line["rung"]) for line in lines]
        known = [one for one in known if (folder / one.file).is_file()]
        return learning.run(folder, file, known, options.progress, options.say)


@dataclass(frozen=True)
class _Goal:
    rate: int | None
    max_loss: float

    def is_met(self, rung: Rung) -> bool:
        return rung.nbytes <= self.rate if self.rate is not None else rung.loss <= self.max_loss

    @property
    def wants_most(self) -> bool:
        """Whether the largest encoder that meets the goal is searched for, which is so with a rate."""
        return self.rate is not None


class _Learning:
    """The training at one cut, with its inputs and goal."""

    def __init__(
        self,
        loaded: LoadedModel,
        examples: Examples,
        given: Sequence[NamedInput],
        chooses: Sequence[int],
        goal: _Goal,
        kind: str | None,
        epochs: int | None,
        seconds: float | None,
        seed: int,
    ) -> None:
        self._loaded, self._examples, self._goal, self._kind = loaded, examples, goal, kind
        self._given, self._items = given, [given[at] for at in examples.used]
        self._seed, self._seconds = seed, seconds
        self._learn, self._choose, judge = parted(len(examples) - len(chooses), seed)
        if chooses:
            self._learn, self._choose = torch.cat([self._learn, self._choose]), torch.tensor(chooses)
        self._judge = judge[:MOST_JUDGED]
        batches = -(-len(self._learn) // examples.batch)
        self._epochs = epochs or min(MOST_EPOCHS, max(8, STEPS // batches))
        self._ladder = ladder(examples)
        if not self._ladder:
            raise CutRefused(f"after {examples.cut} nothing crosses that an encoder could make smaller")

    def settings(self) -> dict[str, Any]:
        """Return all that the results depend on. A run is resumed only if all of it is the same."""
        wrapped = self._loaded.wrapped
        together = xxhash.xxh3_64()
        for item in self._items:
            together.update(f"{item.name} {item.digest()} {item.truth}\n".encode())
        return {
            "model": self._loaded.spec.model_id,
            "weights": wrapped.weights_hash(),
            "code": wrapped.environment().get("model_code"),
            "cut": self._examples.cut,
            "inputs": [len(self._items), len(self._learn), together.hexdigest()],
            "rate": self._goal.rate,
            "loss allowed": self._goal.max_loss,
            "kind": self._kind,
            "epochs": self._epochs,
            "seed": self._seed,
            "torch": str(torch.__version__),
            "isthmus": installed("isthmus"),
        }

    def run(self, folder: Path, journal: JournalFile, known: Sequence[Rung], progress: bool, say: Say) -> Learned:
        """Run the training. ``known``: encoders trained by an earlier run."""
        began = time.monotonic()
        self._folder, self._journal, self._progress, self._say = folder, journal, progress, say
        self._until = began + (self._seconds if self._seconds is not None else math.inf)
        rungs = self._search(known)
        meeting = [one for one in rungs if self._goal.is_met(one)]
        warnings = []
        if meeting:
            pick = max if self._goal.wants_most else min
            chosen = pick(meeting, key=lambda one: one.nbytes)
            if not self._goal.wants_most and not self._shows(self._goal.max_loss):
                chosen = self._next(rungs, chosen)
                warnings.append(
                    f"{len(self._choose)} inputs to choose by cannot show a loss of {percent(self._goal.max_loss)}: "
                    "the encoder of twice the symbols was taken, where it loses no more"
                )
        else:
            chosen = min(rungs, key=lambda one: one.loss if self._goal.rate is None else one.nbytes)
            wanted = percent(self._goal.max_loss) if self._goal.rate is None else f"{self._goal.rate} bytes"
            warnings.append(f"no encoder that was trained came within {wanted}: this is the nearest one")
        if left := len(self._given) - len(self._examples):
            warnings.append(f"{left} inputs were left out: they cross in another form, or take too much memory")
        took = sum(one.seconds for one in known) + time.monotonic() - began
        return self._judged(chosen, rungs, took, warnings)

    def _search(self, known: Sequence[Rung]) -> list[Rung]:
        """Find a rung that meets the goal next to one that does not: from a guess in doubling steps, then by
        bisection.
        """
        rungs = {one.number: one for one in known}
        low, high, step = -1, len(self._ladder), 1
        at = min(high - 1, self._first())
        while low + 1 < high:
            if at not in rungs:
                if rungs and time.monotonic() > self._until:
                    break
                rungs[at] = self._train(at)
            if self._goal.is_met(rungs[at]) != self._goal.wants_most:
                high = at
            else:
                low = at
            if low >= 0 and high < len(self._ladder):
                at = (low + high) // 2
            else:
                at, step = (low + step if low >= 0 else high - step), 2 * step
            at = min(max(at, low + 1), high - 1)
        return [rungs[number] for number in sorted(rungs)]

    def _shows(self, max_loss: float) -> bool:
        """Return whether there are enough validation inputs to show so small a loss."""
        return self._kind_of() != "classes" or share(0, len(self._choose))[1] <= max_loss

    def _next(self, rungs: list[Rung], chosen: Rung) -> Rung:
        """Return the next larger encoder, trained if needed; the same one if no larger one loses as little."""
        number = min(chosen.number + 1, len(self._ladder) - 1)
        found = next((one for one in rungs if one.number == number), None)
        if found is None and time.monotonic() <= self._until:
            found = self._train(number)
            rungs.append(found)
        return found if found is not None and self._goal.is_met(found) else chosen

    def _train(self, number: int) -> Rung:
        one = self._trained(number)
        self._journal.write({"rung": asdict(one)})
        self._say(f"{one.nbytes:.1f} bytes: {percent(one.loss)} loss, after {one.epochs} epochs, {one.seconds:.0f} s")
        return one

    def _first(self) -> int:
        if self._goal.rate is None:
            return min(3, len(self._ladder) // 2)
        nominal = [sum(_bits(one, grain) for one, grain in self._pairs(rung)) / 8 for rung in self._ladder]
        return max([number for number, nbytes in enumerate(nominal) if nbytes <= self._goal.rate], default=0)

    def _pairs(self, rung: Sequence[Design | None]) -> list[tuple[Design, Any]]:
        return [(one, grain) for one, grain in zip(rung, self._examples.grains, strict=True) if one is not None]

    def _trained(self, number: int) -> Rung:
        examples, began = self._examples, time.monotonic()
        terms = TrainingTerms(self._epochs, seed=self._seed, classes=self._kind_of() == "classes")
        trainer = Trainer(examples, self._ladder[number], terms)
        with bar(f"encoder {number + 1} of {len(self._ladder)}", self._epochs, self._progress) as advance:
            found = trainer.run(
                self._learn, self._choose, lambda epoch, loss: advance(f"distance {loss:.4f}", done=epoch), self._until
            )
        took = time.monotonic() - began
        file = self._folder / f"rung-{number}.safetensors"
        provenance = self._provenance() | {"epochs": found.epochs, "seconds": round(took, 1)}
        spec, weights = self._loaded.spec, self._loaded.wrapped.weights_hash()
        LearnedFile(spec.model_id, weights, examples.cut, found.pieces, provenance).write(file)
        own = read(file)
        with temporary(own):
            measured = self._measured(self._choose, [own.name]).cuts[0].codecs
        loss = next(one.loss for one in measured if one.codec == own.name)
        sizes = [sum(len(coded.data) for coded, _ in _coded(examples, own, int(at))) for at in self._choose]
        return Rung(number, file.name, own.name, statistics.fmean(sizes), loss, found.epochs, took)

    def _provenance(self) -> dict[str, Any]:
        return {
            "made by": f"edge-client learn, isthmus {installed('isthmus')}",
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "torch": str(torch.__version__),
            "inputs": len(self._learn),
            "inputs digest": self.settings()["inputs"][2],
            "seed": self._seed,
            "goal": {"rate": self._goal.rate, "max_loss": self._goal.max_loss},
        }

    def _measured(self, numbers: torch.Tensor, codecs: Sequence[str], learnt: Sequence[NamedInput] = ()) -> LossTable:
        items = [self._items[int(at)] for at in numbers]
        study = Study(
            self._loaded,
            [self._examples.cut],
            list(dict.fromkeys(codecs)),
            self._goal.max_loss,
            self._kind,
            learnt=learnt,
            every_cut=True,
            every_codec=True,
        )
        return study.run(items)

    def _kind_of(self) -> str:
        if self._kind is None:
            self._kind = self._measured(self._choose[:1], ["raw"]).kind
        return self._kind

    def _judged(self, chosen: Rung, rungs: Sequence[Rung], seconds: float, warnings: list[str]) -> Learned:
        """Evaluate all rungs and the untrained codecs on the test inputs."""
        with ExitStack() as stack:
            files = {one.codec: read(self._folder / one.file) for one in rungs}
            for own in files.values():
                stack.enter_context(temporary(own))
            learnt = [self._items[int(at)] for at in self._learn[:200]]
            with bar("judging", 1, self._progress):
                table = self._measured(self._judge, [*OTHERS, *files], learnt)
            payloads = self._payloads(table)
            encode_ms, decode_ms = self._timed(files[chosen.codec])
        known = files[chosen.codec].file
        loss = next(one for one in table.cuts[0].codecs if one.codec == chosen.codec)
        judged = {"inputs": loss.n, "loss": loss.loss, "loss at most": loss.high, "payload": payloads[chosen.codec]}
        final = self._folder / FILE
        replace(known, provenance={**known.provenance, "judged": judged}).write(final)
        write(table, self._folder / TABLE)
        return Learned(
            file=final,
            codec=chosen.codec,
            cut=self._examples.cut,
            table=table,
            payloads=payloads,
            rungs=tuple(rungs),
            max_loss=self._goal.max_loss,
            rate=self._goal.rate,
            encode_ms=encode_ms,
            decode_ms=decode_ms,
            seconds=seconds,
            learnt_from=len(self._learn),
            met=self._goal.is_met(chosen),
            warnings=tuple(warnings),
        )

    def _payloads(self, table: LossTable) -> dict[str, float]:
        """Return the mean size of each codec's encodings without the header, which is about equally long for every
        input.
        """
        found, books = {}, table.books.get(self._examples.cut)
        for one in table.cuts[0].codecs:
            crossing = self._examples.crossing
            if one.codec == Basis.name and books is not None:
                crossing = crossing.with_books(books)
            early = replace(self._examples.first, crossing=crossing)
            found[one.codec] = one.bytes_up - len(early.pack(one.codec).header)
        return found

    def _timed(self, codec: Codec) -> tuple[float, float]:
        """Return median times to encode and decode a few inputs, in milliseconds."""
        examples, encoding, decoding = self._examples, [], []
        for at in self._judge[:TIMED]:
            started = time.perf_counter()
            coded = _coded(examples, codec, int(at))
            encoding.append(time.perf_counter() - started)
            started = time.perf_counter()
            for (data, params), piece in coded:
                codec.decode(data, params, piece.dtype, len(piece))
            decoding.append(time.perf_counter() - started)
        return 1e3 * statistics.median(encoding), 1e3 * statistics.median(decoding)


def _coded(examples: Examples, codec: Codec, at: int) -> list[tuple[Coded, torch.Tensor]]:
    """Encode the pieces of one input."""
    found = []
    for number, (pieces, grain) in enumerate(zip(examples.pieces, examples.grains, strict=True)):
        coded = codec.at(examples.cut, number).encode(pieces[at], grain)
        if coded is not None:
            found.append((coded, pieces[at]))
    return found


def _bits(design: Design, grain: Grain) -> float:
    """Return the bits of one input's symbols without an entropy coder."""
    size = (1, grain.inner) if design.kind == "tokens" else (grain.inner // grain.width, grain.width)
    shape = design.symbol_shape(grain.outer, *size)
    return math.prod(shape) * math.log2(design.levels)
