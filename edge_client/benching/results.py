"""Compute the figures of all rates, and write them as a file and as a page; find the knee."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from edge_client.benching.generator import Fired
from edge_client.benching.load import ABANDONED, CONFIDENCE, FEW_BEYOND, Ended, Shot, estimate, quantile
from edge_client.pages import counted, duration, stem
from edge_client.pages import render as page_of
from edge_client.screen import printable, size
from shared_hooks.errors import SpecError

# The figures of one rate, from the outcomes of its requests.


QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
CDF_POINTS: Final = 120
LATE_SHARE, LATE_NS, BUSY = 0.1, 1_000_000, 0.9
"""The generator is the bottleneck if its own lateness exceeds that share of the median latency, and that time; or if
it, or the machine, is that busy.
"""


def step(
    rate: float,
    shots: Sequence[Shot],
    fired: Sequence[Fired],
    *,
    warmup: float,
    seconds: float,
    deadline: float,
    ways: Sequence[str],
    machine: float,
    recorded: bool,
) -> dict[str, Any]:
    """Return one rate's figures as JSON data. ``shots``: all of the rate, in order; those of the first ``warmup``
    seconds are not counted. ``ways``: the names of the cuts; ``machine``: the share of all processors that was busy, 0
    to 1.

    Latencies are of all counted requests; one without an answer counts as slower than any other. Times in ns.
    """
    every = {one.number: one for each in fired for one in each.ended}
    why = next((each.why for each in fired if each.why is not None), None)
    counted = [shot for shot in shots if shot.at >= warmup and shot.number in every]
    if why is not None:  # it had no more time than this
        seconds = max(0.0, max((shot.at for shot in shots if shot.number in every), default=0.0) - warmup)
    known = [(shot, every[shot.number]) for shot in counted]
    ends = [(shot, one) for shot, one in known if one.error != ABANDONED]
    took = np.array([math.inf if one.error else one.took_ns for _, one in ends], dtype=float)
    limit = 1e9 * deadline
    in_time = int((took <= limit).sum())
    answered = int(np.isfinite(took).sum())
    refused = sum(one.refused for _, one in ends)
    return {
        "rate": rate,
        "offered": len(ends) / seconds if seconds else 0.0,
        "seconds": seconds,
        "requests": len(ends),
        "answered": answered,
        "in_time": in_time,
        "late": answered - in_time,
        "refused": refused,
        "lost": len(ends) - answered - refused,
        "put_off": sum(one.put_offs for _, one in ends),
        "abandoned": len(known) - len(ends),
        "errors": dict(Counter(one.error for _, one in ends if one.error).most_common()),
        "throughput": _throughput(shots, every, warmup, seconds),
        "goodput": _goodput(took, limit, seconds),
        "latency": _latency(took),
        "cdf": _cdf(took),
        "ways": [_way(ends, at, name) for at, name in enumerate(ways)],
        "server": _server(ends),
        "generator": _generator(fired, ends, machine, recorded),
        "ended": why,
    }


def _throughput(shots: Sequence[Shot], every: dict[int, Ended], warmup: float, seconds: float) -> float:
    """Return answers per second received in the measured period, whenever they were requested."""
    came = [shot.at + one.took_ns / 1e9 for shot in shots if (one := every.get(shot.number)) and not one.error]
    return sum(warmup <= at < warmup + seconds for at in came) / seconds if seconds else 0.0


def _goodput(took: np.ndarray, limit: float, seconds: float) -> dict[str, Any]:
    """Return requests per second answered in time."""
    rate = len(took) / seconds if seconds else 0.0
    if not len(took):
        return {"value": 0.0, "low": None, "high": None, "spread": None}
    found = estimate(took, lambda some: rate * float((some <= limit).mean()))
    least = 1 / len(took)  # if all were in time, one more might not be
    return {**found.as_dict(), "spread": None if found.spread is None else max(found.spread, least)}


def _latency(took: np.ndarray) -> dict[str, Any]:
    known = took[np.isfinite(took)]
    found: dict[str, Any] = {
        "mean_ns": float(known.mean()) if len(known) else None,
        "max_ns": float(known.max()) if len(known) else None,
    }
    for name, share in QUANTILES.items():
        beyond = len(took) - math.ceil(share * len(took))
        figure = estimate(took, partial(quantile, share=share)).as_dict()
        found[name] = {**figure, "beyond": beyond, "sure": beyond >= FEW_BEYOND}
    return found


def _cdf(took: np.ndarray) -> list[list[float]]:
    """Return [ns, share of all requests answered within], denser towards the end."""
    known, count = np.sort(took[np.isfinite(took)]), len(took)
    if not len(known):
        return []
    tails = 1 - np.geomspace(1, 1 / (len(known) + 1), CDF_POINTS // 2)
    places = np.unique((np.concatenate([np.linspace(0, 1, CDF_POINTS // 2), tails]) * (len(known) - 1)).astype(int))
    return [[float(known[at]), float((at + 1) / count)] for at in places]


def _way(ends: Sequence[tuple[Shot, Ended]], at: int, name: str) -> dict[str, Any]:
    mine = [one for shot, one in ends if shot.cut == at]
    took = np.array([math.inf if one.error else one.took_ns for one in mine], dtype=float)
    sent = [one.bytes_up for one in mine if not one.error]
    quantiles = {f"{key}_ns": _finite(quantile(took, share)) for key, share in QUANTILES.items()}
    answered = int(np.isfinite(took).sum())
    bytes_up = sum(sent) / len(sent) if sent else None
    return {"name": name, "requests": len(mine), "answered": answered, **quantiles, "bytes_up": bytes_up}


def _server(ends: Sequence[tuple[Shot, Ended]]) -> dict[str, Any]:
    """Return what the server reported with its answers: requests waiting or running, workers, its wait, batch sizes."""
    reported = [one for _, one in ends if one.pending >= 0]
    answered = [one.batch_size for _, one in ends if not one.error]
    return {
        "pending_mean": sum(one.pending for one in reported) / len(reported) if reported else None,
        "pending_max": max((one.pending for one in reported), default=None),
        "workers": max((one.workers for one in reported), default=None),
        "queue_ns": sum(one.queue_ns for one in reported) / len(reported) if reported else None,
        "batch_size": sum(answered) / len(answered) if answered else None,
    }


def _generator(
    fired: Sequence[Fired], ends: Sequence[tuple[Shot, Ended]], machine: float, recorded: bool
) -> dict[str, Any]:
    late = np.array([one.late_ns for _, one in ends], dtype=float)
    took = np.array([math.inf if one.error else one.took_ns for _, one in ends], dtype=float)
    p99, median = quantile(late, 0.99), quantile(took, 0.5)
    processor = max((each.processor / each.seconds for each in fired if each.seconds), default=0.0)
    why = []
    if p99 > max(LATE_NS, LATE_SHARE * median):
        why.append(f"1 request in 100 began {p99 / 1e6:.1f} ms too late or later")
    if recorded and processor >= BUSY:  # a process with heads may well use more than one processor
        why.append(f"a process that sends had {processor:.0%} of a processor, of which Python has one")
    if machine >= BUSY:
        why.append(f"this machine's processors were {machine:.0%} busy")
    return {
        "late_p50_ns": _finite(quantile(late, 0.5)),
        "late_p99_ns": _finite(p99),
        "late_max_ns": float(late.max()) if len(late) else None,
        "processor": processor,
        "machine": machine,
        "bottleneck": "; ".join(why) or None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


FORMAT: Final = "isthmus bench 1"
KEPT: Final = 0.95
"""Share of the offered rate answered in time, below which a rate is beyond the knee."""


def knee(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the highest rate of which `KEPT` was answered in time, as of all lower ones; None if there is none."""
    found = None
    for one in sorted(steps, key=lambda each: each["rate"]):
        if not one["requests"] or one["in_time"] < KEPT * one["requests"]:
            break
        found = float(one["rate"])
    return found


