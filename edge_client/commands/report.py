"""What `edge-client run` has to tell: predictions, accuracy, where the time went, layers; as text and as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_client.answer import Answer
from edge_client.commands import witnesses
from edge_client.commands.layer_table import layer_table
from edge_client.commands.output import table
from edge_client.modes import CLOUD_FILE, EDGE_ONLY
from edge_client.screen.observation_table import tables
from edge_client.screen.text import milliseconds, one_line, printable, size
from edge_client.transport import Times
from shared_hooks.models import InputItem, Prediction


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one input file: an answer with predictions, or an error."""

    item: InputItem
    predictions: Sequence[Prediction] = ()  # best first, row after row
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
        """Whether the prediction is the truth; None where there is no one truth to compare with."""
        best = self.best
        return best[0].label == self.item.truth if self.item.truth is not None and len(best) == 1 else None

    @property
    def cut(self) -> str:
        """Where the model was really cut, in words."""
        assert self.answer is not None
        layer_id, name = self.answer.layer_id, self.answer.split
        if name in (EDGE_ONLY, CLOUD_FILE):
            return "nowhere: everything on the edge" if name == EDGE_ONLY else "nowhere: the file itself was sent"
        assert layer_id is not None
        return "before the first layer" if layer_id < 0 else f"after layer {layer_id} ({name})"

    def line(self, width: int) -> str:
        """One line per row: file, label, score, and what is known of the truth."""
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
        """JSON-able; times in nanoseconds."""
        known: dict[str, Any] = {
            "file": str(self.item.path),
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
            "witness": self.answer.witness.as_dict() if self.answer.witness else None,
            "fallback": self.answer.fallback or None,
        }


