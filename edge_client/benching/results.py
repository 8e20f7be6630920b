"""The figures of all rates, as a file; the knee."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shared_hooks.errors import SpecError

FORMAT: Final = "isthmus bench 1"
KEPT: Final = 0.95
"""Share of the offered rate answered in time: below, a rate is beyond the knee."""


def knee(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """The highest rate offered of which `KEPT` was answered in time, as it was at every lower one; None: at none."""
    found = None
    for one in sorted(steps, key=lambda each: each["rate"]):
        if not one["requests"] or one["in_time"] < KEPT * one["requests"]:
            break
        found = float(one["rate"])
    return found


def is_bench(path: str | Path) -> bool:
    """Whether it is such a file, of whatever version."""
    try:
        if not Path(path).is_file():
            return False
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and str(value.get("format")).startswith("isthmus bench ")


def read(path: str | Path) -> dict[str, Any]:
    """The file's content. Raises SpecError for what is none, or of another version."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise SpecError(f"{path}: its format is {value['format']!r:.60}; this release reads {FORMAT!r}")
        for one in value["steps"]:
            figures = [one["rate"], one["requests"], one["in_time"]]
            figures += [one["goodput"]["spread"]]
            figures += [one["latency"][name][key] for name in ("p50", "p90", "p99") for key in ("value", "spread")]
            if not all(figure is None or isinstance(figure, (int, float)) for figure in figures):
                raise TypeError(f"at {one['rate']!r:.20} a second a figure is no number")
            _ = [one["latency"][name]["sure"] for name in ("p50", "p90", "p99")], one["generator"]["bottleneck"]
        _ = dict(value["settings"]), value["knee"], value["ended"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SpecError(f"{path}: not the results of a bench: {type(error).__name__}: {error}") from error
    known: dict[str, Any] = value
    return known
