"""The page of two sweeps side by side: ratios with their intervals, both times, what else differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from edge_client.pages.rendering import render as page_of
from edge_client.pages.words import counted, duration
from edge_client.screen.text import size
from edge_client.sweeping.compare import SUM

TEMPLATE: Final = Path(__file__).parent / "compare.html.j2"
CONTENTS: Final = (
    ("differences", "what else differs"),
    ("ratios", "how much longer"),
    ("times", "both times"),
    ("ways", "all ways"),
)
HEADERS: Final = ("way", "A", "B", "B / A", "interval", "requests", "B is")


def render(known: Mapping[str, Any]) -> str:
    """The page of `compare.as_dict`, as HTML."""
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
