"""Why the best candidate wins, stage by stage, and what would have to change for the runner-up to win."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import STAGES, Candidate, Decision, Objective
from edge_client.screen import number
from edge_client.user_text import CLOUD_ONLY, EDGE_ONLY

Repredict = Callable[[Link, float, float], Sequence[Candidate]]
"""(link, edge factor, server factor) -> candidates; the factors multiply times."""
WIDEST: Final = 1e4
"""The largest factor that is tried, in both directions."""
WIDTH: Final = 80
STEPS: Final = 40
"""The number of steps up to that; each is searched for the first crossing."""


@dataclass(frozen=True)
class BreakEven:
    """``now`` and ``at`` in ``unit``; ``now`` None: unknown, ``at`` None: the runner-up wins at no value within a
    factor of ``WIDEST``. ``more``: whether ``at`` is more than ``now``.
    """

    what: str
    unit: str
    now: float | None
    at: float | None
    more: bool = False

    def __str__(self) -> str:
        now = "now cannot be known" if self.now is None else f"now {number(self.now)} {self.unit}"
        if self.at is None:
            return f"{self.what}: no change would do"
        return f"{self.what}: {'above' if self.more else 'below'} {number(self.at)} {self.unit} ({now})"

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {"what": self.what, "unit": self.unit, "now": self.now, "at": self.at}


def break_evens(decision: Decision, objective: Objective, link: Link, repredict: Repredict) -> list[BreakEven]:
    """Return where the runner-up of ``decision`` begins to beat all other allowed candidates, with one quantity changed
    at a time.

    Empty without a runner-up, and if something other than ``objective`` decided.
    """
    runner_up = decision.runner_up
    if runner_up is None:
        return []

    def scores(changed: Link, edge: float, server: float) -> dict[str, float]:
        found = {one.key: one for one in repredict(changed, edge, server)}
        return dict(zip(decision.scores, objective.scores([found[name] for name in decision.scores]), strict=True))

    def lead(changed: Link, edge: float, server: float) -> float:
        """Negative while another is better."""
        found = scores(changed, edge, server)
        own = found.pop(runner_up.key)
        return min(found.values()) - own

    if scores(link, 1, 1) != dict(decision.scores) or decision.winner.key != min(
        decision.scores, key=lambda name: decision.scores[name]
    ):
        return []
    # A round trip near zero is searched from a microsecond on.
    rtt = max(link.rtt_ns, 1e3)
    goodput, reported = link.up.bytes_per_second * 8 / 1e6, link.speed_up.value
    found = [
        ("uplink goodput", "Mbit/s", goodput, lambda f: lead(uplink(link, f), 1, 1)),
        ("round trip", "ms", rtt / 1e6, lambda f: lead(round_trip(link, f * rtt), 1, 1)),
        ("server speed", "x", 1.0, lambda f: lead(link, 1, 1 / f)),
        ("edge speed", "x", 1.0, lambda f: lead(link, 1 / f, 1)),
    ]
    result = []
    for what, unit, now, difference in found:
        factor = crossing(difference) if math.isfinite(now) else None
        # One figure for the link, the one that is shown; the curve's own slope only where that is unknown.
        known = now if what != "uplink goodput" else None if reported is None else reported * 8 / 1e6
        at = None if factor is None else factor * (now if known is None else known)
        result.append(BreakEven(what, unit, known, at, factor is not None and factor > 1))
    return result


def crossing(difference: Callable[[float], float]) -> float | None:
    """Return the factor nearest to 1 at which ``difference`` rises to 0 or above; None if there is none."""
    found = []
    for limit in (WIDEST, 1 / WIDEST):
        steps = [math.log(limit) * number / STEPS for number in range(STEPS + 1)]
        number = next((number for number in range(1, STEPS + 1) if difference(math.exp(steps[number])) >= 0), None)
        if number is None:
            continue
        near, far = steps[number - 1], steps[number]
        for _ in range(50):
            middle = (near + far) / 2
            near, far = (middle, far) if difference(math.exp(middle)) < 0 else (near, middle)
        found.append(far)
    return math.exp(min(found, key=abs)) if found else None


def uplink(link: Link, factor: float) -> Link:
    """Return the same link with ``factor`` times the upward goodput."""
    fixed, reported = link.up.ns(0), link.up.stated
    points = tuple((n, fixed + (ns - fixed) / factor) for n, ns in link.up.points)
    return Link(Curve(points, None if reported is None else reported.times(factor)), link.down, link.source)


def round_trip(link: Link, rtt_ns: float) -> Link:
    """Return the same link with another round-trip time."""
    fixed = link.up.ns(0)
    points = tuple((n, ns - fixed + rtt_ns) for n, ns in link.up.points)
    return Link(Curve(points, link.up.stated), link.down, link.source)


def explain(
    decision: Decision, candidates: Sequence[Candidate], breaks: Sequence[BreakEven]
) -> tuple[str, dict[str, Any]]:
    """As text of at most 80 columns (apart from names), and JSON-able."""
    winner, by_key = decision.winner, {one.key: one for one in candidates}
    by_name = {one.name: one.key for one in sorted(candidates, key=lambda one: -one.latency_ns)}
    compared_with = [one.key for one in (decision.runner_up, decision.best_cut) if one is not None]
    alone = [by_name[name] for name in (EDGE_ONLY, CLOUD_ONLY) if name in by_name]
    others = dict.fromkeys(key for key in (*compared_with, *alone) if key != winner.key)
    lines = [f"{winner.key} wins in {decision.objective}: {_figure(decision, winner)}"]
    compared = []
    for name in others:
        other = by_key[name]
        deltas = {stage: other.stages_ns.get(stage, 0.0) - winner.stages_ns.get(stage, 0.0) for stage in STAGES}
        compared.append({"name": name, "latency_ns": other.latency_ns, "more_ns": deltas})
        rejected = decision.rejected.get(other.key)
        apart = other.latency_ns - winner.latency_ns
        takes = f"{name} takes {_ms(other.latency_ns)} ms, {_ms(abs(apart))} ms {'more' if apart >= 0 else 'less'}"
        lines.append(f"{takes}; not allowed: {rejected}" if rejected else takes)
        more = [f"{stage} {ns / 1e6:+.3f}" for stage, ns in deltas.items() if abs(ns) >= 500]
        stages = f"stage by stage, ms: {', '.join(more) or 'the same'}; {other.bytes_up - winner.bytes_up:+,d} bytes up"
        lines += textwrap.wrap(stages, WIDTH, initial_indent="  ", subsequent_indent="    ")
    if decision.runner_up is None:
        lines.append("no other candidate is allowed")
    elif not breaks:
        lines.append(f"what {decision.runner_up.key} would need to win is not known: not the objective alone decided")
    elif all(one.at is None for one in breaks):
        each = ", ".join(one.what for one in breaks)
        lines += textwrap.wrap(f"{decision.runner_up.key} would not win by a change of one alone: {each}", WIDTH)
    else:
        lines.append(f"for {decision.runner_up.key} to win, one of these alone:")
        lines += [f"  {one}" for one in breaks]
    return "\n".join(lines), {"against": compared, "break_even": [one.as_dict() for one in breaks]}


def _figure(decision: Decision, one: Candidate) -> str:
    """Return what the objective compared, and the latency."""
    latency, score = f"{_ms(one.latency_ns)} ms", decision.scores.get(one.key)
    if decision.objective == "latency" or score is None:
        return latency
    if decision.objective in ("server-time", "throughput"):
        own = f"{_ms(score)} ms"
    elif decision.objective == "bytes":
        own = f"{score:,.0f} bytes"
    else:
        own = f"{score * 1e3:.3f} mJ" if decision.objective == "energy" else f"{score:.4g}"
    return f"{own} (latency {latency})"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f}"
