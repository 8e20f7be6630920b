"""Write the page's text: the first sentence, the cards, the decision, how it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge_client.pages import counted, duration
from edge_client.user_text import CLOUD_ONLY, EDGE_ONLY

Way = Mapping[str, Any]


def is_cut(way: Way) -> bool:
    """Return whether ``way`` cuts the model, with or without a network."""
    return bool(way["layer_id"] is not None and way["layer_id"] >= 0)


def is_choice(way: Way) -> bool:
    """Return whether ``way`` is a choice for real requests: all but the local splits."""
    return bool(way["mode"] == "networked" or way["name"] == EDGE_ONLY)


def lead(known: Mapping[str, Any]) -> str:
    """Return the first sentence. Its numbers multiply to the number of requests: ways, times rounds of every input."""
    settings, ways = known["settings"], known["ways"]
    requests = sum(way["requests"] for way in ways)
    layer_rounds = settings.get("layer repetitions", 1)
    timed, layers = sum(known["repetitions"]), sum(min(rounds, layer_rounds) for rounds in known["repetitions"])
    again = sum(1 for way in ways if not is_choice(way))
    kinds = [
        *(way["name"] for way in ways if is_choice(way) and not is_cut(way)),
        counted(sum(1 for way in ways if is_choice(way) and is_cut(way)), "cut"),
        *([f"{counted(again, 'cut')} again in this process"] if again else []),
    ]
    rounds = f"{timed} for the latency" + (f" + {layers} for the layers" if layers else "")
    total = f"{counted(len(ways), 'way')} × ({rounds}) = {len(ways) * (timed + layers)} requests"
    less = len(ways) * (timed + layers) - requests
    if less:  # a way that a server offered only for a while
        total += f", of which {less} were not made: {requests} requests"
    where = "a server on the same machine" if settings["server"] == "started here" else settings["server"]
    return (
        f"{counted(len(known['measured_inputs']), 'input')} in {counted(timed + layers, 'round')}: {total}."
        f" The ways: {', '.join(kinds)}. The cloud: {where}. {known['created'][:10]}."
    )


def partial(known: Mapping[str, Any]) -> str | None:
    wanted, got = len(known["settings"]["inputs"]), len(known["measured_inputs"])
    short = [number for number in known["repetitions"] if number < known["settings"]["repetitions"]]
    if known["ended"] is None and got == wanted and not short:
        return None
    missing = f"{got} of {wanted} inputs" + (f", {len(short)} of them with fewer repetitions" if short else "")
    why = f" ({known['ended']})" if known["ended"] else ""
    return f"Not complete: {missing}{why}."


def cards(ways: Sequence[Way], decision: Mapping[str, Any], winner: str | None) -> list[dict[str, str]]:
    by_name = {way["name"]: way for way in ways if is_choice(way)}
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
        caption = f"{duration(by_name[predicted]['predicted']['latency_ns'])} predicted"
        more = "" if regret is None else f", {regret:.1f} % more than the best"
        card("The plan's choice, as measured", predicted, caption + (", the best" if predicted == winner else more))
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


def explanation(known: Mapping[str, Any]) -> list[str]:
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
        lines.append("There is no prediction: it was not requested, or could not be made.")
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


def agreement(decision: Mapping[str, Any], prediction: Mapping[str, Any] | None) -> str:
    if prediction is None:
        return "There is no prediction."
    error = decision["median_error_percent"]
    text = "Predicted from a profile of either side and a probe of the link, before the first request was measured."
    return text if error is None else f"{text} In the median a prediction is {error:.1f} % off."


def energy_lines(ways: Sequence[Way]) -> list[str]:
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


def local(ways: Sequence[Way], whole: float | None) -> str:
    locals_ = [way for way in ways if not is_choice(way) and way["latency_ns"] is not None]
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


def facts(known: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    return "cannot be known" if bytes_per_second is None else f"{bytes_per_second * 8 / 1e6:.1f} Mbit/s"


def _pairs(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (str(key).replace("_", " "), _as_text(value)) for key, value in table.items() if value not in (None, "", [])
    ]


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_as_text(one)}" for key, one in value.items() if one is not None)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "; ".join(_as_text(one) for one in value)
    return str(value)
