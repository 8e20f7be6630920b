"""The page: one file with everything in it, that asks no network for anything.

What users wrote (names of models, layers, files; errors) reaches the page in two ways only: escaped by the template,
and as JSON that the page's script puts in as text. Its policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from edge_client.modes import CLOUD_ONLY, EDGE_ONLY
from edge_client.screen.text import size
from edge_client.sweeping.observed import section
from edge_client.sweeping.summary import pareto

HERE: Final = Path(__file__).parent
Way = Mapping[str, Any]


def render(known: Mapping[str, Any]) -> str:
    """The page of summary.json (`outcome.Summary.as_dict`), as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    script = (HERE / "page.js").read_text(encoding="utf-8")
    ways, decision = known["ways"], known["decision"]
    choices = [way for way in ways if _is_choice(way) and way["latency_ns"] is not None]
    winner = decision["measured"]["winner"] if decision["measured"] else None
    whole = next((way["segments_ns"]["edge"] for way in choices if way["name"] == EDGE_ONLY), None)
    drawn = {
        "ways": ways,
        "layers": known["layers"],
        "winner": winner,
        "whole_ns": whole,
        "fronts": {
            "bytes": _front(choices, lambda way: way["bytes_up"] + way["bytes_down"]),
            "energy": _front(
                [way for way in choices if way["edge_energy"]["value"] is not None],
                lambda way: way["edge_energy"]["value"],
            ),
        },
    }
    page = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("page.html.j2")
    return page.render(
        model=known["settings"]["model"],
        count=sum(1 for way in choices if _is_cut(way)),
        lead=_lead(known),
        partial=_partial(known),
        cards=_cards(ways, decision, winner),
        explanation=_explanation(known),
        plan=(known["prediction"] or {}).get("explanation"),
        agreement=_agreement(decision, known["prediction"]),
        energy=_energy(choices),
        local=_local(ways, whole),
        table=[_row(way, winner) for way in ways],
        observed=section(known),
        failures=[
            f"{one['count']} times, first with {one['input']} at {one['cut']} ({one['mode']}): {one['error']}"
            for one in known["failures"]
        ],
        facts=_facts(known),
        css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(inert(drawn)),
    )