class Report:
    """Collects outcomes between its making and `finish`."""

    def __init__(
        self, model: str, server: str | None, split: str, codec: str, device: str, witness: float = 0.0
    ) -> None:
        self._about = {"model": model, "server": server, "split": split, "codec": codec, "device": device}
        self._outcomes: list[Outcome] = []
        self._began = time.perf_counter()
        self._seconds = 0.0
        self._cuts: dict[str, int] = {}  # where inputs were cut, and how many
        self._witness = witness
        self.refused: Mapping[str, str] = {}  # cuts that witnesses took out of use, and why
        self.unlike: Sequence[str] = ()
        """Why the last bits may differ between the two machines."""
        self.gave_up = False
        self.interrupted = False
        """By Ctrl-C: what is missing was not sent, or its answer did not come before."""
        self._before: list[dict[str, Any]] = []  # outcomes of an earlier run, out of its journal

    def resume(self, outcomes: list[dict[str, Any]]) -> None:
        """What an earlier run has already told, as `Outcome.as_dict` gave it. Times are of this run alone."""
        self._before = outcomes

    def start(self) -> None:
        """Begin to count the time anew: what was before was preparation."""
        self._began = time.perf_counter()

    def add(self, outcome: Outcome) -> None:
        """The next input's outcome, in the order of the inputs."""
        self._outcomes.append(outcome)
        if outcome.error is None:
            self._cuts[outcome.cut] = self._cuts.get(outcome.cut, 0) + 1

    def line(self, outcome: Outcome, width: int) -> str:
        """An added outcome's lines, with its cut where that is not the first input's, and what a witness found."""
        note = "" if outcome.cut == next(iter(self._cuts)) else f"  cut {outcome.cut}"
        if outcome.answer is not None and witnesses.differing([outcome.answer]):
            note += "  WITNESS DIFFERS"
        return "\n".join(line + note for line in outcome.line(width).split("\n"))

    def give_up(self, items: Sequence[InputItem], error: Exception) -> None:
        """The connection failed: every input without an outcome has failed with it."""
        self.gave_up = True
        for item in items[len(self._outcomes) :]:
            self.add(Outcome(item, error=error))

    def finish(self, refused: Mapping[str, str] | None = None, unlike: Sequence[str] = ()) -> None:
        """Stop the clock. ``refused``: cuts that witnesses took out of use, and why; ``unlike``: see there."""
        self.refused, self.unlike = refused or {}, unlike
        self._seconds = time.perf_counter() - self._began

    @property
    def answered(self) -> list[Outcome]:
        """Outcomes with an answer."""
        return [outcome for outcome in self._outcomes if outcome.error is None]

    @property
    def failed(self) -> list[Outcome]:
        """Outcomes without one."""
        return [outcome for outcome in self._outcomes if outcome.error is not None]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; times in nanoseconds."""
        answered, judged = self.answered, self._judged
        ids = {one.answer.layer_id for one in answered if one.answer}
        names = {one.answer.split for one in answered if one.answer}
        return {
            **self._about,
            # of all inputs; null where it is not the same for all
            "layer_id": ids.pop() if len(ids) == 1 else None,
            "layer_name": names.pop() if len(names) == 1 else None,
            "inputs": [*self._before, *(outcome.as_dict() for outcome in self._outcomes)],
            "answered": len(answered) + self._answered_before,
            "answered_before": self._answered_before,
            "failed": len(self.failed) + len(self._before) - self._answered_before,
            "interrupted": self.interrupted,
            "with_truth": len(judged),
            "correct": sum(judged),
            "accuracy": sum(judged) / len(judged) if judged else None,
            "unlike": list(self.unlike),
            "wall_seconds": self._seconds,
            "measured_ns": sum(outcome.measured_ns for outcome in answered),
            "times_ns": self._total.as_dict(),
            "witness": witnesses.as_dict(self._answers, self._witness, self.refused) if self._witness else None,
        }

    def as_text(self, layers: bool) -> str:
        """Summary, times and, if asked for, layers."""
        answered = self.answered
        parts = [self._summary()]
        if answered:
            parts.append(self._times_table())
            if beside := witnesses.beside(self._answers):
                parts[-1] += f"\n{beside}"
        if layers and answered:
            answers = self._answers
            parts += [
                f"layers on the {side}, mean over {len(answered)} inputs\n{layer_table(records, forwards)}"
                for side, records, forwards in (
                    ("edge", [one.layers_edge for one in answers], [one.forward_edge for one in answers]),
                    ("cloud", [one.layers_cloud for one in answers], [one.forward_cloud for one in answers]),
                )
            ]
        if answered and answered[-1].answer:
            for found in tables(answered[-1].answer.observations):
                shown = [table(found.headers, found.rows)] if found.rows else []
                parts.append("\n".join([f"{found.title}, of the last input", *shown, *found.notes]))
        return "\n" + "\n\n".join(parts)

    @property
    def some_failed(self) -> bool:
        """Whether an input has no answer, of this run or of those before it."""
        return bool(self.failed) or self._answered_before < len(self._before)

    @property
    def _answered_before(self) -> int:
        return sum(outcome["ok"] for outcome in self._before)

    @property
    def _answers(self) -> list[Answer]:
        return [one.answer for one in self.answered if one.answer]

    @property
    def _judged(self) -> list[bool]:
        now = [outcome.correct for outcome in self.answered if outcome.correct is not None]
        return now + [before["correct"] for before in self._before if before["correct"] is not None]

    @property
    def _total(self) -> Times:
        return Times.total(outcome.times for outcome in self.answered)

    def _summary(self) -> str:
        answered, judged = self.answered, self._judged
        lines = [
            f"{len(answered)} of {len(self._outcomes)} inputs answered in {self._seconds:.2f} s"
            f"{f', {len(self.failed)} failed' if self.failed else ''}{', then interrupted' if self.interrupted else ''}"
        ]
        if self._before:
            lines.append(f"{self._answered_before} of {len(self._before)} more by an earlier run (from its journal)")
        if judged:
            lines.append(f"accuracy {sum(judged) / len(judged):.4f} ({sum(judged)} of {len(judged)} with known truth)")
        if answered:
            many = len(self._cuts) > 1
            where = ", ".join(f"{cut}{f': {count} inputs' if many else ''}" for cut, count in self._cuts.items())
            up = sum(one.answer.bytes_up for one in answered if one.answer) / len(answered)
            down = sum(one.answer.bytes_down for one in answered if one.answer) / len(answered)
            lines.append(f"cut {where}; per input {size(round(up))} up, {size(round(down))} down")
        if fallen := [one.answer.fallback for one in answered if one.answer and one.answer.fallback]:
            lines.append(f"{len(fallen)} answered on the edge, for the server did not: {one_line(fallen[-1])}")
        if self._witness:
            lines += witnesses.summary(self._answers, self.refused)
        if self.unlike and any(one.split != EDGE_ONLY for one in self._answers):
            lines.append(
                f"the last bits are not promised between these machines: {printable('; '.join(self.unlike))} "
                "(edge-client verify --server tells how far they are apart)"
            )
        changed = dict.fromkeys(name for one in answered if one.answer for name in one.answer.transforms)
        if changed:
            lines.append(f"not the model's own answers: transforms change {', '.join(map(printable, changed))}")
        return "\n".join(lines)

    def _times_table(self) -> str:
        count, total = len(self.answered), self._total
        measured = sum(outcome.measured_ns for outcome in self.answered)
        end_to_end = total.end_to_end

        def row(label: str, ns: int) -> list[str]:
            share = f"{100 * ns / end_to_end:.1f} %" if end_to_end else "-"
            return [label, milliseconds(ns / count), milliseconds(ns), share]

        rows = [row(label, ns) for label, ns in total.rows()]
        rows += [row("sum of the rows", end_to_end), row("measured end to end", measured)]
        return table(["where the time went", "mean ms", "total ms", "share"], rows, right=(1, 2, 3))
