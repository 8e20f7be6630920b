"""What observers found in one answer, as tables: both sides of the cut below each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from edge_client.screen.text import printable, size

ROWS: Final = 60
"""Most rows of a table; JSON has them all."""

MOST_BYTES: Final = 2**63
"""Largest size that is believed."""

MOST_COLUMNS: Final = 6
MOST_CHARACTERS: Final = 40
"""Most characters of a table without a layout of its own, and of a cell of it."""

Record = Mapping[str, Any]
Columns = tuple[tuple[str, ...], Callable[[Record], list[str]]]
"""Headers, and the cells below them of a record."""


@dataclass(frozen=True)
class ObservationTable:
    """``title``, ``headers`` and ``rows`` of text; the first column and the second are the side and the module."""

    title: str
    headers: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]


def tables(
    observations: Mapping[str, Mapping[str, Any]], most: int = ROWS, rest: str = "--json has them"
) -> Iterator[ObservationTable]:
    """One table for each observer, of ``most`` rows; ``rest`` says where more are. ``observations``: side ->
    observer -> found (`shared_hooks.observers.named`).
    """
    names = dict.fromkeys(name for found in observations.values() for name in found)
    for observer in (*(name for name in _COLUMNS if name in names), *(name for name in names if name not in _COLUMNS)):
        headers, cells = _COLUMNS.get(observer) or _as_they_are(observer, observations)
        sides: list[list[tuple[str, ...]]] = []
        notes: list[str] = []
        for side, by_observer in observations.items():
            found = by_observer.get(observer)
            if found is None:
                continue
            sides.append(rows := [])
            for record in found["records"]:
                part = _text(record, "part")
                name = f"{_text(record, 'name')}[{part}]" if part not in ("", "0") else _text(record, "name")
                rows.append((side, printable(name), *map(printable, cells(record))))
            notes += [f"{side}: {printable(note)}" for note in found["notes"]]
            if found["failures"]:
                notes.append(f"{side}: failed {found['failures']} times, last at {printable(found['last_failure'])}")
            if found["left_out"]:
                notes.append(f"{side}: {found['left_out']} more were left out")
            if found.get("pictures_left_out"):
                notes.append(f"{side}: {found['pictures_left_out']} pictures were left out")
        count = sum(map(len, sides))
        if not count and observer == "debug":
            notes.append("no NaN and no Inf")
        if count > most:
            notes.append(f"{count - most} more rows; {rest}")
        yield ObservationTable(printable(observer), ("side", "module", *headers), _first(sides, most), notes)


def _first(sides: list[list[tuple[str, ...]]], most: int) -> list[tuple[str, ...]]:
    """So many rows, of each side as many as of the others where there are."""
    limits: dict[int, int] = {}
    for number, side in enumerate(sorted(sides, key=len)):
        limits[id(side)] = min(len(side), (most - sum(limits.values())) // (len(sides) - number))
    return [row for side in sides for row in side[: limits[id(side)]]]


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _number(value: object, form: str) -> str:
    """Numbers that JSON does not have come as text; and a server may say anything."""
    try:
        return format(value, form) if isinstance(value, (int, float)) else str(value)
    except OverflowError:  # an integer beyond any float
        return "inf"


def _list(record: Record, key: str) -> list[Any]:
    value = record.get(key)
    return value if isinstance(value, list) else []


def _activation(record: Record) -> list[str]:
    shape = "x".join(map(str, _list(record, "shape")))
    return [shape, *(_text(record, key) for key in ("mean", "std", "min", "max", "sparsity", "nonfinite"))]


def _attention(record: Record) -> list[str]:
    entropy = ", ".join(_number(value, ".3g") for value in _list(record, "entropy"))
    positions = [pair[0] for pair in _list(record, "positions") if isinstance(pair, list) and pair]
    return ["x".join(map(str, _list(record, "shape"))), entropy, ", ".join(map(str, positions))]


def _bytes(value: object) -> str:
    if not isinstance(value, (int, float)) or not abs(value) < MOST_BYTES:  # nor NaN
        return "-"
    return f"{'-' if value < 0 else ''}{size(abs(round(value)))}"


def _reading(record: Record, key: str) -> str:
    reading = record.get(key)
    if not isinstance(reading, dict):
        return "-"
    text = _bytes(reading.get("value"))
    return text if text == "-" or reading.get("status") == "measured" else f"{text} ~"


def _memory(record: Record) -> list[str]:
    return [*(_reading(record, key) for key in ("allocated", "growth", "peak")), _bytes(record.get("output_bytes"))]


def _debug(record: Record) -> list[str]:
    return [_text(record, "nan"), _text(record, "inf"), ", ".join(map(str, _list(record, "where")))]


def _tokens(record: Record) -> list[str]:
    names = [f'"{one}"' for one in _list(record, "text")] or _list(record, "ids")
    shares = [_number(share, ".3f") for share in _list(record, "probabilities")]
    return [_text(record, "row"), ", ".join(f"{one} {share}" for one, share in zip(names, shares, strict=False))]


def _as_they_are(observer: str, observations: Mapping[str, Mapping[str, Any]]) -> Columns:
    """For an observer without a table of its own: what its records hold, the first few names that come."""
    records = [record for side in observations.values() for record in side.get(observer, {"records": []})["records"]]
    found = dict.fromkeys(key for record in records for key in record if key not in ("name", "part", "step"))
    keys = tuple(found)[:MOST_COLUMNS]

    def cells(record: Record) -> list[str]:
        return [", ".join(map(str, _list(record, key))) or _text(record, key) for key in keys]

    return tuple(map(printable, keys)), lambda record: [text[:MOST_CHARACTERS] for text in cells(record)]


_COLUMNS: Final[Mapping[str, Columns]] = {
    "activation": (("shape", "mean", "std", "min", "max", "zeros", "not finite"), _activation),
    "attention": (("shape", "entropy by head", "most attended"), _attention),
    "memory": (("held", "growth", "peak", "output"), _memory),
    "debug": (("NaN", "Inf", "first at"), _debug),
    "tokens": (("row", "likeliest"), _tokens),
}
"""Those that have a table of their own."""
