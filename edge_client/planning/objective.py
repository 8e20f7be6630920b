"""The best candidate: by one number or a weighted sum of several, under constraints.

Weighted numbers are first divided by the best of the allowed candidates, so that a weight says how much a number twice
the best counts, whatever its unit. If the best is 0 (no byte at all), they are divided by the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from edge_client.planning.leakage import LeakageBound
from edge_client.user_text import CLOUD_FILE, either, option
from shared_hooks.errors import SpecError
from shared_hooks.metrics import Reading
from shared_hooks.showing import short

# One way to run a request: a cut, everything here, or everything there; with its prediction.


STAGES: Final = ("prepare", "edge", "encode", "network", "queue", "tail", "finish")
"""The stages of a request, as a plan predicts and a sweep measures them. prepare: reading and preprocessing the input;
edge: the head (or the whole model); encode: frontier to bytes; network: upload, download, both ways' latency; queue:
waiting for a worker; tail: the server's decode, inject, compute and encode; finish: the answer to tensors.
"""


OTHER_COSTS: Final = ("memory", "energy", "accuracy")


@short
@dataclass(frozen=True)
class Candidate:
    """A prediction. Times in ns, sizes in bytes, energy in joules."""

    name: str
    """EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE, or the layer after which to cut: a value of ``--split``."""
    layer_id: int | None
    stages_ns: Mapping[str, float]
    bytes_up: int
    bytes_down: int
    edge_energy: Reading
    edge_memory: Reading
    accuracy: float | None = 1.0
    """Agreement with the whole model's answer: 1.0 if exact, None if unknown."""
    throughput: float | None = None
    """Requests per second with several in progress: limited by the slowest of edge, link (each way), workers."""
    notes: tuple[str, ...] = field(default=())
    interval_ns: tuple[float, float] | None = None
    """The interval of the median of real requests, with 90 % probability, from the errors of predictions for cuts that
    were used (`predict.Correction`); None if these are too few.
    """
    unsteady: str = ""
    """Why it is not ranked although it is allowed; empty: it is."""
    slow_ns: float = math.inf
    """If it is unsteady, its latency by the upper quartiles of what was measured."""

    codec: str = ""
    """The codec, if codecs are chosen with the cut; empty: the one that all requests use."""

    last: bool = False
    """Whether no layer runs after it: nothing is left for the server."""

    @property
    def key(self) -> str:
        """Identifies a candidate: its name, with the codec if that is chosen, too."""
        return f"{self.name} + {self.codec}" if self.codec else self.name

    @property
    def is_cut(self) -> bool:
        """Whether both sides compute: after a layer that is not the last, not before the first."""
        return self.layer_id is not None and self.layer_id >= 0 and self.name != CLOUD_FILE and not self.last

    def as_near_as(self, other: Candidate) -> bool:
        """Return whether the intervals of both overlap, so that either may turn out to be faster."""
        if self.interval_ns is None or other.interval_ns is None:
            return False
        return self.interval_ns[0] <= other.interval_ns[1] and other.interval_ns[0] <= self.interval_ns[1]

    @property
    def latency_ns(self) -> float:
        return sum(self.stages_ns.values())

    @property
    def server_ns(self) -> float:
        """Its time on the server, without waiting."""
        return self.stages_ns.get("tail", 0.0)

    def interval(self) -> dict[str, float | None]:
        """Return the ends of its interval by their names in tables and JSON."""
        low, high = self.interval_ns or (None, None)
        return {"latency_low_ns": low, "latency_high_ns": high}

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "codec": self.codec or None,
            "layer_id": self.layer_id,
            "latency_ns": self.latency_ns,
            **self.interval(),
            "stages_ns": dict(self.stages_ns),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "edge_energy": self.edge_energy.as_dict(),
            "edge_memory": self.edge_memory.as_dict(),
            "server_ns": self.server_ns,
            "accuracy": self.accuracy,
            "throughput": self.throughput,
            "notes": list(self.notes),
        }


def undominated(candidates: Sequence[Candidate], costs: Collection[str] = OTHER_COSTS) -> list[Candidate]:
    """Return the candidates without those that another beats in everything, whatever the link and the speed of either
    side become.

    ``costs``: of `OTHER_COSTS` those that count, besides the times of both sides and the bytes both ways.
    """

    def of(one: Candidate) -> tuple[float, ...]:
        own = sum(one.stages_ns.get(stage, 0.0) for stage in ("prepare", "edge", "encode"))
        found = {
            "memory": one.edge_memory.value or 0.0,
            "energy": one.edge_energy.value or 0.0,
            "accuracy": -(one.accuracy or 0.0),
        }
        return own, one.bytes_up, one.bytes_down, one.server_ns, *(found[name] for name in OTHER_COSTS if name in costs)

    kept: list[tuple[tuple[float, ...], Candidate]] = []
    for mine, one in sorted(((of(one), one) for one in candidates), key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other, _ in kept):
            kept.append((mine, one))
    return [one for _, one in kept]