def inert(value: Any) -> str:
    """JSON that can stand in a script element: no text in it ends the element or opens a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def duration(ns: float | None) -> str:
    """Nanoseconds with a unit that suits."""
    if ns is None:
        return "–"
    for factor, unit in ((1e9, "s"), (1e6, "ms")):
        if abs(ns) >= factor:
            return f"{_short(ns / factor)} {unit}"
    return f"{_short(ns / 1e3)} µs"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _joules(reading: Mapping[str, Any]) -> str:
    value = reading["value"]
    if value is None:
        return "unavailable"
    for factor, unit in ((1.0, "J"), (1e-3, "mJ")):
        if abs(value) >= factor:
            return f"{_short(value / factor)} {unit}, {reading['status']}"
    return f"{_short(value / 1e-6)} µJ, {reading['status']}"


def _is_cut(way: Way) -> bool:
    return bool(way["layer_id"] is not None and way["layer_id"] >= 0)


def _is_choice(way: Way) -> bool:
    return bool(way["mode"] == "networked" or way["name"] == EDGE_ONLY)


def _front(ways: Sequence[Way], cost: Any) -> list[str]:
    return [ways[index]["name"] for index in pareto([(way["latency_ns"], cost(way)) for way in ways])]


def _lead(known: Mapping[str, Any]) -> str:
    settings, ways = known["settings"], known["ways"]
    requests = sum(way["requests"] for way in ways)
    inputs = len(known["measured_inputs"])
    where = "a server on the same machine" if settings["server"] == "started here" else settings["server"]
    return (
        f"{requests} requests: {_count(inputs, 'input')}, {_count(settings['repetitions'], 'repetition')} each, through"
        f" {sum(1 for way in ways if _is_choice(way))} ways, with {where} as the cloud. {known['created'][:10]}."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _partial(known: Mapping[str, Any]) -> str | None:
    wanted, got = len(known["settings"]["inputs"]), len(known["measured_inputs"])
    short = [number for number in known["repetitions"] if number < known["settings"]["repetitions"]]
    if known["ended"] is None and got == wanted and not short:
        return None
    missing = f"{got} of {wanted} inputs" + (f", {len(short)} of them with fewer repetitions" if short else "")
    why = f" ({known['ended']})" if known["ended"] else ""
    return f"Not complete: {missing}{why}."


def _cards(ways: Sequence[Way], decision: Mapping[str, Any], winner: str | None) -> list[dict[str, str]]:
    by_name = {way["name"]: way for way in ways if _is_choice(way)}
    cards: list[dict[str, str]] = []

    def card(title: str, name: str, text: str = "") -> None:
        cards.append({"title": title, "figure": duration(by_name[name]["latency_ns"]), "name": name, "text": text})

    if winner is None:
        return [{"title": "Best as measured", "figure": "–", "name": "nothing", "text": decision["why_not"] or ""}]
    objective = decision["objective"]
    suited = "" if objective == "latency" else f"best by {objective}"
    card("Best as measured", winner, suited)
    predicted = decision["predicted"]["winner"] if decision["predicted"] else None
    if predicted is not None and predicted in by_name:
        regret = decision.get("regret_percent")
        same = "the measured best, too" if predicted == winner else ""
        card(
            "Best as predicted", predicted, same or (f"{regret:.1f} % more than the best" if regret is not None else "")
        )
    for name, title in ((EDGE_ONLY, "Everything on the edge"), (CLOUD_ONLY, "Everything on the cloud")):
        if by_name.get(name, {}).get("latency_ns") is not None and name != winner:
            factor = by_name[name]["latency_ns"] / by_name[winner]["latency_ns"]
            card(title, name, f"{factor:.2f} times the best")
    answered = sum(way["requests"] - way["failed"] for way in ways)
    exact = sum(way["exact"] for way in ways)
    agreeing = [way["agreeing"] for way in ways if way["agreeing"] is not None]
    top = f"; top 1 agrees in {sum(agreeing)}" if agreeing and exact < answered else ""
    cards.append(
        {
            "title": "Exact answers",
            "figure": "all" if exact == answered else f"{100 * exact / answered:.1f} %",
            "name": f"{exact} of {answered}",
            "text": f"equal the whole model's, bit by bit{top}",
        }
    )
    return cards


def _explanation(known: Mapping[str, Any]) -> list[str]:
    decision, prediction = known["decision"], known["prediction"]
    lines = [f"{name} was left out: {why}." for name, why in known["skipped"].items()]
    measured = decision["measured"]
    if measured:
        objective, scores = measured["objective"], measured["scores"]
        shown = duration if objective == "latency" else lambda value: f"{value:.4g}"
        line = f"Measured, by {objective}: {measured['winner']} with {shown(scores[measured['winner']])}"
        if measured["runner_up"]:
            line += f", before {measured['runner_up']} with {shown(scores[measured['runner_up']])}"
        lines.append(f"{line}.")
    elif decision["why_not"]:
        lines.append(f"Nothing to decide on: {decision['why_not']}.")
    if prediction is None:
        lines.append("There is no prediction: it was not asked for, or could not be made.")
        return lines
    if prediction["why_not"]:
        lines.append(f"The plan decided nothing: {prediction['why_not']}.")
    regret = decision.get("regret_percent")
    if regret is not None and decision["predicted"]:
        followed = decision["predicted"]["winner"]
        lines.append(
            f"Who follows the plan takes {followed}, "
            + (
                "which is the measured best."
                if regret == 0
                else f"which is {regret:.1f} % worse than the measured best."
            )
        )
    lines += [f"Warning: {line}" for line in prediction["warnings"]]
    return lines


def _agreement(decision: Mapping[str, Any], prediction: Mapping[str, Any] | None) -> str:
    if prediction is None:
        return "There is no prediction."
    error = decision["median_error_percent"]
    text = "Predicted from a profile of either side and a probe of the link, before the first request was measured."
    return text if error is None else f"{text} In the median a prediction is {error:.1f} % off."


def _energy(ways: Sequence[Way]) -> list[str]:
    lines = []
    for side in ("edge", "cloud"):
        readings = [way[f"{side}_energy"] for way in ways if way["mode"] == "networked" or side == "edge"]
        known = [one for one in readings if one["value"] is not None]
        notes = dict.fromkeys(one["note"] for one in known or readings if one["note"])
        if len(notes) > 1:
            notes.pop("not sampled", None)
        if known:
            statuses = " and ".join(sorted({one["status"] for one in known}))
            lines.append(f"Of the {side}'s forward alone: {statuses} ({'; '.join(notes) or 'no more is said'}).")
        else:
            lines.append(f"Of the {side}: unavailable: {'; '.join(notes) or 'not sampled'}.")
    return lines


def _local(ways: Sequence[Way], whole: float | None) -> str:
    locals_ = [way for way in ways if not _is_choice(way) and way["latency_ns"] is not None]
    text = (
        "Head and tail of every cut in this one process, through the bytes that would cross: no network, no second"
        " process. What lies above the line is the split's own."
    )
    if not locals_:
        return "Head and tail in one process were not measured."
    answered = sum(way["requests"] - way["failed"] for way in locals_)
    text += f" {sum(way['exact'] for way in locals_)} of {answered} answers are exact."
    if whole:
        costs = sorted(sum(way["segments_ns"][one] for one in ("edge", "encode", "tail")) - whole for way in locals_)
        text += f" In the median a split costs {duration(costs[len(costs) // 2])} more than the whole model."
    return text


def _row(way: Way, winner: str | None) -> dict[str, Any]:
    predicted, quartiles = way["predicted"], way["quartiles_ns"]
    answered = way["requests"] - way["failed"]
    off = predicted["error_percent"] if predicted else None
    latency = "–" if quartiles is None else duration(way["latency_ns"])
    spread = "" if quartiles is None else f" ({duration(quartiles[0])} to {duration(quartiles[2])})"
    return {
        "name": way["name"] if _is_choice(way) else f"{way['name']} (local)",
        "best": way["name"] == winner and _is_choice(way),
        "cells": [
            str(way["layer_id"]) if _is_cut(way) else "",
            f"{latency}{spread}",
            duration(predicted["latency_ns"]) if predicted else "–",
            "–" if off is None else f"{off:+.1f} %",
            "–" if way["bytes_up"] is None else size(round(way["bytes_up"])),
            "–" if way["bytes_down"] is None else size(round(way["bytes_down"])),
            _joules(way["edge_energy"]),
            _joules(way["cloud_energy"]),
            f"{way['exact']} of {answered}",
            "–" if way["agreeing"] is None else f"{way['agreeing']} of {answered}",
            str(way["failed"] or ""),
        ],
    }


def _facts(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    settings = dict(known["settings"])
    settings["ways"] = f"{len(settings['ways'])}"
    settings["inputs"] = ", ".join(name for name, _ in settings["inputs"])
    groups = [{"title": "Settings", "rows": _pairs(settings)}, {"title": "Versions", "rows": _pairs(known["versions"])}]
    prediction = known["prediction"]
    if prediction is not None:
        link = prediction["link"]
        groups += [
            {"title": f"The {side}", "rows": _pairs(machine)}
            for side, machine in prediction["machines"].items()
            if machine
        ]
        rates = {
            "round trip": duration(link["rtt_ns"]),
            "up": _rate(link["up_bytes_per_second"]),
            "down": _rate(link["down_bytes_per_second"]),
            "by": link["source"],
        }
        groups.append({"title": "The link, before the sweep", "rows": _pairs(rates)})
    readings = [
        (one["column"], f"{one['status']}, {one['count']} times{': ' if one['note'] else ''}{one['note']}")
        for one in known["readings"]
    ]
    if readings:
        groups.append({"title": "How the numbers of a layer were obtained", "rows": readings})
    return groups


def _rate(bytes_per_second: float | None) -> str:
    return "cannot be told" if bytes_per_second is None else f"{bytes_per_second * 8 / 1e6:.1f} Mbit/s"


def _pairs(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(key).replace("_", " "), _said(value)) for key, value in table.items() if value not in (None, "", [])]


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_said(one)}" for key, one in value.items() if one is not None)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "; ".join(_said(one) for one in value)
    return str(value)
