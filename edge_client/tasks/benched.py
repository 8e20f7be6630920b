"""What a bench returns: the figures of each rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any, Final

from edge_client.benching import page
from edge_client.benching.results import FORMAT, KEPT, knee
from edge_client.benching.spread import FEW_BEYOND
from edge_client.screen.table import Column, fitted
from edge_client.screen.text import finite, printable
from edge_client.spoken import option
from edge_client.tasks.tabular import Row, Tabular

SPARE: Final = ("beyond", "p90 ms", "answers/s", "put off")
"""Columns that give way where a terminal is narrow, in turn."""


@dataclass(frozen=True, repr=False)
class Benched(Tabular):
    """`edge_client.bench` returns it. A row is a rate.

    ``steps``: the figures of each rate, as `edge_client.benching.step` has them; ``ended``: why it is not complete,
    None where it is; ``failure``: the same as an error (KeyboardInterrupt, ServerUnavailable).
    """

    model: str
    settings: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    ended: str | None = None
    failure: BaseException | None = field(default=None, compare=False)

    shown = {  # noqa: RUF012
        "rate": "rate",
        "goodput": "goodput",
        "p50_ns": "p50 ms",
        "p99_ns": "p99 ms",
        "refused": "refused",
        "lost": "lost",
    }

    @property
    def knee(self) -> float | None:
        """The highest rate of which 95 % were answered in time, as of all lower ones; None where it was none."""
        return knee(self.steps)

    def title(self) -> str:
        found = "none" if self.knee is None else f"{self.knee:g}/s"
        return f"{self.model}: {len(self.steps)} rates, {self.settings['clients']} clients; knee: {found}"

    def rows(self) -> list[Row]:
        plain = ("rate", "offered", "seconds", "requests", "answered", "in_time", "late", "refused", "lost", "put_off")
        return [
            {
                **{name: one[name] for name in plain},
                "throughput": one["throughput"],
                "goodput": one["goodput"]["value"],
                **{f"{name}_ns": one["latency"][name]["value"] for name in ("p50", "p90", "p99")},
                "p99_low_ns": one["latency"]["p99"]["low"],
                "p99_high_ns": one["latency"]["p99"]["high"],
                "beyond_p99": one["latency"]["p99"]["beyond"],
                "generator_late_p99_ns": one["generator"]["late_p99_ns"],
                "bottleneck": one["generator"]["bottleneck"],
            }
            for one in self.steps
        ]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: the file that ``edge-client compare`` reads."""
        known = {"format": FORMAT, "model": self.model, "settings": dict(self.settings), "knee": self.knee}
        whole: dict[str, Any] = finite({**known, "ended": self.ended, "steps": [dict(one) for one in self.steps]})
        return whole

    def page(self) -> str:
        """HTML: one file that asks no network. Needs the extra "sweep"."""
        return page.render(self.as_dict())

    def text(self, width: int | None = None) -> str:
        """A line a rate, and what there is to know of it; no wider than ``width`` where that can be."""
        deadline = f"{self.settings['deadline']:g} s"
        lines = [fitted(_columns(self.steps), SPARE, width), ""] if self.steps else []
        if self.knee is not None:
            lines.append(f"knee: {self.knee:g}/s: up to there {KEPT:.0%} are answered within {deadline}")
        elif self.steps:
            lines.append(f"knee: none: at the lowest rate fewer than {KEPT:.0%} are answered within {deadline}")
        lines.append("goodput: answers within it, a second; latency counts from when a request was to begin")
        if any(not one["latency"][name]["sure"] for one in self.steps for name in ("p50", "p90", "p99")):
            lines.append(f"?: fewer than {FEW_BEYOND} requests are beyond it; more {option('seconds')} make it sure")
        lines += [line for one in self.steps for line in _told(one)]
        if self.ended is not None:
            lines.append(f"NOT COMPLETE: {printable(self.ended)}")
        narrow = [
            line if width is None or "\n" in line else fill(line, width, subsequent_indent="  ") for line in lines
        ]
        return "\n".join(narrow)


def _columns(steps: Sequence[Mapping[str, Any]]) -> list[Column]:
    def column(header: str, cells: list[str]) -> Column:
        return Column(header, cells)

    def quantile(name: str) -> list[str]:
        return [_ms(one["latency"][name]) for one in steps]

    return [
        column("rate/s", [f"{one['rate']:g}" for one in steps]),
        column("goodput", [f"{one['goodput']['value']:.1f}" for one in steps]),
        column("answers/s", [f"{one['throughput']:.1f}" for one in steps]),
        column("p50 ms", quantile("p50")),
        column("p90 ms", quantile("p90")),
        column("p99 ms", quantile("p99")),
        column("beyond", [f"{one['latency']['p99']['beyond']}" for one in steps]),
        *(column(name.replace("_", " "), [f"{one[name]}" for one in steps]) for name in ("late", "refused", "lost")),
        column("put off", [f"{one['put_off']}" for one in steps]),
    ]


def _ms(one: Mapping[str, Any]) -> str:
    """With a question mark where few requests are beyond it; "-" where it lies among those without an answer."""
    value = one["value"]
    if value is None or value == float("inf") or value != value:
        return "-"
    return f"{value / 1e6:.1f}{'' if one['sure'] else '?'}"


def _told(one: Mapping[str, Any]) -> list[str]:
    at, lines = f"{one['rate']:g}/s", []
    if one["errors"]:
        lines.append(f"{at}: errors: {', '.join(f'{count} {name}' for name, count in one['errors'].items())}")
    if one["abandoned"]:
        lines.append(f"{at}: {one['abandoned']} under way when it ended, which count for nothing")
    if (why := one["generator"]["bottleneck"]) is not None:
        lines.append(f"{at}: the generator was a bottleneck: {why}")
    return lines
