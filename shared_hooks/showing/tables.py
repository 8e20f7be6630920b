"""Rows as text for a terminal and as HTML for a notebook: long ones folded in the middle, and every cell escaped.

HTML is one ``<div>`` with its styles inline, so that nothing of the page around it changes; colours are the page's own.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, Final

_STYLE: Final = "font: 13px/1.4 system-ui, sans-serif; max-width: 60em"
_CELL: Final = "padding: 1px 10px 1px 0; border: 0; white-space: nowrap; max-width: 34em; overflow: hidden"
_LONGEST: Final = 160
"""Characters of a cell."""


def folded(rows: Sequence[Any], first: int, last: int) -> tuple[Sequence[Any], int, Sequence[Any]]:
    """The first and the last of many rows, and how many lie between; all of them, 0 and none where they are few."""
    if len(rows) <= first + last + 1:
        return rows, 0, ()
    return rows[:first], len(rows) - first - last, rows[len(rows) - last :]


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Columns as wide as their widest cell; ``right``: the columns of numbers."""
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
    """A table of text, escaped; of many rows the ``first`` and ``last``."""
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
    """One object in a notebook: a title, which is escaped, and what `html_table` and `pictures` made."""
    return (
        f'<div style="{_STYLE}"><div style="font-weight: 600; margin: 4px 0">{html.escape(_one_line(title, 400))}</div>'
        f'<div style="overflow-x: auto">{"".join(parts)}</div></div>'
    )


def _one_line(text: str, most: int) -> str:
    text = "".join(one if one.isprintable() else "�" for one in " ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 1]}…"
