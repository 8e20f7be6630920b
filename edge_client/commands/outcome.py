"""What became of one input of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_client.answer import Answer
from edge_client.commands.feed import Named
from edge_client.modes import CLOUD_FILE, EDGE_ONLY
from edge_client.screen.text import printable
from edge_client.transport import Times
from shared_hooks.models import FrameId, Prediction


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one input file or frame: an answer with predictions, or an error."""

    item: Named
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

    @property
    def codec(self) -> str:
        """What its tensors travelled with; empty where nothing did."""
        assert self.answer is not None
        return "+".join(dict.fromkeys(self.answer.codecs))

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
            "company": self.answer.company,
        }
