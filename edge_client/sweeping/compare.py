"""Compare two sweeps: what became faster or slower, given the noise.

For each way that both have, and each of its stages: the ratio of the medians, B to A, with an interval. It is a
bootstrap interval: both sides' requests are resampled with replacement, and the spread of the log ratio, taken as
normal, is widened so that all intervals of one stage hold *together* with the requested confidence (Bonferroni): one in
twenty comparisons of identical runs shows any difference. Differences between whole runs (a warmer processor, other
load) are in neither run's noise: if they matter, run each twice.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, Literal

import numpy as np

from edge_client.pages import counted, duration
from edge_client.pages import render as page_of
from edge_client.planning.objective import STAGES
from edge_client.screen import size
from edge_client.sweeping.records import SEGMENTS, STAGE_SEGMENTS
from shared_hooks.errors import SpecError
from shared_hooks.showing import short

Verdict = Literal["faster", "slower", "no difference seen", "too few to say"]
FEWEST: Final = 5
"""Minimum requests on either side for a verdict."""
DRAWS: Final = 1000
CONFIDENCE: Final = 0.95
SUM: Final = "end to end"


@short
@dataclass(frozen=True)
class ComparedStage:
    """One stage of one way. Times are medians in ns; ``low`` to ``high``: the interval of ``ratio``, B to A."""

    way: str
    mode: str
    stage: str
    a_ns: float
    b_ns: float
    n_a: int
    n_b: int
    ratio: float | None
    low: float | None
    high: float | None
    verdict: Verdict


@short
@dataclass(frozen=True)
class Sweep:
    """A sweep's folder: the summary, and for each way the times (ns) of its answered requests by stage."""

    folder: Path
    summary: Mapping[str, Any]
    times: Mapping[tuple[str, str], Mapping[str, np.ndarray]]


def read(folder: str | Path) -> Sweep:
    """Read a sweep's folder. Raises SpecError for anything else."""
    import polars as pl

    path = Path(folder)
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        requests = pl.read_parquet(path / "requests.parquet")
        if not str(summary["format"]).startswith("isthmus sweep summary "):
            raise ValueError(f"format {summary['format']!r}")
        good = requests.filter(pl.col("error").is_null() & ~pl.col("layers"))
        times = {
            (str(key[0]), str(key[1])): _stages(part)
            for key, part in good.group_by(["cut", "mode"], maintain_order=True)
        }
    except FileNotFoundError as error:
        if not path.exists():
            raise SpecError(f"{path}: no such file or folder; expected a sweep's folder, or a bench's JSON") from error
        raise SpecError(
            f"{path} is not the folder of a sweep: it has no {Path(str(error.filename or '')).name}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError) as error:
        raise SpecError(f"{path}: not the results of a sweep: {type(error).__name__}: {error}") from error
    return Sweep(path, summary, times)


def _stages(part: Any) -> dict[str, np.ndarray]:
    def total(segments: Sequence[str]) -> np.ndarray:
        columns = [f"{name}_ns" for segment in segments for name in SEGMENTS[segment]]
        return np.asarray(sum(part[column].to_numpy().astype(float) for column in columns))

    return {SUM: total(tuple(SEGMENTS)), **{stage: total(STAGE_SEGMENTS[stage]) for stage in STAGES}}


def compare(a: Sweep, b: Sweep, *, seed: int = 0) -> list[ComparedStage]:
    """Compare every stage of every way that both have, in A's order; a way's total first."""
    ways = [way for way in a.times if way in b.times]
    dice = np.random.default_rng(seed)
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / max(1, len(ways)))
    return [
        _compared(way, stage, a.times[way][stage], b.times[way][stage], z, dice)
        for way in ways
        for stage in (SUM, *STAGES)
        if a.times[way][stage].any() or b.times[way][stage].any()
    ]


def _compared(
    way: tuple[str, str], stage: str, a: np.ndarray, b: np.ndarray, z: float, dice: np.random.Generator
) -> ComparedStage:
    median_a, median_b = float(np.median(a)), float(np.median(b))
    ratio = low = high = None
    verdict: Verdict = "too few to say"
    if median_a > 0 and median_b > 0:
        ratio = median_b / median_a
    if ratio is not None and min(len(a), len(b)) >= FEWEST:
        spread = _spread(a, b, dice)
        low, high = ratio * math.exp(-z * spread), ratio * math.exp(z * spread)
        verdict = "faster" if high < 1 else "slower" if low > 1 else "no difference seen"
    return ComparedStage(*way, stage, median_a, median_b, len(a), len(b), ratio, low, high, verdict)


def _spread(a: np.ndarray, b: np.ndarray, dice: np.random.Generator) -> float:
    """Return the standard deviation of the log ratio of medians."""
    medians = [np.median(dice.choice(one, size=(DRAWS, len(one))), axis=1) for one in (a, b)]
    floor = np.finfo(float).tiny
    return float(np.std(np.log(np.maximum(medians[1], floor)) - np.log(np.maximum(medians[0], floor))))


def differences(a: Sweep, b: Sweep) -> list[str]:
    """Return other differences, in words: model, machines, versions, settings."""
    lines = []
    ours, theirs = dict(a.summary["settings"]), dict(b.summary["settings"])
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        one, other = ours.get(key), theirs.get(key)
        if one == other or key == "ways":
            continue
        if key == "inputs":
            lines.append("the inputs are not the same")
        else:
            lines.append(f"{key}: {_short(one)} / {_short(other)}")
    for name, version in a.summary["versions"].items():
        if (other := b.summary["versions"].get(name)) != version and name not in ("torch", "isthmus"):
            lines.append(f"{name}: {_short(version)} / {_short(other)}")
    machines = [(one.summary.get("prediction") or {}).get("machines", {}).get("cloud") or {} for one in (a, b)]
    if all(machines) and machines[0].get("id") != machines[1].get("id"):
        lines.append(f"the cloud: {_short(machines[0].get('name'))} / {_short(machines[1].get('name'))}")
    for one, name in ((a, "A"), (b, "B")):
        if one.summary["ended"]:
            lines.append(f"{name} is not complete: {one.summary['ended']}")
    alone = [[f"{way}{'' if mode == 'networked' else ' (local)'}" for way, mode in one] for one in _alone(a, b)]
    for ways, name in zip(alone, ("A", "B"), strict=True):
        if ways:
            lines.append(
                f"only in {name}: {', '.join(ways[:4])}{f' and {len(ways) - 4} more' if len(ways) > 4 else ''}"
            )
    return lines


