"""The page of a leakage: what is given away at every cut, and the inputs as they were given back."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image

from edge_client.learning.inversion import as_array
from edge_client.pages import counted, stem
from edge_client.pages import render as page_of
from edge_client.planning.leakage import LeakageTable
from edge_client.screen.text import printable

TEMPLATE: Final = Path(__file__).parent / "page.html.j2"
LEAST_SIDE: Final = 64
"""Pixels of a picture's side on the page, at least."""


class Pictures:
    """Inputs and what was given back of them, a row each; kept in ``folder``, where there is one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._rows: dict[str, bytes] = {}
        self._span = (0.0, 1.0)
        if folder is not None:
            folder.mkdir(exist_ok=True)

    def begin(self, originals: torch.Tensor, average: torch.Tensor) -> None:
        """(n, C, H, W) each."""
        self._span = float(originals.min()), float(originals.max())
        self.add("the inputs", originals)
        self.add("the average", average)

    def add(self, name: str, pictures: torch.Tensor) -> None:
        """(n, C, H, W)."""
        rows = as_array(pictures, self._span)
        rows = rows.repeat(3, axis=3) if rows.shape[3] == 1 else rows[..., :3]
        joined = Image.fromarray(rows.transpose(1, 0, 2, 3).reshape(rows.shape[1], -1, rows.shape[3]))
        factor = max(1, LEAST_SIDE // rows.shape[1])
        joined = joined.resize((joined.width * factor, joined.height * factor), Image.Resampling.NEAREST)
        made = io.BytesIO()
        joined.save(made, "PNG")
        self._rows[name] = made.getvalue()
        if self._folder is not None:
            (self._folder / f"{_slug(name)}.png").write_bytes(made.getvalue())

    def shown(self, name: str) -> str | None:
        """As a data URL; None where there is none."""
        data = self._rows.get(name)
        if data is None and self._folder is not None and (file := self._folder / f"{_slug(name)}.png").is_file():
            data = file.read_bytes()
        return None if data is None else f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "_", name)


def render(known: LeakageTable, pictures: Pictures, caution: str) -> str:
    """HTML."""
    model = printable(known.model.model_id)
    measured = [one for one in known.cuts if not one.refused]
    names = list(dict.fromkeys([*known.average, *(name for one in measured for name in one.scores)]))
    rows = [["only the average", "", "0 %", "", *(_number(known.average.get(name)) for name in names)]]
    for one in measured:
        reach = f"{one.leakage.low:.0%} to {one.leakage.high:.0%}"
        scores = [f"{_number(found.mean)} ± {_number(found.high - found.mean)}" for found in one.scores.values()]
        rows.append([printable(one.cut), one.codec, f"{one.leakage.mean:.0%}", reach, *scores])
    rows.append(["the raw input", "", "100 %", "", *(_number(known.raw.get(name)) for name in names)])
    shown = [(name, pictures.shown(name)) for name in ("the inputs", "the average")]
    shown += [(f"{printable(one.cut)}, {one.codec}", pictures.shown(f"{one.cut} {one.codec}")) for one in measured]
    return page_of(
        TEMPLATE,
        ("lines",),
        {"file": stem(f"{model}-leakage"), "model": model, "series": _series(known)},
        title=f"{model}: leakage",
        kicker="Isthmus leakage",
        heading=f"{model}: what crosses, and what it gives away",
        lead=f"{counted(known.attacked, 'input')} attacked, {counted(known.seeds, 'seed')}, a {known.decoder} decoder.",
        partial=None,
        contents=[("depth", "by depth"), ("given", "given back"), ("cuts", "every cut")],
        cards=_cards(known),
        caution=caution,
        pictures=[(name, data) for name, data in shown if data is not None],
        headers=["cut after", "codec", "leakage", "95 % of seeds", *names],
        rows=rows,
        refused=[(printable(one.cut), printable(one.refused)) for one in known.cuts if one.refused],
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _series(known: LeakageTable) -> list[dict[str, Any]]:
    found: dict[str, list[list[float]]] = {}
    for one in known.cuts:
        if not one.refused:
            found.setdefault(one.codec, []).append([one.layer_id, 100 * one.leakage.mean])
    return [{"name": name, "points": sorted(points)} for name, points in found.items()]


def _cards(known: LeakageTable) -> list[dict[str, str]]:
    measured = [one for one in known.cuts if not one.refused]
    if not measured:
        return []
    least, most = (pick(measured, key=lambda one: one.leakage.mean) for pick in (min, max))
    return [
        {
            "title": title,
            "figure": f"{one.leakage.mean:.0%}",
            "name": f"{printable(one.cut)}, {one.codec}",
            "text": f"{one.leakage.low:.0%} to {one.leakage.high:.0%} over the seeds",
        }
        for title, one in (("Gives away the least", least), ("Gives away the most", most))
    ]
