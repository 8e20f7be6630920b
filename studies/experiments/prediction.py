"""Predicted against measured latency, over every candidate of every model on every link.

For each model: profile both sides once; for each rate: probe the link, predict, and then measure with real requests,
one at a time. The edge profiles, probes and measures in one process under one quota, so that all of it is slow alike.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.call import Load
from edge_client.planning.link import Curve, Link, as_points
from edge_client.planning.objective import STAGES, Candidate
from edge_client.planning.predict import Correction, RequestSample, cuts_to_measure, predict
from edge_client.survey import CORRECTION_ROUNDS
from edge_client.sweeping.records import SEGMENTS, STAGE_SEGMENTS
from edge_client.user_text import EDGE_ONLY
from shared_hooks.profiling import profile as profiles
from shared_hooks.profiling.profile import INPUT_CUT
from studies.experiments import images
from studies.experiments.testbed import ROOT, SERVER, Testbed, reference

ROWS_OF = {stage: [row for one in STAGE_SEGMENTS[stage] for row in SEGMENTS[one]] for stage in STAGES}
"""A plan's stage -> the rows of a request's time that measure it."""
PROBE_SIZES = (0, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
ANSWER_SIZES = (0, 1 << 10, 4 << 10)


@dataclass(frozen=True)
class Scope:
    """How much is measured. ``every``: of the candidates, each n-th; the ends always."""

    models: Sequence[str] = ("digits", "alexnet", "vit", "resnet18")
    rates: Sequence[float] = (100, 20, 5)
    rounds: int = 7
    seconds: float = 50.0
    every: int = 1
    profile_seconds: float = 25.0
    profile_repetitions: int = 20
    probe_seconds: float = 8.0


FULL = Scope()
QUICK = Scope(models=("digits", "alexnet"), rounds=3, seconds=20.0, every=4, profile_seconds=15.0, probe_seconds=4.0)


def run(scope: Scope, say: Callable[[str], None]) -> dict[str, Any]:
    """JSON-able: for each model and rate every candidate's stages, predicted and measured, and a summary of all."""
    with tempfile.TemporaryDirectory(prefix="isthmus-experiment-") as folder, Testbed(scope.models) as bed:
        scenes = [str(path) for path in images.write(Path(folder), 4)]
        runs = [one for model in scope.models for one in _model(bed, model, files_of(model, scenes), scope, say)]
    return {"runs": runs, "summary": summary(runs)}


def files_of(model: str, scenes: Sequence[str]) -> Sequence[str]:
    """The input files of a model."""
    shipped = sorted((ROOT / "shared_hooks" / "models" / "digits" / "images").glob("*.png"))
    return [str(path) for path in shipped[:8]] if model == "digits" else scenes


def ask(process: subprocess.Popen[str], do: str, **words: Any) -> Any:
    """One line to `studies.experiments.edge`, and its answer."""
    assert process.stdin is not None and process.stdout is not None
    if do:
        process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise OSError(f"the edge ended during {do or 'its start'}; what it said is above")
    return json.loads(line)


def link_of(probed: Any) -> tuple[Link, Load]:
    """What `edge.Edge.probe` answers, as a plan takes it."""
    return Link(Curve(as_points(probed["up"])), Curve(as_points(probed["down"]))), Load(**probed["load"])


