"""Represent objects: a short line of text; a table and a small picture in a notebook.

Knows nothing of what it shows, and loads no torch.
"""

from __future__ import annotations

import enum
import html
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from pathlib import PurePath
from typing import Any, Final, TypeVar

__all__ = [
    "MOST",
    "Bar",
    "bars",
    "brief",
    "duration",
    "folded",
    "html_table",
    "panel",
    "short",
    "size",
    "strip",
    "summary_of",
    "text_table",
]


# Any value in a few characters, whatever it contains: nothing long is ever built. A tensor is its shape and dtype, a
# module its class, a container its first entries, and a foreign object its class: its ``__repr__`` may be of any
# length, and take any time.

MOST: Final = 2000
"""Maximum characters of any public object's ``repr``."""
_EACH: Final = 120
_ENTRIES: Final = 4
_DEPTH: Final = 2
_OURS: Final = ("shared_hooks", "edge_client", "cloud_server")
_TORCH: Final = ("dtype", "device", "Size", "layout")

AClass = TypeVar("AClass", bound=type)


def short(cls: AClass) -> AClass:
    """Decorate a class, above ``@dataclass``, with a short repr: ``Name(field=..., ...)``."""
    cls.__repr__ = _of_fields  # type: ignore[assignment,method-assign]
    return cls


def summary_of(of: object, *facts: str) -> str:
    """Return ``Name(fact, fact)``, for objects whose repr is no list of fields. Facts may contain names from
    elsewhere.
    """
    text = ", ".join(cut(fact, _EACH) for fact in facts if fact)
    return cut(f"{type(of).__name__}({text})", MOST)


def brief(value: Any, most: int = _EACH, depth: int = _DEPTH) -> str:
    """Format ``value`` in at most ``most`` characters; containers to ``depth`` levels."""
    return cut(_text(value, most, depth), most)


