"""Measure what a pruning gains, through a local server, and write its page.

The gain is bytes on the wire and time, whole against pruned. The page has three charts and their tables, in one file
without network requests.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from edge_client.client import EdgeClient
from edge_client.model_choice import ModelChoice
from edge_client.pages import counted, duration, stem
from edge_client.pages import render as page_of
from edge_client.process import local_server
from edge_client.pruning.data import Judged, Trial
from edge_client.screen import milliseconds, size
from edge_client.user_input import NamedInput
from shared_hooks.models import ModelSpec
from shared_hooks.models.inputs import to_device
from shared_hooks.selection.capture import Sample, run
from shared_hooks.showing import short

WARMUP = 3


@dataclass(frozen=True)
class ServedWay:
    """One model to serve: the whole one, a mask, or a smaller one; ``split`` is its cut."""

    kind: str
    keep: int
    split: str
    selection: Path | None

    @property
    def model_id(self) -> str:
        return f"{self.kind}-{self.keep}"


@short
@dataclass(frozen=True)
class Served:
    """Medians over the requests of one way."""

    way: ServedWay
    frontier_bytes: int
    """Bytes of the tensors that cross."""
    bytes_up: int
    """Bytes including their header."""
    latency_ns: float
    quartiles_ns: tuple[float, float]
    exact: int
    """Answers bit-identical to the same model in one process."""
    right: int | None
    requests: int

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "frontier_bytes": self.frontier_bytes,
            "bytes_up": self.bytes_up,
            "latency_ns": self.latency_ns,
            "quartiles_ns": list(self.quartiles_ns),
            "exact": self.exact,
            "right": self.right,
            "requests": self.requests,
            "kind": self.way.kind,
            "keep": self.way.keep,
            "split": self.way.split,
        }


def serve(spec: ModelSpec, ways: Sequence[ServedWay], items: Sequence[NamedInput], choice: ModelChoice) -> list[Served]:
    """Serve the ways in rounds, each once per round, so that none gains from warm-up.

    ``spec`` is that of ``choice``, which names the model by words.
    """
    reference = str(choice.model).removeprefix(f"{spec.model_id}=")
    first, *others = ways
    arguments: list[str] = []
    for way in others:
        arguments += ["--model", f"{way.model_id}={reference}"]
    for way in ways:
        for file in choice.weights:
            arguments += ["--weights", f"{way.model_id}={file}"]
        if way.selection is not None:
            arguments += ["--selection", f"{way.model_id}={way.selection}"]
    with ExitStack() as stack:
        address = stack.enter_context(
            local_server(
                dataclasses.replace(choice, model=f"{first.model_id}={reference}", weights=(), selection=None),
                arguments=arguments,
            )
        )
        clients, models = [], []
        for way in ways:
            own = dataclasses.replace(spec, model_id=way.model_id, selection=way.selection)
            client = EdgeClient(address, choice.with_spec(own), way.split, metrics=False)
            clients.append(stack.enter_context(client))
            models.append(own.load_model(client.device))
        answers: list[list[Any]] = [[] for _ in ways]
        exact, right = [0] * len(ways), [0] * len(ways)
        for number, item in enumerate([*items[:WARMUP], *items]):
            args, kwargs = item.read(spec)
            for index, client in enumerate(clients):
                answer = client.infer(*args, **kwargs)
                if number < min(WARMUP, len(items)):
                    continue
                sample = Sample(to_device(args, client.device), to_device(kwargs, client.device))
                answers[index].append(answer)
                exact[index] += _same(answer.output, run(models[index], sample))
                reported = next(iter(spec.postprocess(answer.output)), None)
                right[index] += reported is not None and reported.label == item.truth
        labelled = all(item.truth is not None for item in items)
        return [
            _served(way, clients[index], answers[index], exact[index], right[index] if labelled else None)
            for index, way in enumerate(ways)
        ]


def _served(way: ServedWay, client: EdgeClient, answers: Sequence[Any], exact: int, right: int | None) -> Served:
    layer = next(layer for layer in client.wrapped.cuts if way.split in (layer.name, str(layer.layer_id)))
    times = sorted(answer.measured_ns for answer in answers)
    first, _, third = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return Served(
        way=way,
        frontier_bytes=layer.frontier_bytes or 0,
        bytes_up=int(statistics.median(answer.bytes_up for answer in answers)),
        latency_ns=statistics.median(times),
        quartiles_ns=(first, third),
        exact=exact,
        right=right,
        requests=len(answers),
    )


def _same(a: Any, b: Any) -> bool:
    """Return whether values are equal: tensors alone or in sequences, mappings and objects with fields."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b.cpu())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b))
    if hasattr(a, "__dict__"):
        return type(a) is type(b) and _same(vars(a), vars(b))
    return bool(a == b)


