"""A trace's phases, and how well a moving cut did in each: pure arithmetic over what was recorded."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.user_text import EDGE_ONLY

GOOD = 1.10
"""A candidate whose mean is at most so many times the best one's is as good as any."""


@dataclass(frozen=True)
class Phase:
    """``mbits`` None: the server is gone."""

    name: str
    mbits: float | None
    seconds: float


@dataclass(frozen=True)
class Request:
    """Seconds of a clock that all processes share. ``chosen`` for it, and ``split``: what answered it, which is another
    one where a late answer was overtaken by the whole model on the edge. ``error`` None when it was answered.
    """

    start: float
    end: float
    chosen: str
    split: str
    error: str | None = None

    @property
    def ms(self) -> float:
        return 1e3 * (self.end - self.start)


@dataclass(frozen=True)
class Move:
    """The cut was moved ``at`` this second, to ``split``."""

    at: float
    split: str


def best(oracle: Mapping[str, float]) -> str:
    """The candidate of the smallest mean."""
    return min(oracle, key=lambda name: oracle[name])


def judge(
    phases: Sequence[Phase],
    begins: Sequence[float],
    oracle: Mapping[str, Mapping[str, float]],
    requests: Sequence[Request],
    moves: Sequence[Move],
) -> dict[str, Any]:
    """``oracle``: of each phase, by name, every fixed candidate's mean latency (ms) measured under it.

    A request belongs to the phase in which it began. The oracle serves the same requests, each with the phase's best.
    """
    ends = [*begins[1:], begins[-1] + phases[-1].seconds]
    found = []
    for phase, begin, end in zip(phases, begins, ends, strict=True):
        mine = [one for one in requests if begin <= one.start < end]
        moved = [one for one in moves if begin <= one.at < end]
        found.append(_phase(phase, begin, oracle[phase.name], mine, moved))
    total, ideal, count = (sum(one[key] for one in found) for key in ("total_ms", "oracle_total_ms", "requests"))
    return {
        "phases": found,
        "requests": len(requests),
        "lost": sum(one.error is not None for one in requests),
        "mean_ms": total / count,
        "oracle_mean_ms": ideal / count,
        "ratio": total / ideal,
        "slowest_adaptation_s": max(one["settled_after_s"] for one in found),
        "most_moves_after_settling": max(one["moves_after_settling"] for one in found),
    }


def _phase(
    phase: Phase, begin: float, oracle: Mapping[str, float], requests: Sequence[Request], moves: Sequence[Move]
) -> dict[str, Any]:
    chosen = best(oracle)
    good = {name for name, ms in oracle.items() if ms <= GOOD * oracle[chosen]} | (
        {EDGE_ONLY} if not phase.mbits else set()
    )
    settled = next((one for one in requests if one.chosen in good), None)
    after = begin + phase.seconds if settled is None else settled.start
    if requests and settled is requests[0]:
        after = begin
    total = sum(one.ms for one in requests)
    return {
        "name": phase.name,
        "mbits": phase.mbits,
        "requests": len(requests),
        "lost": sum(one.error is not None for one in requests),
        "splits": {
            name: sum(one.split == name for one in requests) for name in dict.fromkeys(r.split for r in requests)
        },
        "oracle": chosen,
        "oracle_ms": oracle[chosen],
        "mean_ms": total / len(requests) if requests else None,
        "median_ms": statistics.median(one.ms for one in requests) if requests else None,
        "slowest_ms": max((one.ms for one in requests), default=None),
        "total_ms": total,
        "oracle_total_ms": len(requests) * oracle[chosen],
        "ratio": total / (len(requests) * oracle[chosen]) if requests else None,
        "moves": [[one.at - begin, one.split] for one in moves],
        "settled_after_s": after - begin,
        "last_move_after_s": moves[-1].at - begin if moves else 0.0,
        "moves_after_settling": sum(settled is None or one.at > settled.end for one in moves),
    }
