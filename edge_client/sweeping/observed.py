"""What observers saw: one request more for each input, by a way that covers both sides; it counts for nothing else.

That way is the middle one of the cuts that are swept; without a cut the whole model on the cloud.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from edge_client.answer import Answer
from edge_client.given import Given
from edge_client.modes import CLOUD_ONLY
from edge_client.screen.observation_table import tables
from edge_client.screen.text import finite, one_line
from edge_client.sweeping.journal import Entry
from edge_client.sweeping.ways import Way
from shared_hooks.errors import InputMismatch
from shared_hooks.models import ModelSpec
from shared_hooks.observers import named
from shared_hooks.observers.thumbnails import is_thumbnail

FILE: Final = "observations.jsonl"
KEPT_BYTES: Final = 128 * 2**10
"""Most of each side of an input: a sweep may have many of them."""
SHOWN: Final = 3
"""Inputs on the page."""
PICTURE_SIDE: Final = 320
"""Pixels of an input's picture on the page, at most."""
ROWS: Final = 16
"""Most rows of a table on the page."""

Observed = dict[str, Any]
"""{"way", "observations": side -> hook -> found}, or {"way", "error"}."""


def way_of(ways: Sequence[Way]) -> Way:
    """The way to be observed."""
    cuts = [way for way in ways if way.networked and way.layer_id is not None and way.layer_id >= 0]
    return cuts[len(cuts) // 2] if cuts else next(way for way in ways if way.name == CLOUD_ONLY)


def kept(way: Way, seen: Answer | Exception) -> Observed:
    """What the journal keeps of a request."""
    if isinstance(seen, Exception):
        return {"way": way.name, "error": one_line(f"{type(seen).__name__}: {seen}")}
    found = {side: finite(json.loads(named.to_bytes(one, KEPT_BYTES))) for side, one in seen.observations.items()}
    return {"way": way.name, "observations": found}


def lines(entries: Iterable[Entry]) -> Iterable[str]:
    """JSON, one line for each observed input of the journal."""
    for entry in entries:
        if "observed" in entry:
            yield json.dumps({"input": entry["input"], **entry["observed"]}) + "\n"


def section(known: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the page shows of a summary; None where nobody observed."""
    observed: Sequence[Mapping[str, Any]] = known.get("observed", ())
    if not observed:
        return None
    count, observers = len(known["measured_inputs"]), ", ".join(known["settings"]["hooks"])
    more = f" The first {len(observed)} inputs are shown; {FILE} has all {count}." if count > len(observed) else ""
    return {
        "lead": f"{observers}, on both sides of {observed[0]['way']}: one more request for each input, which counts for"
        f" nothing else.{more}",
        "inputs": [_shown(one) for one in observed],
    }


def _shown(one: Mapping[str, Any]) -> dict[str, Any]:
    observations = one.get("observations", {})
    return {
        "name": one["input"],
        "error": one.get("error"),
        "maps": bool(_maps(one)),
        "tables": [
            {
                "title": table.title,
                "headers": [table.headers[1], table.headers[0], *table.headers[2:]],
                "rows": [[row[1], row[0], *row[2:]] for row in table.rows],
                "notes": table.notes,
            }
            for table in tables(observations, ROWS, f"{FILE} has them")
        ],
    }


def drawn(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For the page's script: of each input its picture (None for what is none) and the attention that was seen."""
    return [
        {"input": one["input"], "picture": one.get("picture"), "maps": _maps(one)} for one in known.get("observed", ())
    ]


def _maps(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "side": side,
            "name": record["name"],
            "shape": [size for size in record.get("shape") or [] if isinstance(size, int)],
            "picture": record["picture"],
            "most": _number(record.get("picture_max")),
            "over": record["over"] if is_thumbnail(record.get("over")) else None,
            "overMost": _number(record.get("over_max")),
        }
        for side, by_hook in one.get("observations", {}).items()
        for record in by_hook.get("attention", {}).get("records", [])
        if is_thumbnail(record.get("picture"))
    ]


def _number(value: Any) -> float | None:
    """A number of a server's record, which may hold anything."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def picture_of(spec: ModelSpec, sweep_input: Given) -> str | None:
    """What the model sees of an input that is an image file, as an address in itself; None where it is none."""
    if sweep_input.item is None:
        return None
    try:
        seen = spec.picture(sweep_input.item.path)
    except InputMismatch:  # it is reported with the requests that fail by it
        return None
    if seen is None:
        return None
    picture = seen.convert("RGB")
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
