"""Run a bench: check its options, measure its rates in turn, return its figures. Loads no torch."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from textwrap import fill
from typing import Any, Final

import numpy as np
import psutil

from edge_client import interrupts
from edge_client.benching.generator import Gang
from edge_client.benching.load import FEW_BEYOND, Weighted, at_rate, cuts_of, mean_rate, shots, trace
from edge_client.benching.load import arrivals as arrivals_of
from edge_client.benching.results import FORMAT, KEPT, knee, render, step
from edge_client.options import BenchOptions
from edge_client.screen import Column, Row, Tabular, finite, fitted, printable
from edge_client.screen import progress as bar
from edge_client.user_text import check_seconds, option
from shared_hooks.errors import ServerUnavailable, SpecError

# What a bench returns: the figures of each rate.

SPARE: Final = ("beyond", "p90 ms", "answers/s", "put off")
"""Columns dropped in turn if a terminal is narrow."""


@dataclass(frozen=True, repr=False)
class Benched(Tabular):
    """Result of `edge_client.bench`. A row is a rate.

    ``steps``: the figures of each rate, see `edge_client.benching.results`; ``ended``: why it is incomplete, or None;
    ``failure``: the exception (KeyboardInterrupt, ServerUnavailable).
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
        """The highest rate of which 95 % were answered in time, as of all lower ones; None if there is none."""
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
        """Return JSON data: the file that ``edge-client compare`` reads."""
        known = {"format": FORMAT, "model": self.model, "settings": dict(self.settings), "knee": self.knee}
        whole: dict[str, Any] = finite({**known, "ended": self.ended, "steps": [dict(one) for one in self.steps]})
        return whole

    def page(self) -> str:
        """Render as HTML: one file without network requests. Needs the extra "sweep"."""
        return render(self.as_dict())

    def text(self, width: int | None = None) -> str:
        """Format a line per rate, and notes; no wider than ``width`` if possible."""
        deadline = f"{self.settings['deadline']:g} s"
        lines = [fitted(_columns(self.steps), SPARE, width), ""] if self.steps else []
        if self.knee is not None:
            lines.append(f"knee: {self.knee:g}/s: up to there {KEPT:.0%} are answered within {deadline}")
        elif self.steps:
            lines.append(f"knee: none: at the lowest rate fewer than {KEPT:.0%} are answered within {deadline}")
        lines.append("goodput: answers within it, a second; latency counts from when a request was to begin")
        if any(not one["latency"][name]["sure"] for one in self.steps for name in ("p50", "p90", "p99")):
            lines.append(f"?: fewer than {FEW_BEYOND} requests are beyond it; more {option('seconds')} make it sure")
        lines += [line for one in self.steps for line in _lines_of(one)]
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
    """Format milliseconds, with a question mark if few requests are beyond; "-" if it is among those without
    an answer.
    """
    value = one["value"]
    if value is None or value == float("inf") or value != value:
        return "-"
    return f"{value / 1e6:.1f}{'' if one['sure'] else '?'}"


def _lines_of(one: Mapping[str, Any]) -> list[str]:
    at, lines = f"{one['rate']:g}/s", []
    if one["errors"]:
        lines.append(f"{at}: errors: {', '.join(f'{count} {name}' for name, count in one['errors'].items())}")
    if one["abandoned"]:
        lines.append(f"{at}: {one['abandoned']} under way when it ended, which count for nothing")
    if (why := one["generator"]["bottleneck"]) is not None:
        lines.append(f"{at}: the generator was a bottleneck: {why}")
    return lines


@dataclass(frozen=True, kw_only=True)
class BenchTerms(BenchOptions):
    """`BenchOptions`, checked. Raises SpecError for invalid ones."""

    def __post_init__(self) -> None:
        for name in ("deadline", "give_up", "patience", *(() if self.seconds is None else ("seconds",))):
            check_seconds(name, getattr(self, name))
        if not 0 <= self.warmup < math.inf:
            raise SpecError(f"{option('warmup', self.warmup)}: must be a number of seconds, 0 or more")
        for name in ("clients", "in_flight", "processes"):
            if getattr(self, name) < 1:
                raise SpecError(f"{option(name, getattr(self, name))}: must be a whole number of at least 1")
        if self.processes > self.clients:
            raise SpecError(
                f"{option('processes', self.processes)}: more than the {self.clients} clients that they are to run"
            )
        if self.deadline > self.give_up:
            raise SpecError(
                f"{option('deadline', self.deadline)}: after {option('give_up', self.give_up)}, when the clients have "
                "left"
            )
        _ = self.cuts, self.rates, self.times

    @cached_property
    def cuts(self) -> tuple[Weighted, ...]:
        return cuts_of(self.split)

    @cached_property
    def _trace(self) -> np.ndarray | None:
        return trace(self.arrivals)

    @cached_property
    def rates(self) -> list[float]:
        return _rates(self.rate, self._trace)

    @cached_property
    def times(self) -> list[np.ndarray]:
        """Return the schedule of each rate."""
        length = _length(self.seconds, self.warmup, self._trace)
        return [
            _times(self.arrivals, self._trace, one, length, self.warmup, np.random.default_rng([self.seed, at]))
            for at, one in enumerate(self.rates)
        ]

    def settings(self) -> dict[str, Any]:
        """Return the settings for the result."""
        names = "arrivals split codec clients in_flight exact recorded processes warmup deadline give_up seed"
        return {name: getattr(self, name) for name in names.split()}


