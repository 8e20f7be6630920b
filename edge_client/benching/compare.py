"""Two benches side by side: what became better or worse at each rate, as far as the noise lets one say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Final

from edge_client.benching.spread import CONFIDENCE

IN_TIME: Final = "in time"
FIGURES: Final = ("p50", "p90", "p99", IN_TIME)
"""Not goodput, which is more where chance has let more arrive, but its share of what arrived."""
LOWER, HIGHER, SAME, FEW = "lower", "higher", "no difference seen", "too few to say"


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each figure of each rate that both have: rate, figure, a, b, ratio (B to A), low, high, verdict.

    Intervals hold together with `CONFIDENCE` for all rows (Bonferroni), and know each run's own noise, not what lies
    between two runs. Latencies in ns, None among requests without an answer; "in time" is a share, 0 to 1.
    """
    steps = {one["rate"]: one for one in b["steps"]}
    pairs = [(one, steps[one["rate"]]) for one in a["steps"] if one["rate"] in steps]
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / max(1, len(pairs) * len(FIGURES)))
    return [_row(one, other, figure, z) for one, other in pairs for figure in FIGURES]


def _row(a: Mapping[str, Any], b: Mapping[str, Any], figure: str, z: float) -> dict[str, Any]:
    mine, theirs = (_figure(one, figure) for one in (a, b))
    ratio = low = high = None
    verdict = FEW
    if mine["value"] and theirs["value"]:
        ratio = theirs["value"] / mine["value"]
        known = [one["spread"] for one in (mine, theirs)]
        if mine["sure"] and theirs["sure"] and known[0] is not None and known[1] is not None:
            width = z * math.hypot(known[0], known[1])
            low, high = ratio * math.exp(-width), ratio * math.exp(width)
            verdict = LOWER if high < 1 else HIGHER if low > 1 else SAME
    rows = {"a": mine["value"], "b": theirs["value"], "ratio": ratio, "low": low, "high": high}
    return {"rate": a["rate"], "figure": figure, **rows, "verdict": verdict}


def _figure(step: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if name != IN_TIME:
        found: Mapping[str, Any] = step["latency"][name]
        return found
    share = step["in_time"] / step["requests"] if step["requests"] else None
    return {"value": share, "spread": step["goodput"]["spread"], "sure": True}


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What else is not the same in both, in words."""
    lines = []
    for key in dict.fromkeys([*a["settings"], *b["settings"]]):
        one, other = a["settings"].get(key), b["settings"].get(key)
        if one != other:
            lines.append(f"{key}: {_said(one)} / {_said(other)}")
    rates = [[one["rate"] for one in each["steps"]] for each in (a, b)]
    for mine, theirs, name in ((rates[0], rates[1], "A"), (rates[1], rates[0], "B")):
        if alone := [f"{rate:g}" for rate in mine if rate not in theirs]:
            lines.append(f"only in {name}: {', '.join(alone)} a second")
    for one, name in ((a, "A"), (b, "B")):
        if one.get("ended"):
            lines.append(f"{name} is not complete: {one['ended']}")
        if any(each["generator"]["bottleneck"] for each in one["steps"]):
            lines.append(f"{name}: the generator itself was a bottleneck")
    return lines


def _said(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
