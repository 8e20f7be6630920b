"""`plan_generation`: what a token, the first one and a reply would take at every cut of a language model."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from edge_client import units
from edge_client.client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.generation.survey import gather_generation
from edge_client.planning.candidate import Candidate
from edge_client.planning.explain import break_evens
from edge_client.planning.generation.choose import decide_generation
from edge_client.planning.generation.measured import Measured, read_measured
from edge_client.planning.generation.predict import check_goal
from edge_client.planning.generation.workload import Drafting, Workload
from edge_client.planning.link import Link
from edge_client.planning.objective import Constraints, Objective
from edge_client.process.local_server import local_server
from edge_client.settings import OWN
from edge_client.spoken import option
from edge_client.survey.gather import Say
from edge_client.tasks.plan import given_link, watts_of
from edge_client.tasks.planned_generation import PlannedGeneration
from edge_client.tasks.subject import Model, Subject, address_of, subject_of
from edge_client.transport import ConnectionOptions
from shared_hooks.errors import SpecError


def plan_generation(
    server: str | None,
    model: Model,
    *,
    prompt_tokens: int = 128,
    new_tokens: int = 128,
    draft: int = 0,
    acceptance: float | None = None,
    top_logits: int | None = None,
    goal: str = "token",
    objective: str = "latency",
    max_edge_memory: str | float | None = None,
    uplink: str | None = None,
    downlink: str | None = None,
    rtt: str | None = None,
    measured: str | Path | None = None,
    power: tuple[float, float] | None = None,
    seconds: float = 20.0,
    credentials: Credentials | None = None,
    progress: bool = True,
    say: Say = lambda text: None,
) -> PlannedGeneration:
    """Predict what every cut of a language model takes in a split generation, and decide (docs/planning.md).

        found = edge_client.plan_generation("cloud:50051", "model.toml", prompt_tokens=500, new_tokens=200)
        found.best_cut            # what `SplitGenerator` takes
        found.to_polars()         # one row a candidate

    ``server`` and ``model``: as for `plan`. ``draft`` tokens are guessed before each round trip, of which the share
    ``acceptance`` is right; they go together. ``top_logits``: only the k likeliest come back. ``goal``: what is to be
    best: "token", "first-token" or "reply"; ``objective`` and ``max_edge_memory`` (weights that are used here, and what
    is kept at the reply's end) as for `plan`. ``uplink``, ``downlink``, ``rtt``: another link than the one measured.
    ``measured``: the JSON of an earlier plan, whose numbers are used; nothing is measured then. ``seconds``: how long.

    Raises SpecError, ServerUnavailable, Disagreement, UnknownModel, CutRefused (a model that cannot be split).
    """
    target = Objective.parse(objective)
    check_goal(goal)
    if (acceptance is None) is not (draft == 0):
        raise SpecError(f"{option('draft')} and {option('acceptance')} (the share that is right) go together")
    workload = Workload(
        prompt_tokens,
        new_tokens,
        None if top_logits is None else ("top", top_logits),
        Drafting(draft, acceptance or 0.0),
    )
    memory = max_edge_memory
    limits = Constraints(units.size(option("max_edge_memory"), memory) if isinstance(memory, str) else memory)
    link, watts = given_link(uplink, downlink, rtt), watts_of(power)
    if measured is not None:
        known, origin = read_measured(measured), f"measured before: {measured}"
    else:
        address = address_of(server)
        subject = subject_of(model, None, address, credentials)
        known, origin = _measured(address, subject, workload, credentials, seconds, progress, say)
    ways = partial(known.candidates, workload, power=watts)
    candidates = ways(link)
    decision = decide_generation(candidates, goal, target, limits)
    used = known.link if link is None else link

    def repredict(other: Link, edge: float, cloud: float) -> list[Candidate]:
        return [one.of(goal) for one in ways(other, edge, cloud)]

    return PlannedGeneration(
        model=known.edge.model_id,
        goal=goal,
        workload=workload,
        decision=decision,
        candidates=candidates,
        measured=known,
        link=used,
        origin=origin,
        breaks=break_evens(decision, target, used, repredict),
    )


def _measured(
    address: str | None,
    subject: Subject,
    workload: Workload,
    credentials: Credentials | None,
    seconds: float,
    progress: bool,
    say: Say,
) -> tuple[Measured, str]:
    with ExitStack() as stack:
        origin = f"measured with {address}"
        if address is None or address == OWN:
            say("starting a server on this machine: they share it, and the link is no network")
            address, origin = (
                stack.enter_context(local_server(subject.choice)),
                "measured with a server on this machine",
            )
            credentials = None
        client = stack.enter_context(
            EdgeClient(
                address,
                subject.choice.with_spec(subject.spec),
                metrics=False,
                connection=ConnectionOptions(credentials=credentials or Credentials()),
            )
        )
        return gather_generation(client, workload, seconds=seconds, show=progress), origin
