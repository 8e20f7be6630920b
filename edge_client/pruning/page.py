"""The page of a pruning: three drawings and their tables, in one file that asks no network for anything.

Names of models, layers and labels reach it escaped; it runs no script.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from edge_client.pruning.report import Report
from edge_client.pruning.served import Served
from edge_client.screen.text import milliseconds, size

WIDTH: Final = 640
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 40
COLORS: Final = ("#2f6fde", "#14917f", "#e07b2f", "#9a6bd3", "#c9364f", "#8a6d00", "#7d8592")

Points = Sequence[tuple[float, float]]

STYLE: Final = """
:root { --ground: #f6f7f9; --paper: #fff; --ink: #16191f; --soft: #5b6472; --line: #dde1e7; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #12151a; --paper: #1a1f27; --ink: #e8ebf0; --soft: #9ba5b4; --line: #2e3541; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 960px; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 16px; margin: 16px 0; }
h1, h2 { line-height: 1.2; margin: 0 0 6px; } h2 { font-size: 1.15rem; }
p, text { color: var(--soft); fill: var(--soft); } text { font-size: 12px; }
svg { width: 100%; height: auto; } .grid { stroke: var(--line); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.legend span { margin-right: 14px; white-space: nowrap; font-size: .85rem; }
.legend i { display: inline-block; width: 14px; height: 4px; margin-right: 6px; vertical-align: middle; }
"""


def render(report: Report) -> str:
    """The page of a report (docs/pruning.md), as HTML."""
    lines, seeds = _lines(report)
    parts = [
        f"<h1>{escape(report.model)}: channels of {escape(report.layer)}</h1>",
        f"<p>Chosen by {report.calibration_inputs} inputs, judged on {report.inputs} others. The whole model:"
        f" {report.metric} {100 * report.trial.whole.value:.2f} %.</p>",
        _section(
            f"{report.metric.capitalize()} against channels kept",
            f"The control, {report.random_seeds} random choices: their mean is the dashed line, each one a dot.",
            _legend([name for name, _ in lines]) + _chart(lines, seeds, "channels kept", "%"),
            _table(*accuracy_table(report)),
        ),
    ]
    if report.smaller:
        text = "The preferred choice of each number, taken out of the model's layers."
        parts.append(_section("Cut out of the model", text, _table(*structural_table(report))))
    served = report.served
    if served:
        for title, unit, costs in (
            ("Bytes up, a request", "KiB", [one.bytes_up / 1024 for one in served]),
            ("Latency, a request (median)", "ms", [one.latency_ns / 1e6 for one in served]),
        ):
            points = [(one.way.kind, (float(one.way.keep), cost)) for one, cost in zip(served, costs, strict=True)]
            whole_point = [point for kind, point in points if kind == "whole"]
            kinds = dict.fromkeys(kind for kind, _ in points if kind != "whole")
            drawn = [
                (kind, sorted([point for its_kind, point in points if its_kind == kind] + whole_point))
                for kind in kinds
            ]
            text = "Measured through a server on this machine; the last point is the whole model at the same cut."
            parts.append(
                _section(title, text, _legend(list(kinds)) + _chart(drawn, [], "channels kept", unit, zero=True), "")
            )
        parts.append(_section("Served", "", "", _table(*served_table(report))))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"'
        f' content="{policy}"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.model)}: channel selection</title><style>{STYLE}</style></head><body>"
        f"{''.join(parts)}</body></html>\n"
    )


def accuracy_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """(headers, rows) in percent: a row a scoring, a column a number of channels; random: mean (lowest to highest)."""
    trial, rows = report.trial, []
    chosen = {keep: trial.chosen(keep) for keep in trial.keeps}
    for name in dict.fromkeys(row.scoring for row in trial.rows):
        cells = [name]
        for keep, best in chosen.items():
            found = [100 * row.judged.value for row in trial.rows if (row.scoring, row.keep) == (name, keep)]
            mark = " *" if best is not None and best.scoring == name else ""
            if len(found) == 1:
                cells.append(f"{found[0]:.2f}{mark}")
            else:
                cells.append(f"{sum(found) / len(found):.2f} ({min(found):.2f} to {max(found):.2f}){mark}")
        rows.append(cells)
    return ["scoring", *(f"{keep} of {report.channels}" for keep in chosen)], rows


def structural_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """(headers, rows) of the smaller models."""
    rows = [
        [
            str(one.keep),
            one.scoring,
            f"{100 * one.judged.value:.2f}",
            f"{100 * one.lost:+.2f}",
            f"{one.parameters:,} of {one.parameters_whole:,}",
        ]
        for one in report.smaller
    ]
    return ["channels", "scoring", f"{report.metric} %", "points lost", "parameters"], rows


SERVED_HEADERS: Final = ["served", "channels", "frontier", "bytes up", "median ms", "quartiles ms", "exact", "right"]


def _served_row(one: Served) -> list[str]:
    low, high = one.quartiles_ns
    return [
        one.way.kind,
        str(one.way.keep),
        size(one.frontier_bytes),
        size(one.bytes_up),
        milliseconds(one.latency_ns),
        f"{milliseconds(low)} to {milliseconds(high)}",
        f"{one.exact} of {one.requests}",
        "-" if one.right is None else f"{one.right} of {one.requests}",
    ]


def served_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """(headers, rows) of what went through the service."""
    return SERVED_HEADERS, [_served_row(one) for one in report.served]


def _lines(report: Report) -> tuple[list[tuple[str, Points]], Points]:
    """Each scoring's line, random's mean last, in percent; the seeds of random as dots."""
    trial = report.trial
    lines: list[tuple[str, Points]] = []
    seeds: list[tuple[float, float]] = []
    for name in dict.fromkeys(row.scoring for row in trial.rows):
        rows = [row for row in trial.rows if row.scoring == name]
        by_keep = {keep: [100 * row.judged.value for row in rows if row.keep == keep] for keep in trial.keeps}
        points = [(float(keep), sum(found) / len(found)) for keep, found in by_keep.items() if found]
        lines.append((name, [*points, (float(report.channels), 100 * trial.whole.value)]))
        if name == "random":
            seeds = [(float(row.keep), 100 * row.judged.value) for row in rows]
    return lines, seeds


def _chart(lines: Sequence[tuple[str, Points]], dots: Points, x_name: str, unit: str, zero: bool = False) -> str:
    every = [point for _, points in lines for point in points] + list(dots)
    if not every:
        return ""
    xs, ys = [x for x, _ in every], [y for _, y in every]
    ticks = _ticks(0.0 if zero else min(ys), max(ys))
    low, high = ticks[0], ticks[-1]
    left, right = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, max(xs) + 1)

    def x_of(x: float) -> float:
        return LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)

    drawn = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value in ticks:
        drawn.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}"/>'
        )
        drawn.append(f'<text x="{LEFT - 6}" y="{y_of(value) + 4:.1f}" text-anchor="end">{value:.4g} {unit}</text>')
    for x in sorted(set(xs)):
        drawn.append(f'<text x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    drawn.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{x_name}</text>')
    for (name, points), color in zip(lines, _colors(len(lines)), strict=True):
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if name == "random" else ""
        drawn.append(f'<polyline fill="none" stroke="{color}" stroke-width="2"{dash} points="{path}"/>')
        drawn += [
            f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="4" fill="{color}"><title>{escape(name)}, {x:g}: {y:.4g}'
            f" {unit}</title></circle>"
            for x, y in points
        ]
    drawn += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.5" fill="{COLORS[-1]}"/>' for x, y in dots]
    return "".join([*drawn, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, evenly spaced, from at most ``low`` to at least ``high``."""
    rough = max(high - low, abs(high) * 1e-6, 1e-9) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _colors(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]


def _legend(names: Sequence[str]) -> str:
    signs = [
        f'<span><i style="background:{color}"></i>{escape(name)}</span>'
        for name, color in zip(names, _colors(len(names)), strict=True)
    ]
    return f'<p class="legend">{"".join(signs)}</p>'


def _section(title: str, text: str, *inside: str) -> str:
    about = f"<p>{escape(text)}</p>" if text else ""
    return f"<section><h2>{escape(title)}</h2>{about}{''.join(inside)}</section>"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
