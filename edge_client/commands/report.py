"""Report `edge-client run`: predictions, accuracy, times, layers; as text and as JSON."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, Final

from edge_client.answer import Answer
from edge_client.commands.feed import Named, RunRate
from edge_client.screen import milliseconds, one_line, printable, size, tables
from edge_client.screen import table as table
from edge_client.sources import SourceTally
from edge_client.transport import PartReport, Times
from edge_client.user_text import CLOUD_FILE, EDGE_ONLY
from shared_hooks import ForwardMetrics, LayerMetrics
from shared_hooks.errors import SpecError
from shared_hooks.metrics import Reading
from shared_hooks.models import FrameId, Prediction

# The outcome of one input of a run.


@dataclass(frozen=True, slots=True)
class InputOutcome:
    """The outcome of one input file or frame: an answer with predictions, or an error."""

    item: Named
    predictions: Sequence[Prediction] = ()  # best first, row by row
    answer: Answer | None = None
    times: Times = field(default_factory=Times)  # of the answer, postprocessing included
    measured_ns: int = 0  # the same by two readings of the clock
    error: Exception | None = None

    @property
    def best(self) -> list[Prediction]:
        """The best prediction of each row."""
        best: dict[int, Prediction] = {}
        for prediction in self.predictions:
            best.setdefault(prediction.row, prediction)
        return list(best.values())

    @property
    def correct(self) -> bool | None:
        """Whether the prediction is correct; None without a single label to compare with."""
        best = self.best
        return best[0].label == self.item.truth if self.item.truth is not None and len(best) == 1 else None

    @property
    def cut(self) -> str:
        """The cut actually used, in words."""
        assert self.answer is not None
        layer_id, name = self.answer.layer_id, self.answer.split
        if name in (EDGE_ONLY, CLOUD_FILE):
            return "nowhere: everything on the edge" if name == EDGE_ONLY else "nowhere: the file itself was sent"
        assert layer_id is not None
        return "before the first layer" if layer_id < 0 else f"after layer {layer_id} ({name})"

    @property
    def codec(self) -> str:
        """The codec of its tensors; empty if none were sent."""
        assert self.answer is not None
        return "+".join(dict.fromkeys(self.answer.codecs))

    def line(self, width: int) -> str:
        """Format one line per row: file, label, score, and whether it is correct."""
        name = printable(self.item.name).ljust(width)
        if not self.predictions:
            return f"{name}  answered"
        verdict = {None: "", True: f"  truth {self.item.truth}  ok", False: f"  truth {self.item.truth}  WRONG"}
        known = printable(verdict[self.correct])
        return "\n".join(
            f"{name}{f' [{one.row}]' if len(self.best) > 1 else ''}  {printable(one.label)}  {one.score:.4f}{known}"
            for one in self.best
        )

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data; times in nanoseconds."""
        known: dict[str, Any] = {
            "file": self.item.origin,
            **({"seconds": self.item.seconds} if isinstance(self.item, FrameId) else {}),
            "ok": self.error is None,
            "truth": self.item.truth,
            "correct": self.correct,
        }
        if self.error is not None:
            return {**known, "error": type(self.error).__name__, "message": str(self.error)}
        assert self.answer is not None
        return {
            **known,
            "predictions": [
                {"row": one.row, "label": one.label, "index": one.index, "score": one.score} for one in self.predictions
            ],
            "layer_id": self.answer.layer_id,
            "layer_name": self.answer.split,
            **({"parts": [_part(one) for one in self.answer.parts]} if self.answer.parts else {}),
            "request_id": self.answer.request_id,
            "sends": self.answer.sends,
            "bytes_up": self.answer.bytes_up,
            "bytes_down": self.answer.bytes_down,
            "measured_ns": self.measured_ns,
            "times_ns": self.times.as_dict(),
            "layers_edge": [layer.as_dict() for layer in self.answer.layers_edge],
            "layers_cloud": [layer.as_dict() for layer in self.answer.layers_cloud],
            "forward_edge": self.answer.forward_edge.as_dict() if self.answer.forward_edge else None,
            "forward_cloud": self.answer.forward_cloud.as_dict() if self.answer.forward_cloud else None,
            "observations": dict(self.answer.observations),
            "transforms": list(self.answer.transforms),
            "codecs": list(self.answer.codecs),
            "witness": self.answer.witness.as_dict() if self.answer.witness else None,
            "fallback": self.answer.fallback or None,
            "batch_size": self.answer.batch_size,
        }


