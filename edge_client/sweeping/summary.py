"""Summarise each way's measurements, and decide.

A way's latency is the mean of its middle half: the requests between the first and the third quartile. It is as robust
as a median, and the segments of those same requests add up to it exactly.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from edge_client.planning.objective import STAGES, Candidate, Decision, Objective, decide
from edge_client.screen import finite
from edge_client.sweeping.records import SEGMENTS, STAGE_SEGMENTS, Mode, Way
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from shared_hooks.errors import SpecError
from shared_hooks.metrics import STATUSES, Reading
from shared_hooks.showing import short

if TYPE_CHECKING:
    import polars as pl

# The findings of a sweep, made once when the tables are complete; `as_dict` is the content of summary.json and of the
# page.


FORMAT: Final = "isthmus sweep summary 1"


@dataclass(frozen=True)
class PredictedWay:
    """The plan's prediction of a way; ``error_percent``: its error, None without a measurement."""

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
    """By segment of a bar (`columns.SEGMENTS`)."""
    quartiles_ns: tuple[float, float, float]
    bytes_up: float
    bytes_down: float

    @property
    def latency_ns(self) -> float:
        return sum(self.segments_ns.values())


@short
@dataclass(frozen=True)
class MeasuredWay:
    """One way's results. ``exact``, ``agreeing``: number of answers that equal the whole model's, and that have its top
    1 (None without classes); ``timed`` is None for a way without an answer.
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
    predicted: PredictedWay | None

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
class SweepOutcome:
    """The winners as measured and as predicted. ``measured`` is None if nothing can be decided, for ``why_not``."""

    objective: str
    measured: Decision | None
    predicted: Mapping[str, Any] | None
    """The plan's decision, as the journal keeps it."""
    why_not: str | None
    median_error_percent: float | None

    @property
    def regret(self) -> dict[str, float | None]:
        """The loss from following the prediction, in per cent of the best; None if the best is 0. Empty if the
        predicted winner was not measured.
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
class SweepSummary:
    """All results. They cover ``measured_inputs`` and ``repetitions``; ``ended``: why inputs are missing; ``observed``:
    what observers saw of the first inputs; ``engines``: requests with heads in other engines, by cut.
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
    outcome: SweepOutcome
    failures: Sequence[Mapping[str, Any]]
    readings: Sequence[Mapping[str, Any]]
    observed: Sequence[Mapping[str, Any]] = ()
    engines: Mapping[str, Any] = field(default_factory=dict)
    leakage: Mapping[str, float] = field(default_factory=dict)
    """Leakage by way, 0 to 1, where measured."""

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data, with None for NaN and infinities."""
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


UNKNOWN_IDLE = Reading.unavailable("no plan was made, which measures it")
NO_FORWARD = Reading.estimated(0.0, "nothing of the model runs on the edge")
"""Shown for a file that is sent as it is."""


def ways_measured(
    requests: pl.DataFrame, ways: Sequence[Way], predicted: Mapping[str, Mapping[str, Any]]
) -> list[MeasuredWay]:
    """Return results in the order of ``ways``. ``predicted``: name -> candidate, as the journal keeps it."""
    import polars as pl

    found = []
    for way in ways:
        part = requests.filter((pl.col("cut") == way.name) & (pl.col("mode") == way.mode))
        good = part.filter(pl.col("error").is_null()).sort("end_to_end_ns")
        metered, timed = good.filter(pl.col("layers")), _timed(good.filter(~pl.col("layers")))
        reported = predicted.get(way.name) if way.networked or way.name == EDGE_ONLY else None
        found.append(
            MeasuredWay(
                name=way.name,
                layer_id=way.layer_id,
                mode=way.mode,
                requests=part.height,
                failed=part.height - good.height,
                exact=int(good["exact"].sum() or 0),
                agreeing=None if good["top1_agrees"].null_count() == good.height else int(good["top1_agrees"].sum()),
                timed=timed,
                edge_energy=energy(metered, "edge"),
                cloud_energy=energy(metered, "cloud"),
                predicted=None
                if reported is None
                else _predicted_way(reported, None if timed is None else timed.latency_ns),
            )
        )
    return found


def _timed(good: pl.DataFrame) -> Timed | None:
    """Summarise ``good``: answered requests without layers, ordered by time."""
    if not good.height:
        return None
    middle = good.slice(good.height // 4, good.height - 2 * (good.height // 4))
    low, half, high = (float(good["end_to_end_ns"].quantile(share, "linear") or 0.0) for share in (0.25, 0.5, 0.75))
    return Timed(
        {segment: sum(_mean(middle[f"{name}_ns"]) for name in names) for segment, names in SEGMENTS.items()},
        (low, half, high),
        _mean(good["bytes_up"]),
        _mean(good["bytes_down"]),
    )


def energy(good: pl.DataFrame, side: str) -> Reading:
    """Return a request's joules on one side: the mean of those that have a value; or why there is none."""
    values = good[f"{side}_energy_j"].drop_nulls()
    notes = good[f"{side}_energy_note"].drop_nulls().unique(maintain_order=True).to_list()
    statuses = set(good[f"{side}_energy_status"].drop_nulls().to_list())
    note = "; ".join(notes[:2])
    if values.is_empty():
        return Reading.unavailable(note or "not sampled")
    if statuses == {"measured"}:
        return Reading.measured(_mean(values), note)
    return Reading.estimated(_mean(values), note)


