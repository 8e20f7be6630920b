"""Small pictures as inline SVG: bars, and one bar in parts. Colours are readable on light and on dark paper."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 90
MOST_BARS: Final = 160
ACCENT: Final = "#3b82c4"
COLOURS: Final = ("#3b82c4", "#8a63d2", "#d9822b", "#2f9e6e", "#c94f6d", "#8c8c8c", "#5aa7a7", "#b59b2f")


@dataclass(frozen=True, slots=True)
class Bar:
    """``value`` is what the length says, ``text`` what it is, shown under the pointer; ``faint``: drawn pale."""

    value: float
    text: str
    faint: bool = False


def bars(of: Sequence[Bar], label: str) -> str:
    """One upright bar for each, from the left; of very many, the highest of each few. ``label`` is its caption."""
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


def strip(of: Sequence[tuple[str, float]], label: str, said: Sequence[str] = ()) -> str:
    """One lying bar, in parts as long as their values, with a legend; ``said``: the legend's words for the values.

    Parts of nothing are left out.
    """
    total = sum(max(0.0, value) for _, value in of)
    if not total:
        return ""
    at, made, legend = 0.0, [], []
    for number, (name, value) in enumerate(of):
        if value <= 0:
            continue
        width, colour = WIDTH * value / total, COLOURS[number % len(COLOURS)]
        words = html.escape(f"{name} {said[number]}" if said else name)
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
