"""The moving cut with codecs: what a loss of half a per cent is worth on the shaped trace.

The same trace as `trace`, three times over: raw bytes, codecs that lose nothing, and codecs with a loss as far as a
calibration allows. AlexNet's weights are random, so its classes mean nothing: the loss is 1 - cosine of its output.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client import ModelChoice, calibrate
from edge_client.planning.codecs import AUTO, Codecs
from studies.experiments import images
from studies.experiments.testbed import Testbed, reference
from studies.experiments.trace import RATES, Case, Scope, inputs_of, run_case

MAX_LOSS = "0.5%"
INPUTS = 12
"""Of the calibration; a mean's bound needs ten."""
USED = 4
"""Of them in the trace."""


@dataclass(frozen=True)
class Way:
    """``codecs`` None: raw bytes at every cut."""

    name: str
    codecs: Codecs | None
    words: Sequence[str]


FULL = Scope(cases=(Case("AlexNet, tensors", "alexnet", False),), rounds=8, oracle_seconds=10.0)
QUICK = Scope(cases=FULL.cases, phase_seconds=6.0, rounds=4, oracle_seconds=6.0, profile_seconds=15.0)


def run(scope: Scope, say: Callable[[str], None]) -> dict[str, Any]:
    """JSON-able: as `trace.run`, a case for each way, and what the best fixed cut and codec would have taken."""
    (case,) = scope.cases
    with tempfile.TemporaryDirectory(prefix="isthmus-experiment-") as folder:
        files = inputs_of(case, images.write(Path(folder), INPUTS, width=960, height=720))
        say(f"{case.name}: calibrating ...")
        choice = ModelChoice(reference(case.model), device="cpu", threads=1)
        words: dict[str, Any] = {"kind": "embedding", "max_loss": MAX_LOSS, "progress": False}
        table = calibrate(choice, files, out=folder, **words).table
        file = str(Path(folder) / "calibration.json")
        ways = [
            Way("raw", None, ()),
            Way("without loss", Codecs.of(AUTO), (AUTO,)),
            Way(f"{MAX_LOSS} loss", Codecs.of(AUTO, table, MAX_LOSS), (AUTO, file, MAX_LOSS)),
        ]
        cases = []
        with Testbed((case.model,)) as bed:
            for way in ways:
                found = run_case(bed, case, files[:USED], scope, say, way.codecs, way.words)
                cases.append({**found, "case": f"{case.name}, {way.name}", **fixed(found)})
    allowed = sum(one.within(table.max_loss) and not one.lossless for cut in table.cuts for one in cut.codecs)
    return {"cases": cases, "calibration": {"inputs": INPUTS, "cuts": len(table.cuts), "lossy_allowed": allowed}}


def fixed(case: Mapping[str, Any]) -> dict[str, Any]:
    """Of the candidates that were kept through all phases with a server the best, and the trace's own requests in these
    phases. Each phase counts as much as another.
    """
    if not case["unmoved"]:
        return {}
    names = [name for name, mbits in RATES if mbits is not None]
    means = {key: statistics.fmean(phases.values()) for key, phases in case["unmoved"].items()}
    best = min(means, key=lambda key: means[key])
    moving = statistics.fmean(phase["mean_ms"] for phase in case["phases"] if phase["name"] in names)
    return {"fixed": {"candidate": best, "mean_ms": means[best], "means_ms": means, "moving_ms": moving}}