COSTS: Final[Mapping[str, Callable[[Candidate], float | None]]] = MappingProxyType(
    {
        "latency": lambda one: one.latency_ns,
        "energy": lambda one: one.edge_energy.value,
        "bytes": lambda one: one.bytes_up + one.bytes_down,
        "throughput": lambda one: 1e9 / one.throughput if one.throughput else None,  # ns between two answers
        "server-time": lambda one: one.server_ns,
    }
)
"""By objective: what to minimise (ns, joules, bytes, ns, ns); None: unavailable."""


@dataclass(frozen=True)
class Objective:
    """Weights by name of `COSTS`; a name alone has the weight 1."""

    weights: Mapping[str, float] = field(default_factory=lambda: {"latency": 1.0})

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Parse ``"latency"`` or ``"latency=1,energy=0.5"``. Raises SpecError naming what is wrong."""
        weights: dict[str, float] = {}
        for part in text.split(","):
            name, equals, number = (piece.strip() for piece in part.partition("="))
            if name not in COSTS:
                raise SpecError(
                    f"objective {name!r}: one of {', '.join(COSTS)}, or weights such as latency=1,bytes=0.2"
                )
            if name in weights:
                raise SpecError(f"objective {name!r} is given twice")
            try:
                weights[name] = float(number) if equals else 1.0
            except ValueError:
                weights[name] = math.nan
            if not 0 < weights[name] < math.inf:
                raise SpecError(f"objective {name}={number}: a weight is a number above 0")
        return cls(weights)

    def __str__(self) -> str:
        if len(self.weights) == 1:
            return next(iter(self.weights))
        return ",".join(f"{name}={weight:g}" for name, weight in self.weights.items())

    def scores(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return a score for each candidate; less is better. Raises SpecError if a number is unavailable, with the
        reason.
        """
        total = [0.0] * len(candidates)
        for name, weight in self.weights.items():
            costs = [self._cost(name, one) for one in candidates]
            scale = 1.0
            if len(self.weights) > 1 and costs:
                scale = min(costs) or max(costs) or 1.0
            total = [sum_ + weight * cost / scale for sum_, cost in zip(total, costs, strict=True)]
        return total

    def _cost(self, name: str, one: Candidate) -> float:
        cost = COSTS[name](one)
        if cost is None:
            if name != "energy":
                raise SpecError(f"objective {name}: unavailable for {one.name} (unknown)")
            give = either("--power-active and --power-idle give", "power=(active, idle) gives")
            raise SpecError(
                f"objective energy: unavailable for {one.name} ({one.edge_energy.note}); {give} this machine's watts"
            )
        return cost


