"""How adaptive choosing starts: profiles of both sides, the link, a controller, and the `AutoClient` that uses them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from edge_client.adaptive.client import AutoClient
from edge_client.adaptive.controller import SplitController
from edge_client.adaptive.monitor import Check, Connect
from edge_client.call import Call, Load
from edge_client.core import ClientCore
from edge_client.model_choice import Inputs
from edge_client.planning.codecs import Codecs
from edge_client.planning.link import Link
from edge_client.planning.mincut import best_set
from edge_client.planning.objective import Constraints, Objective
from edge_client.planning.partitioners import ByObjective, Partitioner, find_partitioner
from edge_client.planning.predict import predict, watts_of
from edge_client.probing import LinkProber, fetch_profile, probe
from edge_client.screen import in_notebook
from edge_client.survey import (
    Gathered,
    SurveySources,
    edge_profile,
    gather,
    measured_by_servers,
    probe_sizes,
    with_books,
)
from edge_client.user_input import LoadedModel
from shared_hooks.codecs.basis import Basis
from shared_hooks.errors import ServerUnavailable, SpecError
from shared_hooks.models import ModelSpec
from shared_hooks.models.inputs import to_device
from shared_hooks.profiling import profile as profiles
from shared_hooks.profiling.profile import Profile
from shared_hooks.showing import short

# `AutoOptions`: the options of ``split="auto"``.


@short
@dataclass(frozen=True)
class AutoOptions:
    """Options of ``split="auto"``, checked on construction. Raises SpecError.

    ``objective``: what to minimise, such as "latency", "energy", "bytes" or "latency=1,bytes=0.2"; ``partitioner``
    decides by another method (`edge_client.planning.partitioners`), ``option`` is its own parameter.
    """

    objective: str | Objective = "latency"
    constraints: Constraints = field(default_factory=Constraints)
    partitioner: str | Partitioner = "objective"
    option: str | None = None
    power: tuple[float, float] | None = None
    """Watts of this machine, (busy, idle), for the objective "energy"; None: from its sensors."""
    edge_profile: str | Path | None = None
    """A file of ``edge-client profile``; None: measured at the start."""
    cloud_profile: str | Path | None = None
    profile_seconds: float = 20.0
    """The time limit for measuring either side."""
    progress: bool | None = None
    """Whether progress of measuring is shown; None: in a terminal and in a notebook."""
    say: Callable[[str], None] | None = None
    """Called with messages for the user, one line each; None: they are logged."""
    on_decision: Callable[[dict[str, Any]], None] | None = None
    """Called with every decision and event, with its numbers (`edge_client.adaptive.monitor`)."""

    def __post_init__(self) -> None:
        if isinstance(self.objective, str):
            object.__setattr__(self, "objective", Objective.parse(self.objective))
        if isinstance(self.partitioner, str):
            object.__setattr__(self, "partitioner", find_partitioner(self.partitioner))
        watts_of(self.power)
        if not 0 < self.profile_seconds < 1e6:  # which rejects NaN, too
            raise SpecError(f"profile_seconds={self.profile_seconds}: expected seconds, more than 0")

    @property
    def goal(self) -> Objective:
        """The objective, which a partitioner may define itself."""
        own = self.partitioner.own if isinstance(self.partitioner, ByObjective) else None
        assert isinstance(self.objective, Objective)
        return own or self.objective

    @property
    def decider(self) -> Partitioner | None:
        """The partitioner that decides about every request; None: the controller itself, which moves cautiously."""
        assert not isinstance(self.partitioner, str)
        return None if isinstance(self.partitioner, ByObjective) else self.partitioner


FIRST_CALL_SECONDS: Final = 5.0
"""How long to wait for the server at the start; without it everything runs here until it is available."""
log = logging.getLogger(__name__)


def begin(
    client: ClientCore,
    options: AutoOptions,
    call: Call,
    *,
    prepare: Callable[[Any], Inputs] | None = None,
    file: Path | None = None,
) -> AutoClient:
    """Measure, which takes seconds, and start; ``client`` is prepared. Close the result before the client.

    ``call``: what is planned and measured on; ``file``: an input file, to measure reading; ``prepare``: as for
    `AutoClient`. Raises SpecError, Disagreement, UnknownModel; without a server everything runs here until it is
    available.
    """
    loaded = loaded_of(client, call)
    if (bound := options.constraints.leakage) is not None:
        bound.table.check(loaded.wrapped.weights_hash())
    wanted = SurveySources(
        server=client.server,
        credentials=client.connection.credentials,
        edge_profile=_text(options.edge_profile),
        cloud_profile=_text(options.cloud_profile),
        seconds=options.profile_seconds,
        codec="raw" if client.codecs_chosen_from else client.codec,
        codecs=client.codecs_chosen_from,
        books=dict(client.books),
        file=_text(file),
    )
    gathered = _gather(loaded, wanted, options, client.connection.patience)
    is_there = isinstance(gathered, Gathered)
    if is_there:
        client.connect()
    chooser = AutoClient(
        client,
        _controller(options, gathered, client.codecs_chosen_from),
        prepare=prepare,
        local=_fits(options, gathered.edge if isinstance(gathered, Gathered) else gathered),
        connect=None if isinstance(gathered, Gathered) else _connector(loaded, wanted, gathered),
        on_decision=options.on_decision,
    )
    chooser.monitor.start()
    return chooser


def least(client: ClientCore, options: AutoOptions, call: Call) -> tuple[str | tuple[str, ...], str]:
    """Return the fastest split among all sets of calls, and the reason as text; both sides and the link are measured
    once.

    Raises SpecError for another objective than latency, ServerUnavailable, Disagreement, UnknownModel.
    """
    if set(options.goal.weights) != {"latency"} or client.codecs_chosen_from is not None:
        raise SpecError('split="min" makes the latency least, with one codec: objective="latency", and no codec="auto"')
    loaded = loaded_of(client, call)
    wanted = SurveySources(
        server=client.server,
        credentials=client.connection.credentials,
        edge_profile=_text(options.edge_profile),
        cloud_profile=_text(options.cloud_profile),
        seconds=options.profile_seconds,
        codec=client.codec,
        correct=True,
    )
    found = _gather(loaded, wanted, options, client.connection.patience)
    if not isinstance(found, Gathered):
        raise ServerUnavailable(f'split="min" measures both sides, and no server answers at {client.server}')
    candidates = found.candidates()
    plain = min(candidates, key=lambda one: one.latency_ns)
    known = {one.name: one.latency_ns for one in candidates if one.is_cut}
    plan = loaded.wrapped.plan(*loaded.args, **loaded.kwargs)
    best = best_set(plan, found.edge, found.cloud, found.link, predicted=known)
    if best is None or best.is_plain or best.reason or best.latency_ns >= plain.latency_ns:
        more = f"; {' + '.join(best.names)} cannot be cut: {best.reason}" if best and best.reason else ""
        return plain.name, f"{plain.name}, {plain.latency_ns / 1e6:.2f} ms: no set is better{more}"
    text = f"{' + '.join(best.names)}, {best.latency_ns / 1e6:.2f} ms, {best.bytes_up} bytes up"
    return best.names, f"{text}; {plain.name} takes {plain.latency_ns / 1e6:.2f} ms"


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


def loaded_of(client: ClientCore, call: Call) -> LoadedModel:
    """Return the client's own model, planned on ``call``. A module has no spec, so one with its name is used."""
    spec = client.spec or ModelSpec(client.model_id, f"the module {client.model_id}", Path(), "")
    args, kwargs = to_device(call.args, client.device), to_device(dict(call.kwargs), client.device)
    return LoadedModel(client.choice, spec, client.wrapped, args, kwargs, client.plan_for(call))


