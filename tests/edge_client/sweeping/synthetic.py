"""A sweep that nobody ran: entries and summaries of any size, with names as hostile as wanted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edge_client.planning.objective import Objective, decide
from edge_client.sweeping import report, summary
from edge_client.sweeping.records import REQUESTS, TIMES, Records, Way, ways_of
from edge_client.sweeping.runner import LocalAnswer
from edge_client.sweeping.summary import MeasuredWay, SweepSummary
from edge_client.transport.times import Times
from shared_hooks.metrics.records import ForwardMetrics, LayerMetrics, Reading, TensorShape
from shared_hooks.observers.thumbnails import encoded

NO_METER = Reading.unavailable("no energy meter here")


def cuts(count: int, name: str = "features.{}.conv") -> list[tuple[str, int]]:
    return [(name.format(number), number) for number in range(count)]


def ways(count: int, name: str = "features.{}.conv") -> list[Way]:
    return ways_of(cuts(count, name), files=True, local=True)


def layer(number: int, name: str, ns: int, energy: Reading = NO_METER) -> LayerMetrics:
    return LayerMetrics(
        number, name, "Conv2d", ns, 4096 * (number + 1), (TensorShape("float32", (1, 8, 16, 16)),), ns // 2, energy
    )


def answer(way: Way, names: Sequence[str], dice: random.Random, energy: Reading = NO_METER) -> LocalAnswer:
    """As a request of ``way`` through a model of layers ``names`` might have gone."""
    depth = len(names)
    cut = depth - 1 if way.name == "edge-only" else -1 if way.layer_id is None else way.layer_id

    def around(ns: float) -> int:
        return round(ns * dice.uniform(0.9, 1.2))

    edge = [layer(number, names[number], around(50_000), energy) for number in range(cut + 1)]
    cloud = [layer(number, names[number], around(20_000), energy) for number in range(cut + 1, depth)]
    networked = int(way.networked)
    times = Times(
        prepare=around(300_000),
        edge_other=around(20_000),
        edge_compute=around(60_000 * len(edge) + 10_000),
        encode=around(30_000),
        upload=networked * around(200_000 + 1e7 / (cut + 2)),
        in_transit=networked * around(400_000),
        server_queue=networked * around(20_000),
        server_decode=networked * around(50_000),
        server_compute=around(25_000 * len(cloud) + 1),
        download=networked * around(100_000),
        edge_decode=networked * around(40_000),
    )
    return LocalAnswer(
        output=None,
        layer_id=cut,
        times=times,
        layers_edge=edge,
        layers_cloud=cloud,
        forward_edge=_forward(edge, energy) if edge else None,
        forward_cloud=_forward(cloud, energy) if cloud else None,
        bytes_up=0 if way.name == "edge-only" else 100_000 // (cut + 2),
        measured_ns=times.end_to_end,
        finished_ns=0,
        bytes_down=0 if way.name == "edge-only" else 160,
        sends=networked,
    )


def _forward(layers: list[LayerMetrics], energy: Reading) -> ForwardMetrics:
    total = sum(one.inference_ns for one in layers)
    return ForwardMetrics(total + 5_000, total, total // 2, energy)


def entry(
    index: int,
    all_ways: Sequence[Way],
    *,
    name: str = "image.png",
    repetitions: int = 4,
    seed: int = 0,
    energy: Reading = NO_METER,
    slower: float = 1.0,
    failing: str | None = None,
    error: str = "ModelFailed: it did not like this",
) -> dict[str, Any]:
    """A line of the journal. ``slower`` multiplies all times; requests of the way ``failing`` fail with ``error``."""
    dice = random.Random(seed * 1000 + index)
    names = [way.name for way in all_ways if way.networked and way.layer_id is not None and way.layer_id >= 0]
    records = Records(name, index)
    turns = [(repetition, way, False) for repetition in range(repetitions) for way in all_ways]
    for place, (repetition, way, layers) in enumerate([*turns, *((0, way, True) for way in all_ways)]):
        known = {"layers": layers, "measured_ns": 0, "exact": True, "top1": "7", "top1_agrees": True, "truth": "7"}
        if way.name == failing:
            records.fail(way, repetition, place, error, {"layers": layers, "truth": "7"})
            continue
        one = answer(way, names, dice, energy)
        if not layers:
            one = replace(one, layers_edge=(), layers_cloud=(), forward_edge=None, forward_cloud=None)
        records.add(way, repetition, place, one, known)
    for column in (*(f"{row}_ns" for row in TIMES), "end_to_end_ns", "measured_ns"):
        cells = records.requests[column]
        assert column in REQUESTS
        records.requests[column] = [None if ns is None else round(ns * slower) for ns in cells]
    return {
        "index": index,
        "input": name,
        "repetitions": repetitions,
        "requests": records.requests,
        "rows": records.rows,
        "notes": [[*key, count] for key, count in records.notes.items()],
    }


def prediction(measured: Sequence[MeasuredWay], off: float = 1.05) -> dict[str, Any]:
    """As of a plan that was ``off`` by a factor everywhere."""
    idle = Reading.measured(2.0, "a meter")
    said = [
        replace(one, stages_ns={stage: ns * off for stage, ns in one.stages_ns.items()})
        for one in summary.candidates_measured(measured, idle)
    ]
    return {
        "candidates": [one.as_dict() for one in said],
        "decision": decide(said).as_dict(),
        "why_not": None,
        "idle_power": idle.as_dict(),
        "machines": {
            "edge": {"name": "a-board", "cpu": "8 cores"},
            "cloud": {"name": "a-box", "gpus": [{"name": "G"}]},
        },
        "link": {"rtt_ns": 1e6, "up_bytes_per_second": 1e6, "down_bytes_per_second": None, "source": "measured"},
        "warnings": [],
    }


PICTURE = "data:image/png;base64," + encoded(np.eye(32))


def saw(name: str, module: str, picture: str = "") -> dict[str, Any]:
    """Return the observations of one input (``name``): two attention maps of ``module`` on each side, one long and
    thin, the other over the places of a picture.
    """
    dice = np.random.default_rng(1)
    maps = [picture or encoded(dice.random(form)) for form in ((24, 24), (64, 1))]
    records = [
        {
            "name": module,
            "step": 0,
            "shape": [1, 2, 3, 3],
            "entropy": [0.5] * 12,
            "positions": [[1, 0.5]],
            "picture": one,
            "picture_max": 0.25,
            "over": "" if number else picture or encoded(dice.random((7, 7))),
            "over_max": 0.125,
        }
        for number, one in enumerate(maps)
    ]
    found = {
        "records": records, "notes": [module], "left_out": 0, "failures": 1, "last_failure": module, "cost_ns": 1,
        "pictures_left_out": 2,
    }  # fmt: skip
    seen = {"input": name, "way": module, "picture": PICTURE}
    return {**seen, "observations": {side: {"attention": found} for side in ("edge", "cloud")}}


def known(count: int = 6, **more: Any) -> dict[str, Any]:
    """What `report.write` gives to the page, without files; ``more`` as of `found`."""
    return found(count, **more).as_dict()


def found(
    count: int = 6,
    *,
    name: str = "features.{}.conv",
    model: str = "toy",
    inputs: Sequence[str] = ("a.png", "b.png"),
    predicted: bool = True,
    objective: str = "latency",
    ended: str | None = None,
    observers: str | None = None,
    **more: Any,
) -> SweepSummary:
    """What `report.write` makes, without files. ``observers``: saw a module of this name in all inputs."""
    all_ways = ways(count, name)
    entries = [entry(index, all_ways, name=one, **more) for index, one in enumerate(inputs)]
    requests, rows = report.frames(entries, {})
    plan = prediction(summary.ways_measured(requests, all_ways, {})) if predicted else None
    said = {one["name"]: one for one in plan["candidates"]} if plan else {}
    requests, rows = report.frames(entries, said)
    measured = summary.ways_measured(requests, all_ways, said)
    observed = [] if observers is None else [saw(one, observers) for one in inputs]
    return SweepSummary(
        created="2026-01-01T00:00:00+00:00",
        settings={
            "model": model,
            "server": "started here",
            "repetitions": entries[0]["repetitions"],
            "ways": [[way.name, way.mode] for way in all_ways],
            "inputs": [[one, ""] for one in inputs],
            **({"hooks": ["attention"]} if observed else {}),
        },
        measured_inputs=inputs,
        repetitions=[one["repetitions"] for one in entries],
        ended=ended,
        skipped={},
        versions={"torch": "2", "isthmus": None},
        ways=measured,
        layers=summary.layers_measured(rows),
        prediction=plan,
        outcome=summary.outcome(measured, plan, Objective.parse(objective)),
        failures=summary.failures(requests),
        readings=summary.readings(note for one in entries for note in one["notes"]),
        observed=observed,
    )