def is_bench(path: str | Path) -> bool:
    """Return whether it is such a file, of any version."""
    try:
        if not Path(path).is_file():
            return False
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and str(value.get("format")).startswith("isthmus bench ")


def read(path: str | Path) -> dict[str, Any]:
    """Read a file. Raises SpecError for anything else, or another version."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise SpecError(f"{path}: its format is {value['format']!r:.60}; this release reads {FORMAT!r}")
        for one in value["steps"]:
            figures = [one["rate"], one["requests"], one["in_time"]]
            figures += [one["goodput"]["spread"]]
            figures += [one["latency"][name][key] for name in ("p50", "p90", "p99") for key in ("value", "spread")]
            if not all(figure is None or isinstance(figure, (int, float)) for figure in figures):
                raise TypeError(f"at {one['rate']!r:.20} a second a figure is no number")
            _ = [one["latency"][name]["sure"] for name in ("p50", "p90", "p99")], one["generator"]["bottleneck"]
        _ = dict(value["settings"]), value["knee"], value["ended"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SpecError(f"{path}: not the results of a bench: {type(error).__name__}: {error}") from error
    known: dict[str, Any] = value
    return known


# Two benches side by side: what became better or worse at each rate, as far as the noise allows.


IN_TIME: Final = "in time"
FIGURES: Final = ("p50", "p90", "p99", IN_TIME)
"""Figures compared. Goodput depends on how many happened to arrive, so its share of the arrivals is used."""
LOWER, HIGHER, SAME, FEW = "lower", "higher", "no difference seen", "too few to say"


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare each figure of each rate that both have: rate, figure, a, b, ratio (B to A), low, high, verdict.

    Intervals hold together with `CONFIDENCE` for all rows (Bonferroni), and cover each run's own noise, not differences
    between runs. Latencies in ns, None among requests without an answer; "in time" is a share, 0 to 1.
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
    """Return other differences, in words."""
    lines = []
    for key in dict.fromkeys([*a["settings"], *b["settings"]]):
        one, other = a["settings"].get(key), b["settings"].get(key)
        if one != other:
            lines.append(f"{key}: {_short(one)} / {_short(other)}")
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


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# The figures as a page: rate against latency, goodput, the distribution; one file that loads nothing from the
# network.


TEMPLATE: Final = Path(__file__).parent / "page.html.j2"
CONTENTS: Final = (
    ("latency", "latency against rate"),
    ("goodput", "goodput"),
    ("distribution", "distribution"),
    ("rates", "every rate"),
    ("generator", "the generator"),
    ("settings", "how it was measured"),
)


def render(known: Mapping[str, Any]) -> str:
    """Render `Benched.as_dict` as HTML."""
    steps, how = known["steps"], known["settings"]
    model = printable(known["model"])
    busy = [one for one in steps if one["generator"]["bottleneck"]]
    notes = [f"It is not complete: {printable(known['ended'])}."] if known["ended"] else []
    notes += [
        f"At {one['rate']:g} a second the generator was a bottleneck: {one['generator']['bottleneck']}." for one in busy
    ]
    return page_of(
        TEMPLATE,
        (),
        {
            "file": stem(f"{model}-bench"),
            "model": model,
            "deadline_ns": 1e9 * how["deadline"],
            "steps": [_drawn(one) for one in steps],
        },
        title=f"{model}: bench",
        kicker="Isthmus bench",
        heading=f"{model}: an open load of {counted(how['clients'], 'client')}",
        lead=f"{how['arrivals']} arrivals; cuts {printable(how['split'])}; codec {printable(how['codec'])}; "
        + ("frontiers recorded before." if how["recorded"] else "heads run here."),
        partial=" ".join(notes) or None,
        contents=CONTENTS,
        cards=_cards(known),
        kept=f"{KEPT:.0%}",
        deadline=duration(1e9 * how["deadline"]),
        rates=_rates(known),
        outcomes=_outcomes(known),
        ways=_ways(known),
        errors=[[f"{one['rate']:g}", name, f"{count}"] for one in steps for name, count in one["errors"].items()],
        generator=_generators(known),
        facts=[{"title": "Settings", "rows": [(key, printable(str(value))) for key, value in how.items()]}],
    )


def _drawn(one: Mapping[str, Any]) -> dict[str, Any]:
    quantiles = {
        name: {key: one["latency"][name][key] for key in ("value", "low", "high", "beyond")}
        for name in ("p50", "p90", "p99")
    }
    plain = {key: one[key] for key in ("rate", "offered", "throughput", "goodput", "cdf", "requests", "answered")}
    return {**plain, **quantiles}


def _cards(known: Mapping[str, Any]) -> list[dict[str, str]]:
    steps, limit = known["steps"], duration(1e9 * known["settings"]["deadline"])
    if not steps:
        return [{"title": "Rates measured", "figure": "0", "name": "", "text": ""}]
    cards = []
    found = knee(steps)
    figure = "none" if found is None else f"{found:g}/s"
    name = f"{KEPT:.0%} answered within {limit}, up to this rate"
    cards.append({"title": "The knee", "figure": figure, "name": "", "text": name})
    best = max(steps, key=lambda one: one["goodput"]["value"])
    text = f"at {best['rate']:g}/s offered"
    cards.append({"title": "Most goodput", "figure": f"{best['goodput']['value']:.1f}/s", "name": "", "text": text})
    at = next((one for one in steps if one["rate"] == found), steps[0])
    p50, p99 = at["latency"]["p50"], at["latency"]["p99"]
    text = f"p50 {duration(p50['value'])}; {counted(p99['beyond'], 'request')} beyond p99"
    figure = duration(p99["value"])
    cards.append({"title": f"p99 at {at['rate']:g}/s", "figure": figure, "name": "", "text": text})
    return cards


def _rates(known: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    headers = ["rate", "offered", "throughput", "goodput", "p50", "p90", "p99", "p99 between", "beyond p99"]
    rows = []
    for one in known["steps"]:
        quantiles, p99 = one["latency"], one["latency"]["p99"]
        unsure = p99["low"] is None or p99["high"] is None
        rows.append(
            [
                f"{one['rate']:g}",
                *(f"{value:.1f}" for value in (one["offered"], one["throughput"], one["goodput"]["value"])),
                *(duration(quantiles[name]["value"]) for name in ("p50", "p90", "p99")),
                "–" if unsure else f"{duration(p99['low'])} and {duration(p99['high'])}",
                f"{p99['beyond']}",
            ]
        )
    return headers, rows


def _outcomes(known: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    keys = ("requests", "in_time", "late", "refused", "lost", "put_off")
    headers = ["rate", *(key.replace("_", " ") for key in keys), "pending there", "computed together"]
    rows = []
    for one in known["steps"]:
        reported = [one["server"][key] for key in ("pending_mean", "batch_size")]
        shown = ["–" if value is None else f"{value:.1f}" for value in reported]
        rows.append([f"{one['rate']:g}", *(f"{one[key]}" for key in keys), *shown])
    return headers, rows


def _ways(known: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    headers = ["cut after", "rate", "requests", "answered", "p50", "p90", "p99", "bytes up"]
    rows = [
        [
            printable(way["name"]),
            f"{one['rate']:g}",
            f"{way['requests']}",
            f"{way['answered']}",
            *(duration(way[f"{name}_ns"]) for name in ("p50", "p90", "p99")),
            "–" if way["bytes_up"] is None else size(round(way["bytes_up"])),
        ]
        for at in range(max((len(one["ways"]) for one in known["steps"]), default=0))
        for one in known["steps"]
        for way in one["ways"][at : at + 1]
    ]
    return headers, rows


def _generators(known: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    headers = ["rate", "late p50", "late p99", "late at most", "of a processor", "machine busy", "bottleneck"]
    rows = []
    for one in known["steps"]:
        its = one["generator"]
        late = [duration(its[key]) for key in ("late_p50_ns", "late_p99_ns", "late_max_ns")]
        shares = [f"{its[key]:.0%}" for key in ("processor", "machine")]
        rows.append([f"{one['rate']:g}", *late, *shares, its["bottleneck"] or "no"])
    return headers, rows
