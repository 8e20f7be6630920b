"""A moving cut against an oracle: the link's rate changes, the server goes and comes back, requests go on throughout.

The oracle knows the trace and runs each phase with the best fixed candidate. It is measured, not predicted: before the
trace, every plausible candidate serves requests on the link of each phase, and the one of the smallest mean counts.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.planning.codecs import Codecs
from edge_client.planning.predict import Candidate, predict
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from shared_hooks.models import InputItem, load_spec
from shared_hooks.profiling import profile as profiles
from studies.experiments import images
from studies.experiments.phases import Move, Phase, Request, judge
from studies.experiments.prediction import ANSWER_SIZES, PROBE_SIZES, ask, link_of
from studies.experiments.testbed import SERVER, Testbed, reference

PHASE_SECONDS = 13.0
RATES: Sequence[tuple[str, float | None]] = (
    ("100 Mbit/s", 100),
    ("5 Mbit/s", 5),
    ("50 Mbit/s", 50),
    ("1 Mbit/s", 1),
    ("server gone", None),
    ("back, 100 Mbit/s", 100),
)
PLAUSIBLE, MOST = 1.6, 7
"""Measured for the oracle: what is predicted within so many times the best, so many at most, and either side alone."""
STEADY = 4
"""How many candidates are measured in every phase: the best fixed one is among them."""


@dataclass(frozen=True)
class Case:
    """``photos``: inputs are JPEG files, which may be sent as they are; else tensors."""

    name: str
    model: str
    photos: bool


@dataclass(frozen=True)
class Scope:
    """How much is measured."""

    cases: Sequence[Case] = (
        Case("AlexNet, tensors", "alexnet", False),
        Case("ViT, photos", "vit", True),
    )
    phase_seconds: float = PHASE_SECONDS
    rounds: int = 12
    oracle_seconds: float = 15.0
    profile_seconds: float = 30.0
    profile_repetitions: int = 20
    probe_seconds: float = 5.0


FULL = Scope()
QUICK = Scope(cases=FULL.cases[:1], phase_seconds=6.0, rounds=5, oracle_seconds=6.0, profile_seconds=15.0)


def run(scope: Scope, say: Callable[[str], None]) -> dict[str, Any]:
    """JSON-able: for each case the phases, what was measured of each, every decision with its numbers."""
    with tempfile.TemporaryDirectory(prefix="isthmus-experiment-") as folder:
        scenes = images.write(Path(folder), 4, width=960, height=720)
        with Testbed(tuple({case.model for case in scope.cases})) as bed:
            return {"cases": [run_case(bed, case, inputs_of(case, scenes), scope, say) for case in scope.cases]}


def inputs_of(case: Case, scenes: Sequence[Path]) -> list[str]:
    if case.photos:
        return [str(path) for path in scenes]
    spec, made = load_spec(reference(case.model)), []
    for path in scenes:
        (tensor,), _ = spec.preprocess(InputItem(path))
        np.save(path.with_suffix(".npy"), tensor.numpy())
        made.append(str(path.with_suffix(".npy")))
    return made


def run_case(
    bed: Testbed, case: Case, files: Sequence[str], scope: Scope, say: Callable[[str], None]
) -> dict[str, Any]:
    """One trace."""
    with bed.edge("studies.experiments.edge", reference(case.model), SERVER) as process:
        return play(bed, gather(bed, process, case, files, scope, say), scope, say)


@dataclass(frozen=True)
class Ready:
    """An edge whose candidates were measured. ``oracle``: of each phase every plausible candidate's mean latency (ms).
    ``steady``: those that are predicted to be good in all of them.
    """

    process: subprocess.Popen[str]
    case: Case
    files: Sequence[str]
    plan: Mapping[str, Any]
    oracle: Mapping[str, Mapping[str, float]]
    steady: Sequence[str]


def phases_of(scope: Scope) -> Sequence[Phase]:
    return [Phase(name, rate, scope.phase_seconds) for name, rate in RATES]


def gather(
    bed: Testbed,
    process: subprocess.Popen[str],
    case: Case,
    files: Sequence[str],
    scope: Scope,
    say: Callable[[str], None],
    codecs: Codecs | None = None,
) -> Ready:
    """Profiles of both sides, and what candidates take on each link. ``codecs``: those to choose from with the cut."""
    ask(process, "")
    bed.slow(process)
    bed.network.rate(100)
    say(f"{case.name}: profiles ...")
    depth = {"repetitions": scope.profile_repetitions, "seconds": scope.profile_seconds}
    plan = {"edge": ask(process, "profile", file=files[0], **depth), "cloud": ask(process, "cloud", **depth)}
    plan["file_crosses"] = case.photos
    oracle, steady = _oracle(bed, process, case, plan, files, phases_of(scope), scope, say, codecs)
    return Ready(process, case, files, plan, oracle, steady)


def play(bed: Testbed, ready: Ready, scope: Scope, say: Callable[[str], None]) -> dict[str, Any]:
    """One trace, judged."""
    phases = phases_of(scope)
    bed.network.rate(100)
    say(f"{ready.case.name}: the trace ...")
    plan = {**ready.plan, **_probe(ready.process, scope)}
    begins, found = _play(bed, ready.process, plan, ready.files, phases, scope)
    requests = [Request(start, end, chosen, split, error) for start, end, chosen, split, error, _ in found["requests"]]
    entries = [{**one, "seconds": one["seconds"] + found["began"] - begins[0]} for one in found["decisions"]]
    moved = [one for one in entries if one["kind"] == "choice" and one["moved"]]
    moves = [Move(begins[0] + one["seconds"], _key(one)) for one in moved[1:]]  # the first is no move
    judged = judge(phases, begins, ready.oracle, requests, moves)
    for phase in judged["phases"]:
        say(_line(phase))
    return {
        "case": ready.case.name,
        **judged,
        "wrong": sum(not same for *_, error, same in found["requests"] if error is None),
        "oracle": ready.oracle,
        "log": [one for one in entries if one["kind"] != "choice" or one["moved"]],
    }


def unmoved(bed: Testbed, ready: Ready, seconds: float) -> dict[str, dict[str, float]]:
    """Return the mean latency (ms) of each of `Ready.steady` by phase with a server, had it served all requests: one
    after the other, for so long that a bucket is as full as its own requests leave it.
    """
    words = {"rounds": 1 << 30, "seconds": seconds, "seed": 1, "warm": True, "files": ready.files}
    found: dict[str, dict[float, float]] = {key: {} for key in ready.steady}
    for mbits in sorted({mbits for _, mbits in RATES if mbits is not None}):
        bed.network.rate(mbits)
        for key in ready.steady:
            measured = ask(ready.process, "measure", candidates=[key], **words)
            found[key][mbits] = statistics.fmean(ns / 1e6 for _, _, ns, _ in measured)
    return {key: {name: own[mbits] for name, mbits in RATES if mbits is not None} for key, own in found.items()}


def _key(entry: Mapping[str, Any]) -> str:
    """Return a decision's candidate, as predictions name it."""
    return " + ".join(filter(None, (entry["candidate"], entry.get("codec"))))


