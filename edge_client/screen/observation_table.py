"""What observers found in one answer, as tables: both sides of the cut below each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from edge_client.screen.text import printable, size

ROWS: Final = 60
"""Of a table; JSON has them all."""

MOST_BYTES: Final = 2**63
"""Of a size that is believed."""

Record = Mapping[str, Any]


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
    """One table for each hook, of ``most`` rows; ``rest`` says where more are. ``observations``: side -> hook -> found
    (`shared_hooks.observers.named`).
    """
    for hook, (headers, cells) in _COLUMNS.items():
        sides: list[list[tuple[str, ...]]] = []
        notes: list[str] = []
        asked = False
        for side, by_hook in observations.items():
            found = by_hook.get(hook)
            if found is None:
                continue
            asked = True
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
        if not asked:
            continue
        count = sum(map(len, sides))
        if not count and hook == "debug":
            notes.append("no NaN and no Inf")
        if count > most:
            notes.append(f"{count - most} more rows; {rest}")
        yield ObservationTable(hook, ("side", "module", *headers), _first(sides, most), notes)


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
    told = _bytes(reading.get("value"))
    return told if told == "-" or reading.get("status") == "measured" else f"{told} ~"


def _memory(record: Record) -> list[str]:
    return [*(_reading(record, key) for key in ("allocated", "growth", "peak")), _bytes(record.get("output_bytes"))]


def _debug(record: Record) -> list[str]:
    return [_text(record, "nan"), _text(record, "inf"), ", ".join(map(str, _list(record, "where")))]


def _tokens(record: Record) -> list[str]:
    names = [f'"{one}"' for one in _list(record, "text")] or _list(record, "ids")
    shares = [_number(share, ".3f") for share in _list(record, "probabilities")]
    return [_text(record, "row"), ", ".join(f"{one} {share}" for one, share in zip(names, shares, strict=False))]


_COLUMNS: Final[Mapping[str, tuple[tuple[str, ...], Callable[[Record], list[str]]]]] = {
    "activation": (("shape", "mean", "std", "min", "max", "zeros", "not finite"), _activation),
    "attention": (("shape", "entropy by head", "most attended"), _attention),
    "memory": (("held", "growth", "peak", "output"), _memory),
    "debug": (("NaN", "Inf", "first at"), _debug),
    "tokens": (("row", "likeliest"), _tokens),
}