def _model(
    bed: Testbed, model: str, files: Sequence[str], scope: Scope, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    with bed.edge("studies.experiments.edge", reference(model), SERVER) as process:
        ask(process, "")
        bed.slow(process)
        bed.network.rate(100)
        say(f"{model}: profiles ...")
        depth = {"repetitions": scope.profile_repetitions, "seconds": scope.profile_seconds}
        edge = profiles.from_json(ask(process, "profile", file=files[0], **depth))
        cloud = profiles.from_json(ask(process, "cloud", **depth))
        found = []
        for rate in scope.rates:
            bed.network.rate(rate)
            asked = [EDGE_ONLY, *cuts_to_measure([one.name for one in edge.cuts if one.layer_id != INPUT_CUT])]
            how = {"candidates": asked, "files": files[:1], "rounds": CORRECTION_ROUNDS, "seconds": 1.0}
            before = ask(process, "measure", **how, seed=1, warm=True)
            probed = ask(process, "probe", sizes=PROBE_SIZES, answer_sizes=ANSWER_SIZES, seconds=scope.probe_seconds)
            after = ask(process, "measure", **how, seed=2, warm=True)
            link, load = link_of(probed)
            plain = {one.name: one for one in predict(edge, cloud, link, load, file=edge.files[0])}
            correction = corrected(plain, before, after)
            fixed = predict(edge, cloud, link, load, file=edge.files[0], correction=correction)
            predicted = {one.name: one for one in fixed}
            names = list(predicted)
            names = [name for number, name in enumerate(names) if number < 3 or number % scope.every == 0]
            measured = ask(
                process,
                "measure",
                candidates=names,
                files=files[:1],
                rounds=scope.rounds,
                seconds=scope.seconds,
                seed=int(rate),
                warm=rate == scope.rates[0],
            )
            candidates = []
            for name in names:
                found_of = compare(predicted[name], [rows for it, rows, _, _ in measured if it == name])
                more = {"bytes_up": predicted[name].bytes_up, "estimated": list(predicted[name].notes)}
                candidates.append(found_of | more | {"uncorrected_ms": plain[name].latency_ns / 1e6})
            one = {"model": model, "mbits": rate, "link": probed, "candidates": candidates}
            one["correction"] = correction.as_dict()
            one |= judge(candidates)
            say(_line(one))
            found.append(one)
        return found


def corrected(plain: Mapping[str, Candidate], *batches: Sequence[Sequence[Any]]) -> Correction:
    """By what `edge.Edge.measure` answered, batch by batch."""
    alone, cuts = [], []
    for batch in batches:
        for name in dict.fromkeys(it for it, *_ in batch):
            median = statistics.median(rows["end_to_end"] for it, rows, _, _ in batch if it == name)
            (alone if name == EDGE_ONLY else cuts).append(RequestSample(name, plain[name].latency_ns, median))
    return Correction.fit(cuts, alone)


def compare(candidate: Candidate, requests: Sequence[dict[str, int]]) -> dict[str, Any]:
    """One candidate in milliseconds: latency by the median of its requests, stages by theirs."""
    predicted, interval = candidate.stages_ns, candidate.interval_ns
    measured = {
        stage: statistics.median(sum(rows[row] for row in of) for rows in requests) for stage, of in ROWS_OF.items()
    }
    latency = statistics.median(rows["end_to_end"] for rows in requests)
    spread = statistics.quantiles([rows["end_to_end"] for rows in requests], n=4) if len(requests) > 1 else [0, 0, 0]
    total = sum(predicted.values())
    return {
        "name": candidate.name,
        "interval_ms": None if interval is None else [interval[0] / 1e6, interval[1] / 1e6],
        "held": None if interval is None else interval[0] <= latency <= interval[1],
        "requests": len(requests),
        "predicted_ms": total / 1e6,
        "measured_ms": latency / 1e6,
        "quartiles_ms": [spread[0] / 1e6, spread[2] / 1e6],
        "error": total / latency - 1,
        "stages_ms": {stage: [predicted.get(stage, 0.0) / 1e6, measured[stage] / 1e6] for stage in STAGES},
    }


def judge(candidates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How good the prediction was for one model on one link."""
    errors = [abs(one["error"]) for one in candidates]
    chosen = min(candidates, key=lambda one: one["predicted_ms"])
    best = min(candidates, key=lambda one: one["measured_ms"])
    return {
        "median_error": statistics.median(errors),
        "ninth_decile_error": statistics.quantiles(errors, n=10)[-1],
        "worst_error": max(errors),
        "uncorrected_median_error": statistics.median(
            abs(one["uncorrected_ms"] / one["measured_ms"] - 1) for one in candidates
        ),
        **intervals(candidates),
        "bias": statistics.median(one["error"] for one in candidates),
        "predicted_best": chosen["name"],
        "measured_best": best["name"],
        "regret": chosen["measured_ms"] / best["measured_ms"] - 1,
    }


def intervals(candidates: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many candidates have one, the share that holds the measured median, half of its width over that."""
    known = [one for one in candidates if one["interval_ms"] is not None]
    widths = [(one["interval_ms"][1] - one["interval_ms"][0]) / 2 / one["measured_ms"] for one in known]
    return {
        "intervals": len(known),
        "intervals_held": sum(one["held"] for one in known) / max(1, len(known)),
        "interval_half_width": statistics.median(widths) if widths else 0.0,
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all models and links; stages by the median of |predicted - measured| as a share of the latency."""
    every = [one for run in runs for one in run["candidates"]]
    errors = sorted(abs(one["error"]) for one in every)
    return {
        "candidates": len(every),
        "requests": sum(one["requests"] for one in every),
        "median_error": statistics.median(errors),
        "ninth_decile_error": statistics.quantiles(errors, n=10)[-1],
        "worst_error": errors[-1],
        **intervals(every),
        "worst_regret": max(run["regret"] for run in runs),
        "stage_errors": {
            stage: statistics.median(
                abs(one["stages_ms"][stage][0] - one["stages_ms"][stage][1]) / one["measured_ms"] for one in every
            )
            for stage in STAGES
        },
    }


def _line(one: dict[str, Any]) -> str:
    return (
        f"{one['model']:9} {one['mbits']:4g} Mbit/s: median error {one['median_error']:5.1%}, 90 % below "
        f"{one['ninth_decile_error']:5.1%}, bias {one['bias']:+5.1%}, intervals hold {one['intervals_held']:.0%} "
        f"(+- {one['interval_half_width']:.1%}); chosen {one['predicted_best']} "
        f"(best {one['measured_best']}), {one['regret']:.1%} slower than the best"
    )