# The result of one `prune`: made once, shown as text, as a page and as JSON (docs/pruning.md).


@dataclass(frozen=True)
class Smaller:
    """A model with channels removed: its evaluation, and its parameters next to the whole model's."""

    keep: int
    scoring: str
    judged: Judged
    lost: float
    """Share of the whole model's right answers that are lost, 0 to 1."""
    parameters: int
    parameters_whole: int


@short
@dataclass(frozen=True)
class PruneReport:
    """All results. ``inputs``: number of files evaluated on; ``served`` is empty if nothing was served, ``files`` if
    nothing was written.
    """

    model: str
    layer: str
    trial: Trial
    calibration_inputs: int
    inputs: int
    random_seeds: int
    smaller: tuple[Smaller, ...]
    served: tuple[Served, ...]
    files: tuple[str, ...]

    @property
    def metric(self) -> str:
        """The name of `Judged.value`."""
        return "agreement" if self.trial.whole.accuracy is None else "accuracy"

    @property
    def channels(self) -> int:
        return self.trial.captured.channels

    @property
    def all_exact(self) -> bool:
        """Whether every answer of the service equals the same model's in one process."""
        return all(one.exact == one.requests for one in self.served)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        trial, keeps = self.trial, self.trial.keeps
        chosen = {keep: trial.chosen(keep) for keep in keeps}
        return {
            "format": "isthmus-prune",
            "version": 1,
            "model": self.model,
            "layer": self.layer,
            "module": trial.module,
            "split": trial.split,
            "channels": self.channels,
            "places": len(trial.captured.labels),
            "calibration_inputs": self.calibration_inputs,
            "inputs": self.inputs,
            "metric": self.metric,
            "keeps": keeps,
            "whole": asdict(trial.whole),
            "random_seeds": self.random_seeds,
            "rows": [
                {
                    "scoring": row.scoring,
                    "seed": row.seed,
                    "keep": row.keep,
                    **asdict(row.judged),
                    "loss_points": 100 * (trial.whole.value - row.judged.value),
                    "calibration": None if row.calibration is None else asdict(row.calibration),
                    "channels": list(row.mask.keep),
                }
                for row in trial.rows
            ],
            "chosen": {str(keep): row.scoring for keep, row in chosen.items() if row is not None},
            "unavailable": dict(trial.unavailable),
            "structural": [
                {
                    "keep": one.keep,
                    "scoring": one.scoring,
                    **asdict(one.judged),
                    "loss_points": 100 * one.lost,
                    "parameters": one.parameters,
                    "parameters_whole": one.parameters_whole,
                }
                for one in self.smaller
            ],
            "served": [one.as_dict() for one in self.served],
            "files": list(self.files),
        }


TEMPLATE: Final = Path(__file__).parent / "page.html.j2"
Points = Sequence[tuple[float, float]]