@dataclass(frozen=True)
class Constraints:
    """None: no limit. ``max_edge_memory`` in bytes; ``max_bytes_per_second`` counts both ways at ``rate`` requests per
    second; ``min_accuracy`` is agreement with the whole model, 0 to 1; ``leakage``: the limit of what crosses.
    """

    max_edge_memory: float | None = None
    max_bytes_per_second: float | None = None
    rate: float | None = None
    min_accuracy: float | None = None
    leakage: LeakageBound | None = None

    def __post_init__(self) -> None:
        if (self.max_bytes_per_second is None) != (self.rate is None):
            raise SpecError(f"{option('max_bytes_per_second')} and {option('rate')} (requests per second) go together")
        if self.min_accuracy is not None and not 0 <= self.min_accuracy <= 1:  # rejects NaN, too
            raise SpecError(f"{option('min_accuracy', self.min_accuracy)}: expected a share from 0 to 1")

    def violated(self, one: Candidate) -> _Violation | None:
        """Return the first constraint that ``one`` violates, or None."""
        if self.max_edge_memory is not None:
            memory = one.edge_memory.value
            if memory is None:
                return _Violation("edge memory", f"edge memory unknown: {one.edge_memory.note}", math.inf)
            if memory > self.max_edge_memory:
                return _over("edge memory", memory, self.max_edge_memory, "B")
        if self.max_bytes_per_second is not None and self.rate is not None:
            traffic = (one.bytes_up + one.bytes_down) * self.rate
            if traffic > self.max_bytes_per_second:
                return _over("bytes per second", traffic, self.max_bytes_per_second, "B/s")
        if self.min_accuracy is not None:
            if one.accuracy is None:
                return _Violation("accuracy", "accuracy unknown", math.inf)
            if one.accuracy < self.min_accuracy:
                miss = self.min_accuracy - one.accuracy
                return _Violation("accuracy", f"accuracy {one.accuracy:g}, at least {self.min_accuracy:g}", miss)
        return self._leaks(one)

    def _leaks(self, one: Candidate) -> _Violation | None:
        """Return the violation of the leakage limit, which no link or load changes, or None."""
        if self.leakage is None:
            return None
        found, most = self.leakage.of(one.name, one.codec), self.leakage.most
        if found is None:
            return _Violation("leakage", "leakage unknown: it was not measured there", math.inf)
        if found > most:
            return _Violation("leakage", f"leakage {found:.2f}, at most {most:g}", found - most)
        return None

    def leaks_no_more(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return those that the leakage limit allows."""
        return [one for one in candidates if self._leaks(one) is None]


@dataclass(frozen=True)
class _Violation:
    constraint: str
    reason: str
    by: float
    """The excess, as a share of the limit."""


@short
@dataclass(frozen=True)
class Decision:
    """``ranking``: the allowed candidates, best first; ``scores``: `Candidate.key` -> what was compared (ns, joules or
    bytes; for weights a sum without a unit); ``rejected``: key -> reason.
    """

    objective: str
    winner: Candidate
    runner_up: Candidate | None
    ranking: tuple[Candidate, ...]
    scores: Mapping[str, float]
    rejected: Mapping[str, str]

    def rejection(self, candidates: Sequence[Candidate]) -> str:
        """Return how many of the candidates are not ranked, and why the fastest of them is not."""
        rejected = sorted((one for one in candidates if one.key in self.rejected), key=lambda one: one.latency_ns)
        text = f"{len(rejected)} of {len(candidates)} candidates not ranked"
        for one in rejected[:1]:
            text += f"{', such as' if len(rejected) > 1 else ':'} {one.key}: {self.rejected[one.key]}"
        return text

    @property
    def best_cut(self) -> Candidate | None:
        """The best candidate for which both sides compute: the winner, unless one side does everything. None if no cut
        is allowed.
        """
        return next((one for one in self.ranking if one.is_cut), None)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: names, not candidates."""
        return {
            "objective": self.objective,
            "winner": self.winner.name,
            "codec": self.winner.codec or None,
            "runner_up": self.runner_up.key if self.runner_up else None,
            "best_cut": self.best_cut.name if self.best_cut else None,
            "ranking": [one.key for one in self.ranking],
            "scores": dict(self.scores),
            "rejected": dict(self.rejected),
        }


def decide(
    candidates: Sequence[Candidate],
    objective: Objective | None = None,
    constraints: Constraints | None = None,
    held: str | None = None,
) -> Decision:
    """Return the best allowed candidate; among equals the first. ``objective``: latency by default. ``held``: the key
    of the candidate in use, which requests measure: it is ranked, however unsteady its profile.

    Raises SpecError: no candidate satisfies the constraints (how many each removed, and the nearest miss), or the
    objective's numbers are unavailable (why).
    """
    objective, constraints = objective or Objective(), constraints or Constraints()
    broken = {one.key: broke for one in candidates if (broke := constraints.violated(one)) is not None}
    allowed = [one for one in candidates if one.key not in broken]
    if not allowed:
        raise SpecError(_no_candidate(candidates, broken))
    rejected = {name: broke.reason for name, broke in broken.items()}
    if steady := [one for one in allowed if not one.unsteady]:
        # one that is faster than all steady ones even when it is slow owes that to no chance
        fastest = min(one.latency_ns for one in steady) if str(objective) == "latency" else 0.0
        unsteady = [one for one in allowed if one.unsteady and one.key != held and one.slow_ns >= fastest]
        rejected |= {one.key: one.unsteady for one in unsteady}
        allowed = [one for one in allowed if one.key not in rejected]
    scores = objective.scores(allowed)
    ranked = sorted(zip(scores, allowed, strict=True), key=lambda pair: pair[0])
    ranking = tuple(one for _, one in ranked)
    return Decision(
        str(objective),
        ranking[0],
        ranking[1] if len(ranking) > 1 else None,
        ranking,
        {one.key: score for score, one in ranked},
        rejected,
    )


def _over(what: str, value: float, limit: float, unit: str) -> _Violation:
    return _Violation(what, f"{what} {value:.0f} {unit}, limit {limit:.0f} {unit}", (value - limit) / max(limit, 1e-9))


def _no_candidate(candidates: Sequence[Candidate], broken: Mapping[str, _Violation]) -> str:
    if not candidates:
        return "there is no candidate to choose from"
    counts: dict[str, int] = {}
    for broke in broken.values():
        counts[broke.constraint] = counts.get(broke.constraint, 0) + 1
    removed = ", ".join(f"{name} removes {count}" for name, count in counts.items())
    name, nearest = min(broken.items(), key=lambda item: item[1].by)
    return (
        f"no candidate satisfies the constraints ({removed} of {len(candidates)}); nearest: {name} ({nearest.reason})"
    )
