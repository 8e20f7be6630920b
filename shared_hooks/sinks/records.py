"""What observers found, as a sink's values. A name is the module's and the field's: ``stem.0/mean``."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from shared_hooks.observers import Observer, Record
from shared_hooks.observers.named import plain
from shared_hooks.sinks.sink import Histogram, Picture, Sink, Value

MOST: Final = 64
"""Numbers of one list, such as one for each head."""
NOT_NUMBERS: Final = ("nan", "inf", "-inf")
"""As `plain` writes them."""
PLACES: Final = ("name", "step", "part", "row", "of")
"""Fields that say where, and not what."""


def of_records(records: Iterable[Record | Mapping[str, Any]]) -> dict[str, Value]:
    """Values of one forward. Records are an observer's own, or as dictionaries, as an answer has them.

    Numbers and readings that have a value, the numbers of a list each under its place in it, histograms, pictures, and
    tokens' text. What is no number of anything (dtype, shape, where) is left out.
    """
    found: dict[str, Value] = {}
    for record in records:
        fields = record if isinstance(record, Mapping) else plain(record)
        where = _where(fields)
        for key, value in _values(fields):
            found[f"{where}/{key}"] = value
    return found


def write_records(sink: Sink, *observers: Observer, prefix: str = "") -> None:
    """All that observers keep, step by step: of modules in this process, after their forwards."""
    steps: dict[int, list[Any]] = {}
    for record in (record for observer in observers for record in observer.records):
        steps.setdefault(record.step, []).append(record)
    for step, records in sorted(steps.items()):
        sink.write({f"{prefix}{name}": value for name, value in of_records(records).items()}, step)


def _where(fields: Mapping[str, Any]) -> str:
    part = str(fields.get("part", ""))
    name = f"{fields['name']}[{part}]" if part not in ("", "0") else str(fields["name"])
    name = f"{name}/gradient of {fields['of']}" if fields.get("of") else name
    return f"{name}/row {fields['row']}" if "row" in fields else name


def _values(fields: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    for key, value in fields.items():
        if key in PLACES or key in ("low", "high") or fields.get(key.removesuffix("_max")) == "":
            continue  # the last: what is white in a picture that there is not
        if key == "histogram":
            if (histogram := _histogram(fields)) is not None:
                yield key, histogram
        elif key == "picture":
            if (picture := _picture(value)) is not None:
                yield key, picture
        elif key == "text":
            if isinstance(value, list) and value:
                yield key, ", ".join(map(str, value))
        elif isinstance(value, list):
            if all(isinstance(one, float) or one in NOT_NUMBERS for one in value):
                yield from ((f"{key}/{place}", float(one)) for place, one in enumerate(value[:MOST]))
        else:
            number = value.get("value") if isinstance(value, dict) else value
            if number in NOT_NUMBERS or (isinstance(number, (int, float)) and not isinstance(number, bool)):
                yield key, _float(number)


def _float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond any float
        return math.inf


def _histogram(fields: Mapping[str, Any]) -> Histogram | None:
    counts, low, high = fields["histogram"], fields.get("low"), fields.get("high")
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high
    if not numbers or not isinstance(counts, list) or not all(isinstance(one, int) and one >= 0 for one in counts):
        return None
    return Histogram(_float(low), _float(high), tuple(counts)) if sum(counts) else None


def _picture(text: Any) -> Picture | None:
    try:
        return Picture(base64.b64decode(text, validate=True)) if text else None
    except (binascii.Error, TypeError, ValueError):
        return None