def _part(part: PartReport) -> dict[str, Any]:
    """Return JSON data of the part of a further server of a chain."""
    known = {one.name: getattr(part.times, one.name) for one in fields(part.times)}
    reported = {"server": part.server, "split": part.split, "bytes_up": part.bytes_up, "sends": part.sends}
    return {**reported, "times_ns": known, "forward": part.forward.as_dict() if part.forward else None}


# One side's layers as a table: mean over the inputs, the time outside the layers, and the whole.


def folded(records: Sequence[LayerMetrics], depth: int | None) -> list[LayerMetrics]:
    """Merge layers more than ``depth`` levels deep: consecutive ones of one module at that depth become one, with the
    sum of times and energies and the output of the last.
    """
    if depth is None:
        return list(records)
    found: list[LayerMetrics] = []
    for path, group in groupby(records, key=lambda one: ".".join(one.name.split(".")[:depth])):
        every = list(group)
        last = every[-1]
        if path == last.name:
            found += every
            continue
        joules = [one.energy.value for one in every]
        known = None not in joules and {one.energy.status for one in every} <= {"measured", "estimated"}
        energy = replace(last.energy, value=sum(one or 0.0 for one in joules)) if known else last.energy
        spent = [one.cpu_ns for one in every]
        found.append(
            replace(
                last,
                name=path,
                layer_type=f"{len(every)} layers",
                inference_ns=sum(one.inference_ns for one in every),
                cpu_ns=None if None in spent else sum(one or 0 for one in spent),
                energy=energy,
            )
        )
    return found


def layer_table(records: Iterable[Sequence[LayerMetrics]], forwards: Iterable[ForwardMetrics | None] = ()) -> str:
    """Format a row per layer call, and at the end sums: the layers, "outside layers" (Python and functions between
    them, and the cost of a cut), and the forward as a whole. Energy, if any, in millijoules; ~ marks an estimate.
    """
    by_layer: dict[tuple[int, str], list[LayerMetrics]] = {}
    latest: Sequence[LayerMetrics] = ()
    for latest in records:
        for layer in latest:
            by_layer.setdefault((layer.layer_id, layer.name), []).append(layer)
    whole = [forward for forward in forwards if forward is not None]
    if not by_layer and not whole:
        return "(none)"
    energies = [layer.energy for seen in by_layer.values() for layer in seen] + [forward.energy for forward in whole]
    with_energy = any(energy.value is not None for energy in energies)
    rows = [
        [
            str(layer_id),
            printable(name),
            printable(seen[0].layer_type),
            _mean_ms([layer.inference_ns for layer in seen]),
            _mean_ms([layer.cpu_ns for layer in seen]),
            *([_millijoules([layer.energy for layer in seen])] if with_energy else []),
            size(seen[0].output_bytes),
        ]
        for (layer_id, name), seen in sorted(by_layer.items())
    ]
    if whole:
        none = [""] if with_energy else []
        rows.append(["", "outside layers", "", _mean_ms([one.outside_ns for one in whole]), "", *none, ""])
        rows.append(
            [
                "",
                "whole forward",
                "",
                _mean_ms([one.total_ns for one in whole]),
                _mean_ms([one.cpu_ns for one in whole]),
                *([_millijoules([one.energy for one in whole])] if with_energy else []),
                "",
            ]
        )
    headers = ["id", "name", "type", "mean ms", "cpu ms", *(["mJ"] if with_energy else []), "output"]
    # of the last input: the sensors may not have been found when the first one ran
    readings = [layer.energy for layer in latest] + [forward.energy for forward in whole[-1:]]
    notes = dict.fromkeys(f"energy: {printable(energy.note)}" for energy in readings if energy.note)
    return "\n".join([table(headers, rows, right=(0, *range(3, len(headers)))), *notes])