def render(report: PruneReport) -> str:
    """Render a report's page (docs/pruning.md) as HTML."""
    contents = [("accuracy", report.metric)]
    contents += [("structural", "cut out of the model")] if report.smaller else []
    contents += [("bytes", "bytes"), ("latency", "latency"), ("served", "served")] if report.served else []
    return page_of(
        TEMPLATE,
        ("lines",),
        {
            "file": stem(f"{report.model}-channels"),
            "model": f"{report.model}, {report.layer}",
            "charts": _charts(report),
        },
        title=f"{report.model}: channel selection",
        kicker="Isthmus prune",
        heading=f"{report.model}: channels of {report.layer}",
        lead=f"Chosen by {counted(report.calibration_inputs, 'input')}, judged on {counted(report.inputs, 'other')}."
        f" The whole model: {report.metric} {_percent(report.trial.whole.value)}.",
        partial=None,
        contents=contents,
        cards=_cards(report),
        metric=report.metric,
        seeds=report.random_seeds,
        accuracy=accuracy_table(report),
        unavailable=list(report.trial.unavailable.items()),
        structural=structural_table(report) if report.smaller else None,
        served=served_table(report) if report.served else None,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _cards(report: PruneReport) -> list[dict[str, str]]:
    """Return the smallest numbers of channels that lose at most a point, the whole model, and whether answers are
    exact.
    """
    trial = report.trial
    cards = []
    preferred = [(keep, row) for keep in trial.keeps if (row := trial.chosen(keep)) is not None]
    cheap = [(keep, row) for keep, row in preferred if trial.whole.value - row.judged.value <= 0.01]
    if cheap:
        keep, row = min(cheap, key=lambda one: one[0])
        cards.append(_card("Fewest channels that lose a point at most", keep, report, row.scoring, row.judged.value))
    elif preferred:
        keep, row = max(preferred, key=lambda one: one[1].judged.value)
        cards.append(
            _card("Best of the choices; each loses more than a point", keep, report, row.scoring, row.judged.value)
        )
    whole = _percent(trial.whole.value)
    cards.append({"title": "The whole model", "figure": whole, "name": f"{report.channels} channels", "text": ""})
    if report.served:
        exact, requested = sum(one.exact for one in report.served), sum(one.requests for one in report.served)
        figure = "all" if exact == requested else _percent(exact / requested)
        text = "equal the same model's in one process, bit by bit"
        cards.append({"title": "Exact answers", "figure": figure, "name": f"{exact} of {requested}", "text": text})
        least = min(report.served, key=lambda one: one.latency_ns)
        name = f"{least.way.kind}, {least.way.keep} channels"
        cards.append(
            {"title": "Fastest through the server", "figure": duration(least.latency_ns), "name": name, "text": ""}
        )
    return cards


def _card(title: str, keep: int, report: PruneReport, scoring: str, value: float) -> dict[str, str]:
    lost = 100 * (report.trial.whole.value - value)
    text = f"{report.metric} {_percent(value)}, {lost:.2f} points lost"
    return {"title": title, "figure": f"{keep} of {report.channels}", "name": scoring, "text": text}


def _charts(report: PruneReport) -> list[dict[str, Any]]:
    """Return the charts for the page's script: lines as (channels, value)."""
    lines, seeds = _lines(report)
    metric = report.metric.capitalize()
    charts = [_drawn("accuracy", metric, lines, seeds, "%", False)]
    for key, title, unit, costs in (
        ("bytes", "Bytes up", "KiB", [one.bytes_up / 1024 for one in report.served]),
        ("latency", "Latency (median)", "ms", [one.latency_ns / 1e6 for one in report.served]),
    ):
        points = [(one.way.kind, (float(one.way.keep), cost)) for one, cost in zip(report.served, costs, strict=True)]
        whole = [point for kind, point in points if kind == "whole"]
        kinds = dict.fromkeys(kind for kind, _ in points if kind != "whole")
        drawn = [(one, sorted([point for kind, point in points if kind == one] + whole)) for one in kinds]
        charts.append(_drawn(key, title, drawn, [], unit, True))
    return charts


def _drawn(
    key: str, title: str, lines: Sequence[tuple[str, Points]], dots: Points, unit: str, zero: bool
) -> dict[str, Any]:
    series = [{"name": name, "points": [list(point) for point in points]} for name, points in lines]
    return {
        "key": key,
        "title": title,
        "series": series,
        "dots": [list(dot) for dot in dots],
        "unit": unit,
        "zero": zero,
    }


def accuracy_table(report: PruneReport) -> tuple[list[str], list[list[str]]]:
    """Return (headers, rows) in per cent: a row per scoring, a column per number of channels; random: mean (range)."""
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


def structural_table(report: PruneReport) -> tuple[list[str], list[list[str]]]:
    """Return (headers, rows) of the smaller models."""
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


def served_table(report: PruneReport) -> tuple[list[str], list[list[str]]]:
    """Return (headers, rows) of the service's measurements."""
    return SERVED_HEADERS, [_served_row(one) for one in report.served]


def _lines(report: PruneReport) -> tuple[list[tuple[str, Points]], Points]:
    """Return each scoring's line, random's mean last, in per cent; and the seeds of random as dots."""
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
