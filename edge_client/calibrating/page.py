"""The table of a calibration as a page: rate against loss for every cut, in one file that asks no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from edge_client.calibrating.outputs import MEANS
from edge_client.pages import counted, stem
from edge_client.pages import render as page_of
from edge_client.planning.codecs import CodecLoss, CutLosses, LossTable
from edge_client.screen.text import printable, size

TEMPLATE: Final = Path(__file__).parent / "page.html.j2"
MOST_CUTS: Final = 8
"""Drawn; the table has all."""


def render(table: LossTable, max_loss: float, warnings: Sequence[str] = ()) -> str:
    """HTML; ``max_loss``: what is allowed, 0 to 1."""
    model = printable(table.model.model_id)
    drawn = _drawn(table, max_loss)
    return page_of(
        TEMPLATE,
        (),
        {
            "file": stem(f"{model}-codecs"),
            "model": model,
            "kind": table.kind,
            "max_loss": max_loss,
            "cuts": [_series(cut, max_loss) for cut in drawn],
        },
        title=f"{model}: codecs",
        kicker="Isthmus calibrate",
        heading=f"{model}: what codecs cost at every cut",
        lead=f"Measured on {counted(table.inputs, 'input')}: head, codec and tail, against the whole model.",
        partial=" ".join(warnings) or None,
        contents=[("rate", "rate against loss"), ("codecs", "every cut")],
        cards=_cards(table, max_loss),
        meaning=MEANS.get(table.kind, table.kind),
        confidence=_percent(table.confidence),
        allowed=_percent(max_loss),
        left_out=len(table.cuts) - len(drawn),
        rows=_table(table, max_loss),
        refused=[(printable(cut.name), printable(cut.refused)) for cut in table.cuts if cut.refused],
    )


def _drawn(table: LossTable, max_loss: float) -> list[CutLosses]:
    """The cuts with the fewest bytes within the loss, one of each size of a frontier, in the order of the layers."""
    sizes: dict[int, CutLosses] = {}
    for cut in table.cuts:
        known = sizes.get(cut.frontier_bytes)
        if cut.codecs and (known is None or _least(cut, max_loss) < _least(known, max_loss)):
            sizes[cut.frontier_bytes] = cut
    best = sorted(sizes.values(), key=lambda cut: _least(cut, max_loss))[:MOST_CUTS]
    return sorted(best, key=lambda cut: cut.layer_id)


def _least(cut: CutLosses, max_loss: float) -> float:
    return min((one.bytes_up for one in cut.codecs if one.within(max_loss)), default=float("inf"))


def _series(cut: CutLosses, max_loss: float) -> dict[str, Any]:
    points = sorted(cut.codecs, key=lambda one: (one.bytes_up, one.loss))
    return {"name": printable(cut.name), "points": [_point(one, max_loss) for one in points]}


def _point(one: CodecLoss, max_loss: float) -> dict[str, Any]:
    return {
        "codec": one.codec,
        "bytes": one.bytes_up,
        "loss": one.loss,
        "low": one.low,
        "high": one.high,
        "n": one.n,
        "within": one.within(max_loss),
    }


def _cards(table: LossTable, max_loss: float) -> list[dict[str, str]]:
    cards = []
    pairs = [(cut, one) for cut in table.cuts for one in cut.codecs]
    if within := [pair for pair in pairs if pair[1].within(max_loss)]:
        cut, one = min(within, key=lambda pair: pair[1].bytes_up)
        raw = next((each.bytes_up for each in cut.codecs if each.codec == "raw"), None)
        times = f", {raw / one.bytes_up:.1f} times fewer than raw there" if raw and one.bytes_up else ""
        figure, name = size(round(one.bytes_up)), f"{printable(cut.name)}, {one.codec}"
        cards.append(_card(f"Fewest bytes within {_percent(max_loss)}", figure, name, f"a request{times}"))
    if lossless := [pair for pair in pairs if pair[1].lossless]:
        cut, one = min(lossless, key=lambda pair: pair[1].bytes_up)
        figure, name = size(round(one.bytes_up)), f"{printable(cut.name)}, {one.codec}"
        cards.append(_card("Fewest bytes without loss", figure, name, "a request"))
    if table.whole_accuracy is not None:
        labelled = f"of {counted(table.labelled, 'labelled input')}"
        cards.append(_card("The whole model is right in", _percent(table.whole_accuracy), labelled, ""))
    return cards


def _card(title: str, figure: str, name: str, text: str) -> dict[str, str]:
    return {"title": title, "figure": figure, "name": name, "text": text}


def _table(table: LossTable, max_loss: float) -> tuple[list[str], list[list[str]], list[int]]:
    """(headers, rows, those within the loss)."""
    measures = list(dict.fromkeys(name for cut in table.cuts for one in cut.codecs for name in one.measures))
    headers = ["cut after", "codec", "bytes up", "smaller", "loss", "between", "accuracy", *measures, "inputs"]
    rows: list[list[str]] = []
    within: list[int] = []
    for cut in table.cuts:
        raw = next((one.bytes_up for one in cut.codecs if one.codec == "raw"), None)
        for one in cut.codecs:
            if one.within(max_loss):
                within.append(len(rows))
            rows.append(
                [
                    printable(cut.name),
                    one.codec,
                    size(round(one.bytes_up)),
                    f"{raw / one.bytes_up:.2f}x" if raw and one.bytes_up else "-",
                    "none" if one.lossless else _percent(one.loss),
                    "-" if one.lossless else f"{_percent(one.low)} and {_percent(one.high)}",
                    _percent(one.accuracy),
                    *("-" if name not in one.measures else f"{one.measures[name]:.4g}" for name in measures),
                    "-" if one.lossless else f"{one.n}{f' ({one.stopped})' if one.stopped else ''}",
                ]
            )
    return headers, rows, within


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.3g} %"
