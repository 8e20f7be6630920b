"""What one `prune` found: made once, shown as text, as a page and as JSON (docs/pruning.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edge_client.pruning.data import Judged
from edge_client.pruning.served import Served
from edge_client.pruning.trial import Trial
from shared_hooks.showing import short


@dataclass(frozen=True)
class Smaller:
    """A model whose channels were taken out: how it is judged, and its parameters beside the whole model's."""

    keep: int
    scoring: str
    judged: Judged
    lost: float
    """Share of the whole model's right answers that are lost, 0 to 1."""
    parameters: int
    parameters_whole: int


@short
@dataclass(frozen=True)
class Report:
    """``inputs``: how many files were judged on; ``served`` is empty where nothing was served, ``files`` where nothing
    was kept.
    """

    model: str
    layer: str
    trial: Trial
    calibration_inputs: int
    inputs: int
    random_seeds: int
    smaller: tuple[Smaller, ...]
    served: tuple[Served, ...]
    files: tuple[str, ...]

    @property
    def metric(self) -> str:
        """What `Judged.value` is."""
        return "agreement" if self.trial.whole.accuracy is None else "accuracy"

    @property
    def channels(self) -> int:
        return self.trial.captured.channels

    @property
    def all_exact(self) -> bool:
        """Whether every answer of the service was the same model's in one process."""
        return all(one.exact == one.requests for one in self.served)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        trial, keeps = self.trial, self.trial.keeps
        chosen = {keep: trial.chosen(keep) for keep in keeps}
        return {
            "format": "isthmus-prune",
            "version": 1,
            "model": self.model,
            "layer": self.layer,
            "module": trial.module,
            "split": trial.split,
            "channels": self.channels,
            "places": len(trial.captured.labels),
            "calibration_inputs": self.calibration_inputs,
            "inputs": self.inputs,
            "metric": self.metric,
            "keeps": keeps,
            "whole": asdict(trial.whole),
            "random_seeds": self.random_seeds,
            "rows": [
                {
                    "scoring": row.scoring,
                    "seed": row.seed,
                    "keep": row.keep,
                    **asdict(row.judged),
                    "loss_points": 100 * (trial.whole.value - row.judged.value),
                    "calibration": None if row.calibration is None else asdict(row.calibration),
                    "channels": list(row.mask.keep),
                }
                for row in trial.rows
            ],
            "chosen": {str(keep): row.scoring for keep, row in chosen.items() if row is not None},
            "unavailable": dict(trial.unavailable),
            "structural": [
                {
                    "keep": one.keep,
                    "scoring": one.scoring,
                    **asdict(one.judged),
                    "loss_points": 100 * one.lost,
                    "parameters": one.parameters,
                    "parameters_whole": one.parameters_whole,
                }
                for one in self.smaller
            ],
            "served": [one.as_dict() for one in self.served],
            "files": list(self.files),
        }
