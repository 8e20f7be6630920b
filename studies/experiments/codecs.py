"""The moving cut with codecs: what a loss of half a per cent is worth on the shaped trace.

The same trace as `trace` in three ways: raw bytes, codecs that lose nothing, and codecs with a loss as far as a
calibration allows. The ways take turns, trace by trace, and so do candidates that stay: a machine whose speed drifts
slows all of them. AlexNet's weights are random, so its classes mean nothing: the loss is 1 - cosine of its output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client import ModelChoice, calibrate
from edge_client.planning.codecs import AUTO, Codecs
from studies.experiments import images, trace
from studies.experiments.testbed import SERVER, Testbed, reference

MAX_LOSS = "0.5%"
INPUTS = 12
"""Inputs of the calibration; a mean's bound needs ten."""
USED = 4
"""How many of them are in the trace."""
RAW, LOSSLESS, LOSSY = "raw", "without loss", f"{MAX_LOSS} loss"


@dataclass(frozen=True)
class Scope(trace.Scope):
    """``turns``: of each way, so many traces; of what stays, ``unmoved_seconds`` on each link in every turn."""

    turns: int = 3
    unmoved_seconds: float = 5.0


@dataclass(frozen=True)
class Way:
    """``codecs`` None: raw bytes at every cut."""

    name: str
    codecs: Codecs | None
    words: Sequence[str]


CASES = (trace.Case("AlexNet, tensors", "alexnet", False),)
FULL = Scope(cases=CASES, phase_seconds=10.0, rounds=8, oracle_seconds=10.0)
QUICK = Scope(
    cases=CASES, phase_seconds=6.0, rounds=4, oracle_seconds=6.0, profile_seconds=15.0, turns=1, unmoved_seconds=3.0
)


def run(scope: Scope, say: Callable[[str], None]) -> dict[str, Any]:
    """JSON-able: each trace as `trace.run` has it, and what the ways took, each beside the others of its turn."""
    (case,) = scope.cases
    with tempfile.TemporaryDirectory(prefix="isthmus-experiment-") as folder, contextlib.ExitStack() as stack:
        files = trace.inputs_of(case, images.write(Path(folder), INPUTS, width=960, height=720))
        say(f"{case.name}: calibrating ...")
        choice = ModelChoice(reference(case.model), device="cpu", threads=1)
        words: dict[str, Any] = {"kind": "embedding", "max_loss": MAX_LOSS, "progress": False}
        table = calibrate(choice, files, output=folder, **words).table
        file = str(Path(folder) / "calibration.json")
        ways = [
            Way(RAW, None, ()),
            Way(LOSSLESS, Codecs.of(AUTO), (AUTO,)),
            Way(LOSSY, Codecs.of(AUTO, table, MAX_LOSS), (AUTO, file, MAX_LOSS)),
        ]
        bed = stack.enter_context(Testbed((case.model,)))
        ready: dict[str, trace.Ready] = {}
        for way in ways:
            edge = bed.edge("studies.experiments.edge", reference(case.model), SERVER, *way.words)
            named = dataclasses.replace(case, name=f"{case.name}, {way.name}")
            ready[way.name] = trace.gather(bed, stack.enter_context(edge), named, files[:USED], scope, say, way.codecs)
        turns: list[dict[str, dict[str, Any]]] = []
        stays: list[dict[str, dict[str, float]]] = []
        for _ in range(scope.turns):
            turns.append({name: trace.play(bed, one, scope, say) for name, one in ready.items()})
            stays.append(trace.unmoved(bed, ready[LOSSY], scope.unmoved_seconds))
    allowed = sum(one.within(table.max_loss) and not one.lossless for cut in table.cuts for one in cut.codecs)
    return {
        "cases": [found for turn in turns for found in turn.values()],
        "ways": {name: [turn[name]["mean_ms"] for turn in turns] for name in ready},
        "fixed": fixed(stays, [turn[LOSSY]["phases"] for turn in turns]),
        "calibration": {"inputs": INPUTS, "cuts": len(table.cuts), "lossy_allowed": allowed},
    }


def fixed(
    stays: Sequence[Mapping[str, Mapping[str, float]]], moving: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Compare the best candidate that was kept through all phases with a server with the trace's own requests in these
    phases. Each phase counts as much as another.
    """
    names = {name for name, mbits in trace.RATES if mbits is not None}
    means = {key: [statistics.fmean(turn[key].values()) for turn in stays] for key in stays[0]}
    best = min(means, key=lambda key: statistics.fmean(means[key]))
    own = [statistics.fmean(one["mean_ms"] for one in phases if one["name"] in names) for phases in moving]
    return {"candidate": best, "means_ms": means, "moving_ms": own, "by_phase_ms": list(stays)}