def _mean_ms(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return milliseconds(sum(known) / len(known)) if known else "-"


def _millijoules(energies: Sequence[Reading]) -> str:
    known = [energy.value for energy in energies if energy.value is not None]
    if not known:
        return "-"
    mark = "" if all(energy.status == "measured" for energy in energies) else "~"
    return f"{mark}{1e3 * sum(known) / len(known):.3f}"


KEPT: Final = 1000
"""Number of frames' outcomes kept, the last ones: a camera never ends."""


@dataclass
class Totals:
    """Sums over all outcomes, including those no longer kept."""

    count: int = 0
    failed: int = 0
    with_truth: int = 0
    correct: int = 0
    fallen: int = 0
    """Answered on the edge because the server failed."""
    why_fallen: str = ""
    in_batches: int = 0
    """Time of the last answer."""
    bytes_up: int = 0
    bytes_down: int = 0
    measured_ns: int = 0
    times: Times = field(default_factory=Times)
    paced: int = 0
    """Answers without the first, which is reported separately (`RunRate`)."""
    paced_ns: int = 0
    paced_times: Times = field(default_factory=Times)
    cuts: dict[str, int] = field(default_factory=dict)
    """Cuts in words, with counts."""
    codecs: dict[str, int] = field(default_factory=dict)
    """Codecs of frontiers, with counts."""
    layers: dict[tuple[int | None, str], None] = field(default_factory=dict)
    """The same by id and name."""
    transforms: dict[str, None] = field(default_factory=dict)

    @property
    def answered(self) -> int:
        """Number of outcomes with an answer."""
        return self.count - self.failed

    def add(self, outcome: InputOutcome, pace: RunRate) -> None:
        """Add an outcome."""
        self.count += 1
        answer = outcome.answer
        if answer is None:
            self.failed += 1
            return
        if outcome.correct is not None:
            self.with_truth += 1
            self.correct += outcome.correct
        self.fallen += bool(answer.fallback)
        self.why_fallen = answer.fallback or self.why_fallen
        self.in_batches += answer.batch_size > 1
        self.bytes_up += answer.bytes_up
        self.bytes_down += answer.bytes_down
        self.measured_ns += outcome.measured_ns
        self.times = Times.total((self.times, outcome.times))
        if pace.add(outcome.measured_ns):
            self.paced += 1
            self.paced_ns += outcome.measured_ns
            self.paced_times = Times.total((self.paced_times, outcome.times))
        self.cuts[outcome.cut] = self.cuts.get(outcome.cut, 0) + 1
        if outcome.codec:
            self.codecs[outcome.codec] = self.codecs.get(outcome.codec, 0) + 1
        self.layers[answer.layer_id, answer.split] = None
        self.transforms.update(dict.fromkeys(answer.transforms))


class RunReport:
    """Collects outcomes until `finish`. Of frames, counted by ``tally``, it keeps the last `KEPT`."""

    def __init__(
        self,
        model: str,
        server: str | None,
        split: str,
        codec: str,
        device: str,
        witness: float = 0.0,
        tally: SourceTally | None = None,
        pace: RunRate | None = None,
    ) -> None:
        self._about = {"model": model, "server": server, "split": split, "codec": codec, "device": device}
        self._tally = tally
        self._outcomes: deque[InputOutcome] = deque(maxlen=None if tally is None else KEPT)
        self._differing: list[InputOutcome] = []  # no longer kept, and different from the whole model's
        self._totals = Totals()
        self._pace = pace or RunRate()
        self._began = time.perf_counter()
        self._seconds = 0.0
        self._witness = witness
        self.refused: Mapping[str, str] = {}  # cuts that witnesses disabled, and why
        self.unlike: Sequence[str] = ()
        """Why the last bits may differ between the two machines."""
        self.gave_up = False
        self.interrupted = False
        """Ended by Ctrl-C: the missing inputs were not sent, or their answers did not arrive in time."""
        self._before: list[dict[str, Any]] = []  # outcomes of an earlier run, from its journal

    def resume(self, outcomes: list[dict[str, Any]]) -> None:
        """Add outcomes of an earlier run, as `InputOutcome.as_dict` returned them. Times cover only this run."""
        self._before = outcomes

    def start(self) -> None:
        """Restart the clock after preparations."""
        self._began = time.perf_counter()
        self._pace.start()

    def add(self, outcome: InputOutcome) -> None:
        """Add the next input's outcome, in the order of the inputs."""
        if len(self._outcomes) == self._outcomes.maxlen and (old := self._outcomes[0]).answer is not None:
            self._differing += [old] * _differing([old.answer])
        self._outcomes.append(outcome)
        self._totals.add(outcome, self._pace)

    def line(self, outcome: InputOutcome, width: int) -> str:
        """Format an added outcome, with its cut if it differs from the first input's, and a witness's result."""
        note = "" if outcome.cut == next(iter(self._totals.cuts)) else f"  cut {outcome.cut}"
        if outcome.answer is not None and _differing([outcome.answer]):
            note += "  WITNESS DIFFERS"
        return "\n".join(line + note for line in outcome.line(width).split("\n"))

    def give_up(self, items: Sequence[Named], error: Exception) -> None:
        """Record a connection failure, and all ``items`` without an outcome."""
        self.gave_up = True
        for item in items:
            self.add(InputOutcome(item, error=error))

    def finish(self, refused: Mapping[str, str] | None = None, unlike: Sequence[str] = ()) -> None:
        """Stop the clock. ``refused``: cuts disabled by witnesses, and why; ``unlike``: see there."""
        self.refused, self.unlike = refused or {}, unlike
        self._seconds = time.perf_counter() - self._began

    @property
    def answered(self) -> int:
        """Number of inputs with an answer."""
        return self._totals.answered

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data; times in nanoseconds."""
        totals, with_truth, correct = self._totals, *self._judged
        ids, names = ({layer[place] for layer in totals.layers} for place in (0, 1))
        left_out = totals.count - len(self._outcomes)
        return {
            **self._about,
            # of all inputs; null where inputs differ
            "layer_id": ids.pop() if len(ids) == 1 else None,
            "layer_name": names.pop() if len(names) == 1 else None,
            "inputs": [*self._before, *(outcome.as_dict() for outcome in self._outcomes)],
            **({} if self._tally is None else {"inputs_left_out": left_out, "source": self._tally.as_dict()}),
            "answered": totals.answered + self._answered_before,
            "answered_before": self._answered_before,
            "failed": totals.failed + len(self._before) - self._answered_before,
            "interrupted": self.interrupted,
            "with_truth": with_truth,
            "correct": correct,
            "accuracy": correct / with_truth if with_truth else None,
            "unlike": list(self.unlike),
            "wall_seconds": self._seconds,
            "measured_ns": totals.measured_ns,
            "times_ns": totals.times.as_dict(),
            "pace": self._pace.as_dict(),
            "codecs": dict(totals.codecs),
            "witness": _witness_as_dict(self._witnessed, self._witness, self.refused) if self._witness else None,
        }

    def as_text(self, layers: bool, depth: int | None = None) -> str:
        """Format summary, times and, with ``layers``, a table of layers down to ``depth`` levels of modules (None:
        all).
        """
        parts = [self._summary()]
        answers = self._answers
        if answers:
            parts.append(self._times_table())
            if beside := _beside(self._witnessed):
                parts[-1] += f"\n{beside}"
        if layers and answers:
            last = "" if len(answers) == self.answered else "the last "
            parts += [
                f"layers on the {side}, mean over {last}{len(answers)} inputs\n{layer_table(records, forwards)}"
                for side, records, forwards in (
                    ("edge", [folded(one.layers_edge, depth) for one in answers], [a.forward_edge for a in answers]),
                    ("cloud", [folded(one.layers_cloud, depth) for one in answers], [a.forward_cloud for a in answers]),
                )
            ]
        if answers:
            for found in tables(answers[-1].observations):
                shown = [table(found.headers, found.rows)] if found.rows else []
                parts.append("\n".join([f"{found.title}, of the last input", *shown, *found.notes]))
        return "\n" + "\n\n".join(parts)

    @property
    def some_failed(self) -> bool:
        """Whether an input has no answer, in this run or an earlier one."""
        return bool(self._totals.failed) or self._answered_before < len(self._before)

    @property
    def _answered_before(self) -> int:
        return sum(outcome["ok"] for outcome in self._before)

    @property
    def _answers(self) -> list[Answer]:
        return [one.answer for one in self._outcomes if one.answer]

    @property
    def _witnessed(self) -> list[Answer]:
        return [one.answer for one in self._differing if one.answer] + self._answers

    @property
    def _judged(self) -> tuple[int, int]:
        """Return the number of labelled inputs, and how many of them were correct."""
        before = [one["correct"] for one in self._before if one["correct"] is not None]
        return self._totals.with_truth + len(before), self._totals.correct + sum(before)

    def _summary(self) -> str:
        totals, with_truth, correct = self._totals, *self._judged
        lines = [
            f"{totals.answered} of {totals.count} inputs answered in {self._seconds:.2f} s"
            f"{f', {totals.failed} failed' if totals.failed else ''}{', then interrupted' if self.interrupted else ''}"
        ]
        lines += self._pace.lines()
        if self._tally is not None:
            lines.append(printable(self._tally.summary()))
        if self._before:
            lines.append(f"{self._answered_before} of {len(self._before)} more by an earlier run (from its journal)")
        if with_truth:
            lines.append(f"accuracy {correct / with_truth:.4f} ({correct} of {with_truth} with known truth)")
        if totals.answered:
            many = len(totals.cuts) > 1
            where = ", ".join(f"{cut}{f': {count} inputs' if many else ''}" for cut, count in totals.cuts.items())
            up, down = totals.bytes_up / totals.answered, totals.bytes_down / totals.answered
            if totals.codecs and {*totals.codecs, self._about["codec"]} != {"raw"}:
                several = len(totals.codecs) > 1
                each = (f"{name}{f': {count} inputs' if several else ''}" for name, count in totals.codecs.items())
                where += f"; codec {', '.join(each)}"
            lines.append(f"cut {where}; per input {size(round(up))} up, {size(round(down))} down")
        if totals.in_batches:
            lines.append(f"{totals.in_batches} computed in batches with others' requests: last bits may differ")
        if totals.fallen:
            lines.append(f"{totals.fallen} answered on the edge, for the server did not: {one_line(totals.why_fallen)}")
        if self._witness:
            lines += _witness_lines(self._witnessed, self.refused)
        if self.unlike and any(name != EDGE_ONLY for _, name in totals.layers):
            lines.append(
                f"the last bits are not promised between these machines: {printable('; '.join(self.unlike))} "
                "(edge-client verify --server measures the difference)"
            )
        if totals.transforms:
            names = ", ".join(map(printable, totals.transforms))
            lines.append(f"not the model's own answers: transforms change {names}")
        return "\n".join(lines)

    def _times_table(self) -> str:
        """Format a table of all times but the first, if there are more."""
        totals = self._totals
        count, total, measured = totals.paced, totals.paced_times, totals.paced_ns
        if not count:
            count, total, measured = totals.answered, totals.times, totals.measured_ns
        end_to_end = total.end_to_end

        def row(label: str, ns: int) -> list[str]:
            share = f"{100 * ns / end_to_end:.1f} %" if end_to_end else "-"
            return [label, milliseconds(ns / count), milliseconds(ns), share]

        rows = [row(label, ns) for label, ns in total.rows()]
        rows += [row("sum of the rows", end_to_end), row("measured end to end", measured)]
        text = table(["where the time went", "mean ms", "total ms", "share"], rows, right=(1, 2, 3))
        if total.clock_error is not None:
            error = milliseconds(total.clock_error / count)
            text += f"\nupload and download by clocks that are aligned to {error} ms"
        return text


# With --witness.

WITNESS_LOGGER: Final = "edge_client.witness"


def check_witness(share: float, split: str, log_level: str | None) -> None:
    """Raise SpecError if nothing is split that could be compared; findings go to standard error."""
    if not share:
        return
    if split in (EDGE_ONLY, CLOUD_FILE):
        raise SpecError(f"--witness compares split requests with the whole model: --split {split} splits none")
    if log_level is None:  # otherwise they are among its log lines
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("edge-client: %(message)s"))
        logger = logging.getLogger(WITNESS_LOGGER)
        logger.handlers, logger.propagate = [handler], False


def _differing(answers: Sequence[Answer]) -> int:
    """Return how many answers differed from the whole model's."""
    return sum(one.witness is not None and not one.witness.same for one in answers)


def _witness_lines(answers: Sequence[Answer], refused: Mapping[str, str]) -> list[str]:
    """Return the lines of the run's summary."""
    seen = [one.witness for one in answers if one.witness is not None]
    wrong = _differing(answers)
    head = f"witness: {len(seen)} of {len(answers)} answers computed whole, too"
    if not seen:
        return [f"{head}: none was split" if answers else head, *_out_of_use(refused)]
    if wrong:
        return [f"{head}: {wrong} DIFFER{'S' if wrong == 1 else ''}", *_out_of_use(refused)]
    if all(one.bits for one in seen):
        return [f"{head}: all the same bit for bit"]
    lowest = min((one.top1 for one in seen if one.top1 is not None), default=None)
    top1 = "" if lowest is None else f", top-1 the same in {'all' if lowest == 1 else f'{100 * lowest:.4g} % or more'}"
    largest, allowed = max(one.largest for one in seen), max(one.tolerance for one in seen)
    return [
        f"{head}: all the same as far as unlike machines give it",
        f"witness: at most {largest:.2g} of the output's scale apart, {allowed:.2g} may be{top1}",
    ]


def _beside(answers: Sequence[Answer]) -> str | None:
    """Return the time of witnesses, which is in no row of the table of times."""
    spent = [one.witness.ns for one in answers if one.witness is not None]
    if not spent:
        return None
    return (
        f"beside these times: witnesses, mean {milliseconds(sum(spent) / len(spent))} ms, "
        f"total {milliseconds(sum(spent))} ms"
    )


def _witness_as_dict(answers: Sequence[Answer], share: float, refused: Mapping[str, str]) -> dict[str, Any]:
    """Return JSON data; times in nanoseconds."""
    seen = [one.witness for one in answers if one.witness is not None]
    return {
        "share": share,
        "witnessed": len(seen),
        "same": sum(one.same for one in seen),
        "differing": _differing(answers),
        "largest": max((one.largest for one in seen), default=None),
        "refused": dict(refused),
        "ns": sum(one.ns for one in seen),
    }


def _out_of_use(refused: Mapping[str, str]) -> list[str]:
    """Format ``refused``, whose reasons start with "witness: request 4 differs ..."."""
    return [f"out of use: cut {printable(cut)}; {one_line(why.partition(': ')[2])}" for cut, why in refused.items()]
