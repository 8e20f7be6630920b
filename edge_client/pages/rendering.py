"""A page from a template and data, complete in itself.

What users wrote (names of models, layers, files; errors) reaches it in two ways only: escaped by the template, and as
JSON that the page's script puts in as text. Its policy lets no other script run, and nothing be fetched.
"""

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