def _probe(process: subprocess.Popen[str], scope: Scope) -> Any:
    return ask(process, "probe", sizes=PROBE_SIZES, answer_sizes=ANSWER_SIZES, seconds=scope.probe_seconds)


def _oracle(
    bed: Testbed,
    process: subprocess.Popen[str],
    case: Case,
    plan: Mapping[str, Any],
    files: Sequence[str],
    phases: Sequence[Phase],
    scope: Scope,
    say: Callable[[str], None],
    codecs: Codecs | None = None,
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return each plausible candidate's mean latency (ms) by phase, and the candidates that are good in all."""
    edge, cloud = (profiles.from_json(plan[side]) for side in ("edge", "cloud"))
    there = {phase.mbits: phase.name for phase in phases if phase.mbits is not None}
    predicted: dict[float, list[Candidate]] = {}
    for mbits in there:
        bed.network.rate(mbits)
        link, load = link_of(_probe(process, scope))
        found = predict(edge, cloud, link, load, file=edge.files[0], file_crosses=case.photos, codecs=codecs)
        predicted[mbits] = sorted(found, key=lambda one: one.latency_ns)
    steady = _steady([predicted[phase.mbits] for phase in phases if phase.mbits is not None])
    by_rate: dict[float | None, dict[str, float]] = {}
    for mbits, name in ({None: "server gone"} | there).items():
        names = [EDGE_ONLY]
        if mbits is not None:
            bed.network.rate(mbits)
            limit = PLAUSIBLE * predicted[mbits][0].latency_ns
            near = [one.key for one in predicted[mbits] if one.latency_ns <= limit][:MOST]
            ends = [one for one in predicted[mbits] if one.name in (CLOUD_ONLY, CLOUD_FILE)]
            ends = ends if codecs is None else []
            far = [one.key for one in ends if one.latency_ns < 2 * limit]
            names = list(dict.fromkeys([*near, *far, EDGE_ONLY]))
        words = {"rounds": scope.rounds, "seconds": scope.oracle_seconds, "seed": 1, "warm": True}
        measured = ask(process, "measure", candidates=names, files=files, **words)
        by_rate[mbits] = {key: statistics.fmean(ns / 1e6 for it, _, ns, _ in measured if it == key) for key in names}
        say(f"{case.name}: {name}: " + ", ".join(f"{n} {ms:.0f}" for n, ms in by_rate[mbits].items()))
    return {phase.name: by_rate[phase.mbits] for phase in phases}, steady


def _steady(phases: Sequence[Sequence[Candidate]]) -> list[str]:
    """Return the candidates allowed in every phase predicted to be the fastest over all of them: the best codec of each
    of a few cuts, and everything on the edge.
    """
    means: dict[str, list[float]] = {}
    cuts: dict[str, str] = {}
    for candidates in phases:
        for one in candidates:
            means.setdefault(one.key, []).append(one.latency_ns)
            cuts[one.key] = one.name
    best: dict[str, str] = {}
    for key in sorted(means, key=lambda key: sum(means[key])):
        if len(means[key]) == len(phases):
            best.setdefault(cuts[key], key)
    return list(dict.fromkeys([*[*best.values()][:STEADY], EDGE_ONLY]))


def _play(
    bed: Testbed,
    process: subprocess.Popen[str],
    plan: Mapping[str, Any],
    files: Sequence[str],
    phases: Sequence[Phase],
    scope: Scope,
) -> tuple[list[float], Any]:
    """The trace: when each phase began, and what the edge recorded. Ends with the server there."""
    answers: list[Any] = []
    total = sum(phase.seconds for phase in phases)

    def wait() -> None:
        answers.append(ask(process, "auto", plan=plan, files=files, seconds=total))

    waiting = threading.Thread(target=wait)
    waiting.start()
    begins: list[float] = []
    for phase in phases:
        begins.append(time.monotonic())
        if phase.mbits is None:
            bed.relay("refuse")
            bed.stop_server()
            bed.start_server()  # behind a relay that refuses
        else:
            bed.network.rate(phase.mbits)
            if len(begins) > 1 and phases[len(begins) - 2].mbits is None:
                bed.await_server()
                bed.relay("pass")
        time.sleep(max(0.0, begins[-1] + phase.seconds - time.monotonic()))
    waiting.join()
    if not answers:
        raise OSError("the edge ended during the trace; what it said is above")
    return begins, answers[0]


def _line(one: Mapping[str, Any]) -> str:
    ratio = "-" if one["ratio"] is None else f"{one['ratio']:.3f}"
    splits = ", ".join(f"{name} x{count}" for name, count in one["splits"].items())
    return (
        f"  {one['name']:17} {one['requests']:4} requests, {one['lost']} lost, mean {one['mean_ms'] or 0:6.1f} ms, "
        f"oracle {one['oracle_ms']:6.1f} ({one['oracle']}), ratio {ratio}, "
        f"settled after {one['settled_after_s']:.2f} s, {one['moves_after_settling']} moves after; {splits}"
    )