def _alone(a: Sweep, b: Sweep) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    return [way for way in a.times if way not in b.times], [way for way in b.times if way not in a.times]


def as_dict(a: Sweep, b: Sweep, compared: Sequence[ComparedStage]) -> dict[str, Any]:
    """Return JSON data."""
    return {
        "a": str(a.folder),
        "b": str(b.folder),
        "confidence": CONFIDENCE,
        "ways": len({(one.way, one.mode) for one in compared}),
        "differences": differences(a, b),
        "best": [_best(a), _best(b)],
        "compared": [asdict(one) for one in compared],
        "bytes": bytes_changed(a, b),
    }


def bytes_changed(a: Sweep, b: Sweep) -> list[dict[str, Any]]:
    """Return the ways whose bytes up or down have changed."""
    before = {(way["name"], way["mode"]): way for way in a.summary["ways"]}
    found = []
    for way in b.summary["ways"]:
        old = before.get((way["name"], way["mode"]))
        if old is None or old["bytes_up"] is None or way["bytes_up"] is None:
            continue
        if (old["bytes_up"], old["bytes_down"]) != (way["bytes_up"], way["bytes_down"]):
            found.append(
                {
                    "way": way["name"],
                    "mode": way["mode"],
                    "up": [old["bytes_up"], way["bytes_up"]],
                    "down": [old["bytes_down"], way["bytes_down"]],
                }
            )
    return found


def _best(sweep: Sweep) -> str | None:
    measured = sweep.summary["decision"]["measured"]
    return measured["winner"] if measured else None


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# The page of two sweeps side by side: ratios with their intervals, both times, and other differences.


TEMPLATE: Final = Path(__file__).parent / "compare.html.j2"
CONTENTS: Final = (
    ("differences", "what else differs"),
    ("ratios", "how much longer"),
    ("times", "both times"),
    ("ways", "all ways"),
)
HEADERS: Final = ("way", "A", "B", "B / A", "interval", "requests", "B is")


def render(known: Mapping[str, Any]) -> str:
    """Render `compare.as_dict` as HTML."""
    sums = [one for one in known["compared"] if one["stage"] == SUM]
    requests = [sum(one[key] for one in sums) for key in ("n_a", "n_b")]
    return page_of(
        TEMPLATE,
        ("bars",),
        {"file": "compare", "a": known["a"], "b": known["b"], "compared": known["compared"]},
        title=f"{known['a']} and {known['b']}: two sweeps",
        kicker="Isthmus compare",
        heading="Two sweeps side by side",
        lead=f"A is {known['a']}, B is {known['b']}: {counted(len(sums), 'way')} in both, with {requests[0]} requests"
        f" of A and {requests[1]} of B.",
        partial=None,
        contents=[one for one in CONTENTS if one[0] != "differences" or known["differences"]],
        cards=_cards(known, sums),
        differences=known["differences"],
        confidence=f"{known['confidence']:.0%}",
        table=(HEADERS, [_row(one) for one in sums]),
        bytes=(("way", "up", "down"), [_bytes(one) for one in known["bytes"]]),
    )


def _cards(known: Mapping[str, Any], sums: list[Mapping[str, Any]]) -> list[dict[str, str]]:
    counts = Counter(one["verdict"] for one in sums)
    sure = counts["faster"] + counts["slower"]
    words = [f"{count} {verdict}" for verdict, count in counts.most_common()]
    figure = f"{sure} of {len(sums)}"
    cards = [{"title": "Ways that differ for sure", "figure": figure, "name": "", "text": ", ".join(words)}]
    ratios = sorted(one["ratio"] for one in sums if one["ratio"] is not None)
    if ratios:
        text = f"from {ratios[0]:.2f} to {ratios[-1]:.2f}"
        middle = f"{ratios[len(ratios) // 2]:.2f}×"
        cards.append({"title": "B / A, in the middle of all ways", "figure": middle, "name": "", "text": text})
    times = {one["way"]: one for one in sums}
    for name, best, key in zip(("A", "B"), known["best"], ("a_ns", "b_ns"), strict=True):
        if best is not None:
            time = duration(times[best][key]) if best in times else "–"
            cards.append({"title": f"Best in {name}", "figure": time, "name": best, "text": ""})
    return cards


def _name(one: Mapping[str, Any]) -> str:
    return f"{one['way']} (local)" if one["mode"] == "local" and one["way"] != "edge-only" else str(one["way"])


def _row(one: Mapping[str, Any]) -> list[str]:
    return [
        _name(one),
        duration(one["a_ns"]),
        duration(one["b_ns"]),
        "–" if one["ratio"] is None else f"{one['ratio']:.3f}",
        "–" if one["low"] is None else f"{one['low']:.2f} to {one['high']:.2f}",
        f"{one['n_a']} and {one['n_b']}",
        one["verdict"],
    ]


def _bytes(one: Mapping[str, Any]) -> list[str]:
    return [_name(one), *(" to ".join(size(round(value)) for value in one[key]) for key in ("up", "down"))]