def _gather(loaded: LoadedModel, wanted: SurveySources, options: AutoOptions, patience: float) -> Gathered | Profile:
    """Return all measurements; only this side's profile if no server answers."""
    assert wanted.server is not None
    say = options.say or log.warning
    show = in_notebook() or sys.stderr.isatty() if options.progress is None else options.progress
    try:
        with LinkProber(wanted.server, credentials=wanted.credentials) as prober:
            prober.round(0, 0, min(FIRST_CALL_SECONDS, patience))
        with gather(loaded, wanted, say, show) as gathered:
            return gathered
    except ServerUnavailable as error:
        say(f"no server yet, everything runs here: {error}")
    return edge_profile(loaded, wanted, say, show)


def _connector(loaded: LoadedModel, wanted: SurveySources, edge: Profile) -> Connect:
    """Return what the monitor calls when the server is available for the first time."""

    def connect(check: Check) -> tuple[Profile, Link, Load]:

        def on_progress(done: int, total: int, what: str) -> None:
            check()

        server = wanted.server
        assert server is not None
        known = loaded.spec.model_id, wanted.warmup, wanted.repetitions, wanted.seconds
        how: dict[str, Any] = {"patience": FIRST_CALL_SECONDS, "credentials": wanted.credentials}
        codecs, weights = measured_by_servers(wanted.measured), edge.model.weights_hash
        data = fetch_profile(server, *known, on_progress, codecs=codecs, weights_hash=weights, **how)
        cloud = profiles.from_json(data, "cloud", f"the profile that {server} sent")
        profiles.check(cloud, edge.model)
        if Basis.name in wanted.measured:
            seconds = wanted.seconds
            cloud = with_books(cloud, loaded, wanted.books, server, log.warning, on_progress, seconds=seconds, **how)
        sizes, answers = probe_sizes(edge, None), (0, cloud.answer_bytes)
        link, load = probe(server, sizes, answers, wanted.probe_seconds, on_progress, **how)
        return cloud, link, load

    return connect


def _controller(options: AutoOptions, found: Gathered | Profile, codecs: Codecs | None) -> SplitController:
    make = partial(
        SplitController,
        objective=options.goal,
        constraints=options.constraints,
        partitioner=options.decider,
        option=options.option,
        power=watts_of(options.power),
        codecs=codecs,
    )
    if not isinstance(found, Gathered):
        return make(found)
    return make(found.edge, found.cloud, found.link, found.load, file=found.file, file_crosses=found.file_crosses)


def _fits(options: AutoOptions, edge: Profile) -> bool:
    """Return whether the whole model may run here."""
    alone = predict(edge, None, None)[0]
    return options.constraints.violated(alone) is None