def layers_measured(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return each layer's median time on either side (ns; null if it never ran) and its output, in running order.

    Of networked requests and of edge-only; the lines outside layers, of whole forwards on either side, come last.
    """
    import polars as pl

    seen = rows.filter((pl.col("mode") == "networked") | (pl.col("cut") == EDGE_ONLY))
    whole = pl.col("cut").is_in([EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE])
    seen = seen.filter((pl.col("layer_type") != "outside") | whole)
    grouped = (
        seen.group_by("layer_id", "layer", "side", maintain_order=True)
        .agg(
            pl.col("layer_type").first(),
            pl.col("inference_ns").median(),
            pl.col("cpu_ns").median(),
            pl.col("energy_j").median(),
            pl.col("output_bytes").first(),
            pl.col("dtype").first(),
            pl.col("shape").first(),
            pl.len().alias("n"),
        )
        .sort("layer_id", nulls_last=True, maintain_order=True)
    )
    found: dict[tuple[Any, str], dict[str, Any]] = {}
    for one in grouped.to_dicts():
        layer = found.setdefault(
            (one["layer_id"], one["layer"]),
            {key: one[key] for key in ("layer_id", "layer", "layer_type", "output_bytes", "dtype", "shape")},
        )
        layer[one["side"]] = {key: one[key] for key in ("inference_ns", "cpu_ns", "energy_j", "n")}
    return list(found.values())


def failures(requests: pl.DataFrame) -> list[dict[str, Any]]:
    """Return each error once: its text, count, and first occurrence."""
    import polars as pl

    bad = requests.filter(pl.col("error").is_not_null())
    grouped = bad.group_by("error", maintain_order=True).agg(
        pl.len().alias("count"), pl.col("cut").first(), pl.col("mode").first(), pl.col("input").first()
    )
    return grouped.to_dicts()


def readings(notes: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """Add up [column, status, note, count] of every input: how the numbers of a column were obtained."""
    total: dict[tuple[str, str, str], int] = {}
    for column, status, note, count in notes:
        total[column, status, note] = total.get((column, status, note), 0) + count
    found = [
        {"column": column, "status": status, "note": note, "count": count}
        for (column, status, note), count in total.items()
    ]
    return sorted(found, key=lambda one: (one["column"], STATUSES.index(one["status"]), -one["count"]))


def candidates_measured(ways: Sequence[MeasuredWay], idle: Reading = UNKNOWN_IDLE) -> list[Candidate]:
    """Return the measurements as candidates, to decide as for predictions. Local splits are no candidates.

    ``idle``: watts of the edge while it waits, which count as in a prediction.
    """
    found = []
    for way in ways:
        timed = way.timed
        if timed is None or (way.mode == "local" and way.name != EDGE_ONLY):
            continue
        stages = {stage: sum(timed.segments_ns[one] for one in STAGE_SEGMENTS[stage]) for stage in STAGES}
        forward = NO_FORWARD if way.name == CLOUD_FILE else way.edge_energy
        found.append(
            Candidate(
                way.name,
                way.layer_id,
                stages,
                bytes_up=round(timed.bytes_up),
                bytes_down=round(timed.bytes_down),
                edge_energy=_with_waiting(forward, idle, stages),
                edge_memory=Reading.unavailable("not measured by a sweep"),
                accuracy=None if way.agreeing is None else way.agreeing / way.answered,
                interval_ns=(timed.quartiles_ns[0], timed.quartiles_ns[2]),
            )
        )
    return found


def _with_waiting(forward: Reading, idle: Reading, stages: Mapping[str, float]) -> Reading:
    waiting = stages["network"] + stages["queue"] + stages["tail"]
    if forward.value is None or not waiting:
        return forward
    if idle.value is None:
        return Reading.unavailable(f"idle power: {idle.note}")
    return Reading.estimated(
        forward.value + idle.value * waiting / 1e9, f"{forward.note}; waiting at {idle.value:.3g} W idle"
    )


def outcome(ways: Sequence[MeasuredWay], prediction: Mapping[str, Any] | None, objective: Objective) -> SweepOutcome:
    """Decide by ``objective`` on the measurements. ``prediction``: as the journal keeps it."""
    measured: Decision | None = None
    why_not = None
    try:
        known_idle = prediction.get("idle_power") if prediction else None
        idle = Reading.from_dict(known_idle) if known_idle else UNKNOWN_IDLE
        measured = decide(candidates_measured(ways, idle), objective)
    except SpecError as error:
        why_not = str(error)
    errors = [
        abs(way.predicted.error_percent)
        for way in ways
        if way.predicted is not None and way.predicted.error_percent is not None
    ]
    return SweepOutcome(
        str(objective),
        measured,
        (prediction["decision"] or None) if prediction is not None else None,
        why_not,
        statistics.median(errors) if errors else None,
    )


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the Pareto-optimal points, sorted by the first coordinate."""
    order = sorted(range(len(points)), key=lambda number: points[number])
    front: list[int] = []
    for number in order:
        if not front or points[number][1] < points[front[-1]][1]:
            front.append(number)
    return front


def _predicted_way(candidate: Mapping[str, Any], measured_ns: float | None) -> PredictedWay:
    latency = float(candidate["latency_ns"])
    return PredictedWay(
        latency,
        candidate["stages_ns"],
        candidate["bytes_up"],
        candidate["bytes_down"],
        candidate["edge_energy"],
        None if not measured_ns else 100 * (latency / measured_ns - 1),
    )


def _mean(values: pl.Series) -> float:
    mean: Any = values.mean()
    return float(mean)
