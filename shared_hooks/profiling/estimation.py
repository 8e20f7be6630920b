"""Cuts that were not measured: which to measure when there is no time for all, and what the others must be about."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from shared_hooks.profiling.profile import CodecProfile
from shared_hooks.profiling.quartiles import Quartiles
from shared_hooks.profiling.timers import TimedCodec

SMALLEST = 4
"""So many cuts with the smallest frontiers are measured in any case: those are the likely choices."""


def pick(cuts: Sequence[tuple[int, int]], room: int, wanted: Collection[int] = ()) -> list[int]:
    """The cuts to measure, of (layer id, frontier bytes) in order: all if ``room`` suffices; else the first, the last,
    the `SMALLEST` frontiers, and as many as there is room for, evenly spaced, of ``wanted`` and then of the others.
    """
    ids = [layer_id for layer_id, _ in cuts]
    if len(ids) <= room:
        return ids
    chosen = {ids[0], ids[-1], *(layer_id for layer_id, _ in sorted(cuts, key=lambda cut: cut[1])[:SMALLEST])}
    for some in ([layer_id for layer_id in ids if layer_id in wanted], ids):
        rest = [layer_id for layer_id in some if layer_id not in chosen]
        places = min(room - len(chosen), len(rest))
        chosen.update(rest[(2 * number + 1) * len(rest) // (2 * places)] for number in range(places))
    return sorted(chosen)


@dataclass(frozen=True)
class Known:
    """A measured cut: by layer id, with the bytes that cross."""

    layer_id: int
    frontier_bytes: int
    wire_bytes: int
    stages: Mapping[str, Quartiles]


def between(at: float, points: Sequence[tuple[float, float]]) -> float:
    """Straight lines between points (x rising); level beyond the ends."""
    xs = [x for x, _ in points]
    right = bisect_left(xs, at)
    if right == 0:
        return points[0][1]
    if right == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def estimate(
    layer_id: int, frontier_bytes: int, known: Sequence[Known], of_layers: Mapping[str, Callable[[int], float]]
) -> tuple[Mapping[str, Quartiles], int, str]:
    """Stages, wire bytes and in words how, for a cut that was not measured; ``known`` in order of layer ids.

    ``of_layers``: for stages that run layers, the sum of those layers' times at a cut; what is measured beyond it is
    interpolated between the measured neighbours. Stages that move bytes are interpolated by bytes, others by layer id.
    """
    stages: dict[str, Quartiles] = {}
    by_bytes = _by_bytes(known)
    for name in known[0].stages:
        ratios = {
            part: between(layer_id, [(one.layer_id, _ratio(one.stages[name], part)) for one in known])
            for part in ("q1", "q3")
        }
        if name in of_layers:
            own = of_layers[name]
            beyond = between(layer_id, [(one.layer_id, one.stages[name].middle - own(one.layer_id)) for one in known])
            median = max(0.0, own(layer_id) + beyond)
        elif name in ("encode", "decode") and name not in _by_layer(known):
            median = between(frontier_bytes, [(one.frontier_bytes, one.stages[name].middle) for one in by_bytes])
        else:
            median = between(layer_id, [(one.layer_id, one.stages[name].middle) for one in known])
        # of two or three measurements the middle may lie outside of the quartiles
        stages[name] = Quartiles(median, median * min(1.0, ratios["q1"]), median * max(1.0, ratios["q3"]), 0)
    overhead = between(layer_id, [(one.layer_id, one.wire_bytes - one.frontier_bytes) for one in known])
    wire = max(0, round(frontier_bytes + overhead))
    return stages, wire, "from the times of its layers and the overhead of the measured cuts next to it"


def estimated_codec(
    layer_id: int, frontier_bytes: int, known: Sequence[tuple[int, int, int, Sequence[TimedCodec]]]
) -> CodecProfile:
    """``known``: (layer id, frontier bytes, wire bytes, times) of the measured cuts, in order.

    How much smaller it gets depends on what the neighbours are; how long that takes, on its bytes.
    """
    shares = [(float(at), wire / max(1, nbytes)) for at, nbytes, wire, _ in known]
    by_size = sorted({nbytes: fmean(one.ns for one in times) for _, nbytes, _, times in known}.items())
    ns = between(frontier_bytes, [(float(nbytes), ns) for nbytes, ns in by_size])
    return CodecProfile(round(between(layer_id, shares) * frontier_bytes), Quartiles(ns, ns, ns, 0))


def _by_bytes(known: Sequence[Known]) -> list[Known]:
    """One of each size, sizes rising."""
    return sorted({one.frontier_bytes: one for one in known}.values(), key=lambda one: one.frontier_bytes)


def _by_layer(known: Sequence[Known]) -> frozenset[str]:
    # the cloud encodes the same answer at every cut: its bytes do not depend on the frontier
    return frozenset({"encode"}) if "compute" in known[0].stages else frozenset()


def _ratio(stage: Quartiles, part: str) -> float:
    return float(getattr(stage, part)) / stage.middle if stage.middle else 1.0
