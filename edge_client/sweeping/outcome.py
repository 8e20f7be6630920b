"""What a sweep found, made once when the tables are there; `as_dict` is what summary.json says, and the page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from edge_client.planning.objective import Decision
from edge_client.screen.text import finite
from edge_client.sweeping.records import Mode
from shared_hooks.metrics import Reading
from shared_hooks.showing import short

FORMAT: Final = "isthmus sweep summary 1"


@dataclass(frozen=True)
class Foretold:
    """What the plan said of a way; ``error_percent``: how far it is from what was measured, None where nothing was."""

    latency_ns: float
    stages_ns: Mapping[str, float]
    bytes_up: int
    bytes_down: int
    edge_energy: Mapping[str, Any]
    """A reading as a dictionary, as the journal keeps it."""
    error_percent: float | None


@dataclass(frozen=True)
class Timed:
    """The requests that count for the latency: means of the middle half, bytes of all."""

    segments_ns: Mapping[str, float]
    """By piece of a bar (`columns.SEGMENTS`)."""
    quartiles_ns: tuple[float, float, float]
    bytes_up: float
    bytes_down: float

    @property
    def latency_ns(self) -> float:
        return sum(self.segments_ns.values())


@short
@dataclass(frozen=True)
class MeasuredWay:
    """One way's numbers. ``exact``, ``agreeing``: how many answers equal the whole model's, how many have its top 1
    (None where there are no classes); ``timed`` is None for a way without an answer.
    """

    name: str
    layer_id: int | None
    mode: Mode
    requests: int
    failed: int
    exact: int
    agreeing: int | None
    timed: Timed | None
    edge_energy: Reading
    cloud_energy: Reading
    predicted: Foretold | None

    @property
    def answered(self) -> int:
        return self.requests - self.failed

    @property
    def latency_ns(self) -> float | None:
        return None if self.timed is None else self.timed.latency_ns

    def as_dict(self) -> dict[str, Any]:
        timed = self.timed
        return {
            "name": self.name,
            "layer_id": self.layer_id,
            "mode": self.mode,
            "requests": self.requests,
            "failed": self.failed,
            "exact": self.exact,
            "agreeing": self.agreeing,
            "latency_ns": self.latency_ns,
            "quartiles_ns": None if timed is None else list(timed.quartiles_ns),
            "segments_ns": None if timed is None else dict(timed.segments_ns),
            "bytes_up": None if timed is None else timed.bytes_up,
            "bytes_down": None if timed is None else timed.bytes_down,
            "edge_energy": self.edge_energy.as_dict(),
            "cloud_energy": self.cloud_energy.as_dict(),
            "predicted": None if self.predicted is None else asdict(self.predicted),
        }


@short
@dataclass(frozen=True)
class Outcome:
    """Who won as measured and as predicted. ``measured`` is None where nothing can be decided on, for ``why_not``."""

    objective: str
    measured: Decision | None
    predicted: Mapping[str, Any] | None
    """The plan's decision, as the journal keeps it."""
    why_not: str | None
    median_error_percent: float | None

    @property
    def regret(self) -> dict[str, float | None]:
        """What following the prediction would have cost, in percent of the best; None where the best is nothing. Empty
        where the predicted winner was not measured.
        """
        if self.measured is None or not self.predicted or self.predicted["winner"] not in self.measured.scores:
            return {}
        scores = self.measured.scores
        best, followed = scores[self.measured.winner.name], scores[self.predicted["winner"]]
        return {"regret_percent": 100 * (followed / best - 1) if best else None}

    def as_dict(self) -> dict[str, Any]:
        return {
            "objective": self.objective,
            "measured": None if self.measured is None else self.measured.as_dict(),
            "predicted": self.predicted,
            "why_not": self.why_not,
            **self.regret,
            "median_error_percent": self.median_error_percent,
        }


@short
@dataclass(frozen=True)
class Summary:
    """Everything. ``measured_inputs`` and ``repetitions`` go together; ``ended``: why inputs are missing; ``observed``:
    of the first inputs, what observers saw; ``engines``: requests with heads in other engines, by cut.
    """

    created: str
    settings: Mapping[str, Any]
    measured_inputs: Sequence[str]
    repetitions: Sequence[int]
    ended: str | None
    skipped: Mapping[str, str]
    versions: Mapping[str, str | None]
    ways: Sequence[MeasuredWay]
    layers: Sequence[Mapping[str, Any]]
    prediction: Mapping[str, Any] | None
    outcome: Outcome
    failures: Sequence[Mapping[str, Any]]
    readings: Sequence[Mapping[str, Any]]
    observed: Sequence[Mapping[str, Any]] = ()
    engines: Mapping[str, Any] = field(default_factory=dict)
    leakage: Mapping[str, float] = field(default_factory=dict)
    """By way, what crosses gives away, 0 to 1; of those where it was measured."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, NaN and infinities as None."""
        found: dict[str, Any] = finite(
            {
                "format": FORMAT,
                "created": self.created,
                "settings": dict(self.settings),
                "measured_inputs": list(self.measured_inputs),
                "repetitions": list(self.repetitions),
                "ended": self.ended,
                "skipped": dict(self.skipped),
                "versions": dict(self.versions),
                "ways": [way.as_dict() for way in self.ways],
                "layers": list(self.layers),
                "prediction": self.prediction,
                "decision": self.outcome.as_dict(),
                "failures": list(self.failures),
                "readings": list(self.readings),
                **({"observed": list(self.observed)} if self.observed else {}),
                **({"engines": dict(self.engines)} if self.engines else {}),
                **({"leakage": dict(self.leakage)} if self.leakage else {}),
            }
        )
        return found