def cut(text: str, most: int) -> str:
    """Truncate a long text, with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _of_fields(self: Any) -> str:
    assert is_dataclass(self)
    shown = (f"{one.name}={brief(getattr(self, one.name, None))}" for one in fields(self) if one.repr)
    return cut(f"{type(self).__name__}({', '.join(shown)})", MOST)


def _text(value: Any, most: int, depth: int) -> str:
    kind = type(value)
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind is int:
        return repr(value) if value.bit_length() < 256 else f"an integer of {value.bit_length()} bits"
    if kind in (str, bytes, bytearray):
        return repr(value) if len(value) <= most else f"{value[:most]!r}…"
    if isinstance(value, BaseException):
        return f"{kind.__name__}({cut(str(value), most)!r})"
    if isinstance(value, enum.Enum):
        return f"{kind.__name__}.{value.name}"
    if isinstance(value, PurePath):
        return repr(str(value))
    if kind.__module__ == "torch" and kind.__name__ in _TORCH:
        return cut(repr(value), most)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _array(value)
    if kind.__module__.partition(".")[0] in _OURS:  # which may hold others of ours, and those this one again
        return cut(str(value), most) if "__str__" in vars(kind) else f"{kind.__name__}(…)"
    if isinstance(value, (Mapping, Sequence, Set)):
        return _container(value, most, depth)
    return value.__qualname__ if hasattr(value, "__qualname__") else f"<{kind.__name__}>"


def _array(value: Any) -> str:
    """Format a tensor or an array."""
    try:
        shape = "x".join(str(one) for one in islice(value.shape, 16)) or "scalar"
    except Exception:  # of nested tensors, for example
        shape = "?"
    name = "tensor" if type(value).__module__.partition(".")[0] == "torch" else type(value).__name__
    return f"{name}({shape} {str(value.dtype).removeprefix('torch.')})"


def _container(value: Any, most: int, depth: int) -> str:
    left, right = ("(", ")") if isinstance(value, tuple) else ("[", "]") if isinstance(value, Sequence) else ("{", "}")
    if not len(value):
        return f"{left}{right}"
    if depth <= 0:
        return f"{left}{len(value)}…{right}"
    each = max(24, most // _ENTRIES)
    if isinstance(value, Mapping):
        entries = [f"{brief(k, each, 0)}: {brief(v, each, depth - 1)}" for k, v in islice(value.items(), _ENTRIES)]
    else:
        entries = [brief(one, each, depth - 1) for one in islice(value, _ENTRIES)]
    if len(value) > _ENTRIES:
        entries.append(f"… {len(value) - _ENTRIES} more")
    elif isinstance(value, tuple) and len(value) == 1:
        entries.append("")
    return f"{left}{', '.join(entries).rstrip()}{right}"


# Small pictures as inline SVG: bars, and one bar in parts. Colours are readable on light and on dark backgrounds.

WIDTH: Final = 640
HEIGHT: Final = 90
MOST_BARS: Final = 160
ACCENT: Final = "#3b82c4"
COLOURS: Final = ("#3b82c4", "#8a63d2", "#d9822b", "#2f9e6e", "#c94f6d", "#8c8c8c", "#5aa7a7", "#b59b2f")


@dataclass(frozen=True, slots=True)
class Bar:
    """``value`` is the length, ``text`` its label, shown under the pointer; ``faint``: drawn pale."""

    value: float
    text: str
    faint: bool = False


def bars(of: Sequence[Bar], label: str) -> str:
    """Draw one vertical bar for each, from the left; of very many, the highest of each few. ``label`` is the
    caption.
    """
    if not of:
        return ""
    each = -(-len(of) // MOST_BARS)
    shown = [max(of[at : at + each], key=lambda bar: bar.value) for at in range(0, len(of), each)]
    top = max((bar.value for bar in shown), default=0.0) or 1.0
    step = WIDTH / max(len(shown), 12)
    made = []
    for at, bar in enumerate(shown):
        height = max(1.0, HEIGHT * max(0.0, bar.value) / top)
        opacity = ' opacity="0.3"' if bar.faint else ""
        made.append(
            f'<rect x="{at * step:.1f}" y="{HEIGHT - height:.1f}" width="{max(1.0, 0.8 * step):.1f}"'
            f' height="{height:.1f}" fill="{ACCENT}"{opacity}><title>{html.escape(bar.text)}</title></rect>'
        )
    return _drawing("".join(made), HEIGHT + 2, label)


def strip(of: Sequence[tuple[str, float]], label: str, legends: Sequence[str] = ()) -> str:
    """Draw one horizontal bar, in parts as long as their values, with a legend; ``legends``: the legend's text of the
    values.

    Empty parts are left out.
    """
    total = sum(max(0.0, value) for _, value in of)
    if not total:
        return ""
    at, made, legend = 0.0, [], []
    for number, (name, value) in enumerate(of):
        if value <= 0:
            continue
        width, colour = WIDTH * value / total, COLOURS[number % len(COLOURS)]
        words = html.escape(f"{name} {legends[number]}" if legends else name)
        made.append(
            f'<rect x="{at:.1f}" y="0" width="{max(0.5, width):.1f}" height="22" fill="{colour}">'
            f"<title>{words}</title></rect>"
        )
        legend.append(
            f'<span style="white-space: nowrap; margin-right: 12px"><span style="display: inline-block; width: 10px;'
            f' height: 10px; margin-right: 4px; background: {colour}"></span>{words}</span>'
        )
        at += width
    return _drawing("".join(made), 22, label) + f'<div style="max-width: {WIDTH}px">{" ".join(legend)}</div>'


def _drawing(content: str, height: int, label: str) -> str:
    text = html.escape(label)
    return (
        f'<svg role="img" aria-label="{text}" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        f' style="max-width: 100%; display: block; margin: 4px 0" preserveAspectRatio="none">{content}</svg>'
        f'<div style="opacity: .75; margin-bottom: 4px">{text}</div>'
    )


# Rows as text for a terminal and as HTML for a notebook: long ones folded in the middle, and every cell escaped. HTML
# is one ``<div>`` with its styles inline, so that the page around it does not change; colours are the page's own.

_STYLE: Final = "font: 13px/1.4 system-ui, sans-serif; max-width: 60em"
_CELL: Final = "padding: 1px 10px 1px 0; border: 0; white-space: nowrap; max-width: 34em; overflow: hidden"
_LONGEST: Final = 160
"""Maximum characters of a cell."""


def folded(rows: Sequence[Any], first: int, last: int) -> tuple[Sequence[Any], int, Sequence[Any]]:
    """Return the first and the last of many rows, and the number in between; few rows are returned whole, with 0 and
    none.
    """
    if len(rows) <= first + last + 1:
        return rows, 0, ()
    return rows[:first], len(rows) - first - last, rows[len(rows) - last :]


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Format columns as wide as their widest cell; ``right``: the columns of numbers."""
    cells = [[_one_line(cell, 48) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(heads))]
    ends = set(right)
    lines = [
        "  ".join(c.rjust(w) if at in ends else c.ljust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def html_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = (), first: int = 16, last: int = 8
) -> str:
    """Return a table of text, escaped; of many rows the ``first`` and ``last``."""
    ends = set(right)

    def cells(row: Sequence[str], tag: str) -> str:
        made = []
        for at, cell in enumerate(row):
            side = "right" if at in ends else "left"
            scope = ' scope="col"' if tag == "th" else ""
            text = html.escape(_one_line(cell, _LONGEST))
            made.append(f'<{tag}{scope} style="text-align: {side}; {_CELL}">{text}</{tag}>')
        return f"<tr>{''.join(made)}</tr>"

    above, between, below = folded(rows, first, last)
    fold = f'<tr><td colspan="{len(heads)}" style="text-align: left; {_CELL}; opacity: .7">{between} more</td></tr>'
    body = "".join(cells(row, "td") for row in above) + (fold if between else "")
    body += "".join(cells(row, "td") for row in below)
    return (
        '<table style="font: inherit; border-collapse: collapse; margin: 4px 0; font-variant-numeric: tabular-nums">'
        f"<thead>{cells(heads, 'th')}</thead><tbody>{body}</tbody></table>"
    )


def panel(title: str, *parts: str) -> str:
    """Return an object's notebook view: a title, which is escaped, and results of `html_table` and `pictures`."""
    return (
        f'<div style="{_STYLE}"><div style="font-weight: 600; margin: 4px 0">{html.escape(_one_line(title, 400))}</div>'
        f'<div style="overflow-x: auto">{"".join(parts)}</div></div>'
    )


def _one_line(text: str, most: int) -> str:
    text = "".join(one if one.isprintable() else "�" for one in " ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 1]}…"


# Sizes and times for people: about three digits, and a unit.

_TIMES: Final = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


def size(nbytes: float | None) -> str:
    """Format bytes with a unit, such as "12.0 KiB"; "-" for None."""
    if nbytes is None or not math.isfinite(nbytes):
        return "-"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def duration(ns: float | None) -> str:
    """Format nanoseconds with a suitable unit, such as "1.25 ms"; "-" for None."""
    if ns is None or not math.isfinite(ns):
        return "-"
    for factor, unit in _TIMES:
        if abs(ns) >= factor:
            return f"{ns / factor:.3g} {unit}" if abs(ns) < 1000 * factor else f"{ns / factor:.0f} {unit}"
    return "0"