def measured(
    terms: BenchTerms, gang: Gang, model: str, inputs: int, about: Mapping[str, Any], progress: bool
) -> Benched:
    """Measure every rate in turn, with ``inputs`` inputs to draw from. ``about``: more settings. What ends it early
    does not lose the results so far.
    """
    run = _Run(gang, terms, inputs)
    steps, ended, failure = _all(run, terms.rates, terms.times, progress)
    settings = {
        **terms.settings(),
        "inputs": inputs,
        "machine": platform.machine(),
        "processors": psutil.cpu_count(),
        **about,
    }
    return Benched(model, settings, tuple(steps), ended, failure)


@dataclass(frozen=True)
class _Run:
    """What all rates have in common."""

    gang: Gang
    terms: BenchTerms
    inputs: int


def _all(
    run: _Run, rates: Sequence[float], plans: Sequence[np.ndarray], progress: bool
) -> tuple[list[dict[str, Any]], str | None, BaseException | None]:
    """Return the steps, and why it ended early, in words and as an exception."""
    steps: list[dict[str, Any]] = []
    spans = [float(times[-1]) if len(times) else 0.0 for times in plans]
    try:
        with bar("bench", len(rates), progress) as advance:
            advance("", done=0, left=sum(spans))
            for at, (rate, times) in enumerate(zip(rates, plans, strict=True)):
                one = _step(run, rate, times, np.random.default_rng([run.terms.seed, at, 1]))
                steps.append(one)
                in_time = f"{rate:g} a second: {one['goodput']['value']:.1f} in time"
                advance(in_time, left=sum(spans[at + 1 :]))
                if (why := one["ended"]) is not None:
                    failure = KeyboardInterrupt() if why == "interrupted" else ServerUnavailable(f"{why} at {rate:g}/s")
                    return steps, f"{why} at {rate:g} a second", failure
    except KeyboardInterrupt as error:
        interrupts.acknowledge()
        return steps, "interrupted", error
    return steps, None, None


def _step(run: _Run, rate: float, times: np.ndarray, dice: np.random.Generator) -> dict[str, Any]:
    terms = run.terms
    planned = shots(times, terms.cuts, run.inputs, terms.clients, dice)
    psutil.cpu_percent()  # starts the interval
    fired = run.gang.fire(planned, terms.give_up)
    machine = psutil.cpu_percent() / 100
    return step(
        rate,
        planned,
        fired,
        warmup=terms.warmup,
        seconds=max(float(times[-1]) - terms.warmup, 1e-9),
        deadline=terms.deadline,
        ways=[one.word for one in terms.cuts],
        machine=machine,
        recorded=terms.recorded,
    )


def _rates(rate: float | Sequence[float] | None, times: np.ndarray | None) -> list[float]:
    if rate is None:
        return [10.0 if times is None else mean_rate(times)]
    rates = [float(one) for one in ([rate] if isinstance(rate, (int, float)) else rate)]
    for one in rates:
        if not 0 < one < math.inf:
            raise SpecError(f"{option('rate', one)}: must be a number above 0")
    if not rates or len(set(rates)) < len(rates):
        raise SpecError(
            f"{option('rate')}: {', '.join(f'{one:g}' for one in rates) or 'none'}: each once, one at least"
        )
    return rates


def _length(seconds: float | None, warmup: float, times: np.ndarray | None) -> float | None:
    """Return the seconds over which a rate's arrivals are spread; None: as long as the trace."""
    if seconds is None:
        return None if times is not None else 10.0 + warmup
    return seconds + warmup


def _times(
    kind: str, times: np.ndarray | None, rate: float, length: float | None, warmup: float, dice: np.random.Generator
) -> np.ndarray:
    if times is None:
        assert length is not None
        found = arrivals_of(kind, rate, length, dice)
    else:
        found = at_rate(times, rate)
        found = found if length is None else found[found < length]
    if not len(found) or found[-1] <= warmup:
        raise SpecError(
            f"at {rate:g} a second no request begins after the {warmup:g} s of {option('warmup')}: a higher rate, "
            f"or more {option('seconds')}"
        )
    return found
