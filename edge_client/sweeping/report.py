"""The page of a sweep: what is drawn, what is said, and the table of all ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from edge_client.pages import blocks, duration, short, stem
from edge_client.pages import render as page_of
from edge_client.screen.text import size
from edge_client.spoken import EDGE_ONLY
from edge_client.sweeping import wording
from edge_client.sweeping.runner import drawn as attention
from edge_client.sweeping.runner import section
from edge_client.sweeping.summary import pareto
from edge_client.sweeping.wording import is_choice, is_cut

TEMPLATE: Final = Path(__file__).parent / "page.html.j2"
CHARTS: Final = ("bars", "columns", "scatter", "heat")
CONTENTS: Final = (
    ("stages", "time by stage"),
    ("agreement", "predicted and measured"),
    ("bytes", "bytes"),
    ("energy", "energy"),
    ("pareto", "what to choose between"),
    ("layers", "layers"),
    ("local", "what splitting costs"),
    ("observed", "what observers saw"),
    ("ways", "all ways"),
    ("failures", "what failed"),
    ("facts", "how it was measured"),
)
Way = Mapping[str, Any]


def render(known: Mapping[str, Any]) -> str:
    """The page of summary.json (`outcome.Summary.as_dict`), as HTML."""
    ways, decision = known["ways"], known["decision"]
    choices = [way for way in ways if is_choice(way) and way["latency_ns"] is not None]
    winner = decision["measured"]["winner"] if decision["measured"] else None
    whole = next((way["segments_ns"]["edge"] for way in choices if way["name"] == EDGE_ONLY), None)
    model = known["settings"]["model"]
    costly = [way for way in choices if way["edge_energy"]["value"] is not None]
    leakage = known.get("leakage", {})
    leaking = [way for way in choices if way["name"] in leakage]
    names = [way["name"] for way in ways if is_cut(way)]
    names += [one["layer"] for one in known["layers"] if one["layer_id"] is not None]
    drawn = {
        "file": stem(model),
        "model": model,
        "ways": ways,
        "layers": known["layers"],
        "blocks": blocks(list(dict.fromkeys(names))),
        "winner": winner,
        "whole_ns": whole,
        "fronts": {
            "bytes": _front(choices, lambda way: way["bytes_up"] + way["bytes_down"]),
            "energy": _front(costly, lambda way: way["edge_energy"]["value"]),
            "leakage": _front(leaking, lambda way: leakage[way["name"]]),
        },
        "leakage": leakage,
        "attention": attention(known),
        "engines": known.get("engines", {}),
    }
    observed = section(known)
    failures = [
        f"{one['count']} times, first with {one['input']} at {one['cut']} ({one['mode']}): {one['error']}"
        for one in known["failures"]
    ]
    there = {"observed": observed, "failures": failures}
    tables = [
        _table("Every way to run a request", [way for way in ways if is_choice(way)], winner),
        _table("The cuts again, in one process", [way for way in ways if not is_choice(way)], None),
        *(_engine_table(name, one, ways) for name, one in known.get("engines", {}).items()),
    ]
    return page_of(
        TEMPLATE,
        CHARTS,
        drawn,
        title=f"{model}: a sweep over {sum(1 for way in choices if is_cut(way))} cuts",
        kicker="Isthmus sweep",
        heading=f"Where to cut {model}",
        lead=wording.lead(known),
        partial=wording.partial(known),
        engines=list(known.get("engines", {})),
        contents=[one for one in CONTENTS if there.get(one[0], True)],
        cards=wording.cards(ways, decision, winner),
        explanation=wording.explanation(known),
        plan=(known["prediction"] or {}).get("explanation"),
        agreement=wording.agreement(decision, known["prediction"]),
        energy=wording.energy_lines(choices),
        front_energy=bool(costly),
        front_leakage=bool(leaking),
        local=wording.local(ways, whole),
        tables=tables,
        observed=observed,
        failures=failures,
        facts=wording.facts(known),
    )


def _front(ways: Sequence[Way], cost: Any) -> list[str]:
    return [ways[index]["name"] for index in pareto([(way["latency_ns"], cost(way)) for way in ways])]


HEADERS: Final = (
    *("way", "layer", "latency", "quartiles", "predicted", "off by", "up", "down"),
    *("energy, edge", "energy, cloud", "exact", "same top 1", "failed"),
)


def _table(title: str, ways: Sequence[Way], winner: str | None) -> dict[str, Any]:
    """Title, headers, rows and the numbers of the best ones, without columns that have nothing to say."""
    rows = [_row(way) for way in ways]
    reported = [
        at for at in range(len(HEADERS)) if at < 3 or any(row[at] not in ("", "–", "unavailable") for row in rows)
    ]
    return {
        "title": title,
        "headers": [HEADERS[at] for at in reported],
        "rows": [[row[at] for at in reported] for row in rows],
        "best": [at for at, way in enumerate(ways) if way["name"] == winner],
    }


def _engine_table(name: str, measured: Mapping[str, Any], ways: Sequence[Way]) -> dict[str, Any]:
    """Requests with heads in another engine, beside torch's."""
    torchs = {way["name"]: way["latency_ns"] for way in ways if is_choice(way) and is_cut(way)}
    cuts = measured["cuts"]
    best = min(cuts, key=lambda cut: cuts[cut]["latency_ns"], default=None)
    rows = [
        [
            cut,
            duration(one["latency_ns"]),
            "–" if torchs.get(cut) is None else duration(torchs[cut]),
            duration(one["head_ns"]),
            size(round(one["bytes_up"])),
            f"{one['difference']:.1e}",
        ]
        for cut, one in cuts.items()
    ]
    return {
        "title": f"Heads in {name}",
        "headers": ["cut", "latency", "with torch", "head", "up", "off by"],
        "rows": rows,
        "best": [at for at, cut in enumerate(cuts) if cut == best],
    }


def _row(way: Way) -> list[str]:
    predicted, quartiles = way["predicted"], way["quartiles_ns"]
    answered = way["requests"] - way["failed"]
    off = predicted["error_percent"] if predicted else None
    spread = "–" if quartiles is None else f"{duration(quartiles[0])} to {duration(quartiles[2])}"
    return [
        way["name"],
        str(way["layer_id"]) if is_cut(way) else "",
        "–" if quartiles is None else duration(way["latency_ns"]),
        spread,
        duration(predicted["latency_ns"]) if predicted else "–",
        "–" if off is None else f"{off:+.1f} %",
        "–" if way["bytes_up"] is None else size(round(way["bytes_up"])),
        "–" if way["bytes_down"] is None else size(round(way["bytes_down"])),
        _joules(way["edge_energy"]),
        _joules(way["cloud_energy"]),
        f"{way['exact']} of {answered}",
        "–" if way["agreeing"] is None else f"{way['agreeing']} of {answered}",
        str(way["failed"] or ""),
    ]


def _joules(reading: Mapping[str, Any]) -> str:
    value = reading["value"]
    if value is None:
        return "unavailable"
    for factor, unit in ((1.0, "J"), (1e-3, "mJ")):
        if abs(value) >= factor:
            return f"{short(value / factor)} {unit}, {reading['status']}"
    return f"{short(value / 1e-6)} µJ, {reading['status']}"
