"""Numbers as people read them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jinja2 import Template


def duration(ns: float | None) -> str:
    """Return nanoseconds with a unit that suits."""
    if ns is None:
        return "–"
    for factor, unit in ((1e9, "s"), (1e6, "ms")):
        if abs(ns) >= factor:
            return f"{short(ns / factor)} {unit}"
    return f"{short(ns / 1e3)} µs"


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def counted(number: int, what: str) -> str:
    """Return a number and a noun: "1 input", "3 inputs"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


# Layers folded into blocks, by their names alone: a page of 150 rows is read block by block.


FEWEST: Final = 4
"""Layers that a block has on average."""


def blocks(names: Sequence[str]) -> dict[str, str]:
    """Layer -> block: its path up to a number, as far down as blocks of `FEWEST` layers on average remain.

    ``encoder.layers.3.attention.query`` is in ``encoder.layers.3``; a name without such a number is in its parent, or
    in a block of its own.
    """
    paths = {name: _numbered(name) for name in names}
    deepest = max((len(found) for found in paths.values()), default=0)
    for level in range(deepest, 0, -1):
        folded = {name: found[:level][-1] for name, found in paths.items() if found}
        if level == 1 or len(folded) >= FEWEST * len(set(folded.values())):
            return {name: folded.get(name) or _parent(name) for name in names}
    return {name: _parent(name) for name in names}


def _numbered(name: str) -> list[str]:
    """Return every parent of a layer that ends in a number, the outermost first; the layer's own number is none."""
    words = _plain(name).split(".")
    return [".".join(words[: at + 1]) for at, word in enumerate(words[:-1]) if word.isdigit()]


def _parent(name: str) -> str:
    plain = _plain(name)
    return plain.rpartition(".")[0] or plain


def _plain(name: str) -> str:
    """Without the number of a later call: "relu#2" is "relu"."""
    head, mark, call = name.rpartition("#")
    return head if mark and call.isdigit() else name


# A page from a template and data, self-contained.
#
# What users wrote (names of models, layers, files; errors) reaches it in two ways only: escaped by the template, and
# as JSON that the page's script inserts as text. Its policy forbids other scripts and all requests.


HERE: Final = Path(__file__).parent
KIT: Final = ("kit.js", "figure.js")


def render(template: Path, charts: Sequence[str], data: Mapping[str, Any], **shown: Any) -> str:
    """HTML. ``template`` extends frame.html.j2 and has its own script beside it, with the ending .js; ``charts``: the
    kinds that this draws ("bars", ...); ``data``: JSON-able, for the script; ``shown``: for the template.

    ``data["file"]`` is how the names of saved files begin (`stem`).
    """
    from markupsafe import Markup

    files = [HERE / name for name in (*KIT, *(f"{chart}.js" for chart in charts))]
    own = template.with_name(template.name.replace(".html.j2", ".js"))
    parts = [file.read_text(encoding="utf-8") for file in (*files, own)]
    script = '"use strict";\n(async () => {\n' + "\n".join(parts) + "})();\n"
    return _template(template).render(
        page_css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        chart_css=Markup((HERE / "chart.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(inert(data)),
        **shown,
    )


@cache
def _template(path: Path) -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader([path.parent, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(path.name)


def inert(value: Any) -> str:
    """JSON that can stand in a script element: no text in it ends the element or opens a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def stem(text: str) -> str:
    """``text`` as the beginning of a file's name on any system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:60].strip("._") or "isthmus"
