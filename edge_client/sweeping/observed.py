"""What observers saw: one request more for each input, by a way that covers both sides; it counts for nothing else.

That way is the middle one of the cuts that are swept; without a cut the whole model on the cloud.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from edge_client.answer import Answer
from edge_client.modes import CLOUD_ONLY
from edge_client.screen.observation_table import tables
from edge_client.screen.text import finite, one_line
from edge_client.sweeping.journal import Entry
from edge_client.sweeping.ways import Way
from shared_hooks.observers import named
from shared_hooks.observers.thumbnails import is_thumbnail

FILE: Final = "observations.jsonl"
KEPT_BYTES: Final = 128 * 2**10
"""Of each side of an input: a sweep may have many of them."""
SHOWN: Final = 3
"""Inputs on the page."""
ROWS: Final = 16
"""Of a table on the page."""

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
        "maps": [
            {"side": side, "name": record["name"], "picture": record["picture"]}
            for side, by_hook in observations.items()
            for record in by_hook.get("attention", {}).get("records", [])
            if is_thumbnail(record.get("picture"))
        ],
        "tables": list(tables(observations, ROWS, f"{FILE} has them")),
    }
