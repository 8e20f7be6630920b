"""``edge-client plan``: what every cut takes on this device, this link, this server; and which is best."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from edge_client.commands import exits, units
from edge_client.commands.constraints import constraints_of
from edge_client.commands.credentials import credentials_of
from edge_client.commands.loading import choice_of, find, load
from edge_client.commands.output import check_json_target, table, write_json
from edge_client.commands.server import chosen
from edge_client.planning.candidate import Candidate
from edge_client.planning.explain import break_evens, explain
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Constraints, Decision, Objective
from edge_client.planning.partitioners import Situation, find_partitioner, partitioners
from edge_client.planning.predict import Power
from edge_client.screen.text import one_line, printable, size
from edge_client.settings import OWN
from edge_client.survey.gather import Gathered, Wanted, gather
from shared_hooks.errors import SpecError

NAME_WIDTH = 26


def main(options: argparse.Namespace) -> int:
    """Gather, predict, decide, print; exit status."""

    if options.list_partitioners:
        print("\n".join(f"{name}: {about}" for name, about in partitioners().items()), file=options.stdout)
        return exits.OK
    # Everything that can be wrong with the words is said before anything is measured.
    check_json_target(options.json)
    objective = Objective.parse(options.objective)
    constraints = constraints_of(options)
    power, wanted = _power(options), _wanted(options)
    partitioner = find_partitioner(options.partitioner)
    # Planned on the example, which is what the server measures, too.
    choice = choice_of(options)
    loaded = load(choice, options.input if choice.spec().example() is None else None)
    with loaded.wrapped, gather(loaded, wanted, _say, not options.no_progress) as gathered:
        repredict = partial(gathered.candidates, power=power)
        candidates = repredict()
        decision = partitioner.decide(
            Situation(candidates, objective, constraints, gathered.edge, gathered.cloud, options.partitioner_option)
        )
    decided = {one.name: one for one in decision.ranking}  # a partitioner may predict otherwise
    candidates = [decided.get(one.name, one) for one in candidates]
    why: tuple[str, dict[str, Any]] | None = None
    if options.explain:
        why = explain(
            decision, candidates, break_evens(decision, _judged_by(decision, objective), gathered.link, repredict)
        )
    if options.json:
        known = _as_dict(loaded.spec.model_id, decision, candidates, gathered, constraints, power)
        write_json({**known, "explanation": why[1]} if why else known, options.json, options.stdout)
    if options.json != "-":
        print(_text(loaded.spec.model_id, decision, candidates, gathered, options.top))
        if why:
            print(f"\n{why[0]}")
    return exits.OK


def _wanted(options: argparse.Namespace) -> Wanted:

    server = chosen(options)
    return Wanted(
        server=None if server == OWN else server,
        credentials=credentials_of(options),
        edge_profile=options.edge_profile,
        cloud_profile=options.cloud_profile,
        link=given_link(options.uplink, options.downlink, options.rtt),
        file=str(find(options.input)[0].path) if options.input else None,
        repetitions=options.repetitions,
        seconds=options.seconds,
        codec=options.codec,
        calibrate=options.calibrate,
    )


def given_link(uplink: str | None, downlink: str | None, rtt: str | None) -> Link | None:
    """The link of --uplink, --downlink and --rtt; None where none is given. Raises SpecError for half of one."""

    if uplink is None and downlink is None and rtt is None:
        return None
    if uplink is None or rtt is None:
        raise SpecError(
            "a link that is not probed needs --uplink and --rtt (--downlink is the same as --uplink by default)"
        )
    up, fixed = units.rate("--uplink", uplink), units.nanoseconds("--rtt", rtt)
    down = units.rate("--downlink", downlink) if downlink else up
    given = f"given: {uplink} up, {downlink or uplink} down, {rtt} round trip"
    return Link(Curve.line(fixed, up), Curve.line(0.0, down), given)


def _judged_by(decision: Decision, objective: Objective) -> Objective:
    """A partitioner may have gone by another objective than the one that was asked for."""

    try:
        return objective if decision.objective == str(objective) else Objective.parse(decision.objective)
    except SpecError:  # "cycle (latency)"
        return objective


def _power(options: argparse.Namespace) -> Power | None:

    if options.power_active is None and options.power_idle is None:
        return None
    if options.power_active is None or options.power_idle is None:
        raise SpecError("--power-active and --power-idle go together")
    return Power(options.power_active, options.power_idle)


def _say(text: str) -> None:
    print(f"edge-client: {one_line(text)}", file=sys.stderr, flush=True)


def _as_dict(
    model: str,
    decision: Decision,
    candidates: Sequence[Candidate],
    gathered: Gathered,
    constraints: Constraints,
    power: Power | None,
) -> dict[str, Any]:
    link, load = gathered.link, gathered.load
    return {
        "model": model,
        "decision": decision.as_dict(),
        "candidates": [
            {
                **one.as_dict(),
                "allowed": one.name not in decision.rejected,
                "reason": decision.rejected.get(one.name, ""),
            }
            for one in candidates
        ],
        "constraints": {
            "max_edge_memory": constraints.max_edge_memory,
            "max_bytes_per_second": constraints.max_bytes_per_second,
            "rate": constraints.rate,
            "min_accuracy": constraints.min_accuracy,
        },
        "link": link.as_dict(),
        "load": {"pending": load.pending, "workers": load.workers, "queue_ns": load.queue_ns},
        "calibration": gathered.calibration.as_dict() if gathered.calibration else None,
        "power": {"active": power.active, "idle": power.idle} if power else None,
        "edge_machine": dict(gathered.edge.machine),
        "cloud_machine": dict(gathered.cloud.machine),
        "server_is_ours": gathered.server_is_ours,
        "warnings": list(gathered.warnings),
    }


def _text(model: str, decision: Decision, candidates: Sequence[Candidate], gathered: Gathered, top: int | None) -> str:
    shown = candidates
    if top is not None:
        best = {one.name for one in decision.ranking[:top]}
        shown = [one for one in candidates if one.name in best]
    energy = any(one.edge_energy.value is not None for one in candidates)
    headers = ["", "cut after", "ms", "edge", "net", "server", "up", "memory", *(["mJ"] if energy else [])]
    rows = []
    for one in shown:
        stages = one.stages_ns
        edge = sum(stages.get(stage, 0.0) for stage in ("prepare", "edge", "encode", "finish"))
        server = sum(stages.get(stage, 0.0) for stage in ("queue", "tail"))
        mark = "*" if one is decision.winner else "x" if one.name in decision.rejected else ""
        joules, memory = one.edge_energy.value, one.edge_memory.value
        rows.append(
            [
                mark,
                _short(printable(one.name)),
                *(f"{ns / 1e6:.2f}" for ns in (one.latency_ns, edge, stages.get("network", 0.0), server)),
                size(one.bytes_up),
                "-" if memory is None else size(round(memory)),
                *(["-" if joules is None else f"{joules * 1e3:.1f}"] if energy else []),
            ]
        )
    link = gathered.link
    lines = [table(headers, rows, right=range(2, len(headers))), ""]
    if top is not None and len(shown) < len(candidates):
        lines.append(f"the best {len(shown)} of {len(candidates)} candidates")
    lines.append(f"{model}: {decision.winner.name} is best in {decision.objective} (*)")
    if decision.runner_up:
        lines.append(f"runner-up: {decision.runner_up.name}")
    if decision.rejected:
        lines.append(f"not allowed (x): {len(decision.rejected)} of {len(candidates)} candidates")
    lines.append(f"link, {link.source}: {link.rtt_ns / 1e6:.3f} ms round trip")
    lines.append(f"up: {link.speed_up}")
    lines.append(f"edge: {printable(str(gathered.edge.machine.get('name', '?')))}")
    lines.append(f"cloud: {printable(str(gathered.cloud.machine.get('name', '?')))}")
    if not energy and candidates:
        lines.append(f"no energy: {one_line(candidates[0].edge_energy.note)}")
    return "\n".join(lines)


def _short(name: str) -> str:
    """The end of a long name tells more than its beginning."""
    return name if len(name) <= NAME_WIDTH else f"…{name[-NAME_WIDTH + 1 :]}"
