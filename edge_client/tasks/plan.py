"""`plan`: what every cut would take on this device, this link, this server; and which is best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edge_client import units
from edge_client.credentials import Credentials
from edge_client.planning.candidate import Candidate, undominated
from edge_client.planning.codecs import Codecs, learnt
from edge_client.planning.explain import BreakEven, break_evens
from edge_client.planning.link import Curve, Link
from edge_client.planning.loss_table import LossTable
from edge_client.planning.objective import Constraints, Decision, Objective
from edge_client.planning.partitioners import Partitioner, Situation, find_partitioner
from edge_client.planning.predict import Power
from edge_client.settings import OWN
from edge_client.spoken import option
from edge_client.survey.gather import Gathered, Say, Wanted, gather
from edge_client.survey.loaded import Loaded
from edge_client.tasks.planned import Planned
from edge_client.tasks.subject import Model, Subject, address_of, subject_of
from shared_hooks.errors import SpecError
from shared_hooks.models.example import to_device


def plan(
    server: str | None,
    model: Model,
    inputs: Any = None,
    *,
    objective: str = "latency",
    max_edge_memory: str | float | None = None,
    max_bytes_per_second: str | float | None = None,
    rate: float | None = None,
    min_accuracy: float | None = None,
    uplink: str | None = None,
    downlink: str | None = None,
    rtt: str | None = None,
    edge_profile: str | Path | None = None,
    cloud_profile: str | Path | None = None,
    power: tuple[float, float] | None = None,
    partitioner: str | Partitioner = "objective",
    partitioner_option: str | None = None,
    calibrate: bool = False,
    repetitions: int = 10,
    seconds: float = 20.0,
    codec: str = "raw",
    calibration: str | Path | LossTable | None = None,
    max_loss: str | float | None = None,
    credentials: Credentials | None = None,
    progress: bool = True,
    say: Say = lambda text: None,
) -> Planned:
    """Predict what every cut of ``model`` takes, and decide (docs/planning.md). Half a minute, or what it is given.

        found = edge_client.plan("cloud:50051", "digits", "photo.png")
        found.best                # what `split` takes
        print(found.explain())
        found.to_polars()         # one row a candidate

    ``server``: HOST:PORT; None: the default (ISTHMUS_SERVER, settings), else one is started on this machine, as with
    "own". ``model``: a name, a TOML file, a ``torch.nn.Module`` that the server serves, or a `ModelChoice` with device
    and threads. ``inputs``: nothing where the model's spec has an example, on which both sides are measured; else a
    tensor, an array, a tuple of arguments, a dictionary of keyword arguments. The first of files or a folder is
    prepared and timed, and may cross as it is.

    ``objective``: "latency", "energy", "bytes", "throughput", "server-time", or weights, "latency=1,bytes=0.2". What
    the best may not exceed: ``max_edge_memory`` ("64MiB", or bytes), ``max_bytes_per_second`` at ``rate`` requests per
    second, ``min_accuracy``. ``uplink``, ``downlink`` ("5mbit") and ``rtt`` ("30ms"): not to probe the link; the
    profiles' files: not to measure. ``power``: watts of this machine, (active, idle). ``repetitions`` and ``seconds``
    bound each profile. ``codec="auto"``: every codec at every cut is a candidate, of those with a loss the ones that
    ``calibration`` (`edge_client.calibrate`) shows to lose no more than ``max_loss``. ``say`` gets lines for people as
    they come up; warnings are in the result, too.

    Raises SpecError (a wrong word, a profile of another model, no candidate that is allowed), ServerUnavailable,
    Disagreement, UnknownModel, CutRefused (the server's model has no example), InputMismatch.
    """
    goal = Objective.parse(objective)
    limits = Constraints(
        _amount("max_edge_memory", max_edge_memory),
        _amount("max_bytes_per_second", max_bytes_per_second),
        rate,
        min_accuracy,
    )
    chooser = find_partitioner(partitioner) if isinstance(partitioner, str) else partitioner
    watts = watts_of(power)
    link = given_link(uplink, downlink, rtt)
    chosen = Codecs.of(codec, calibration, max_loss)
    table = learnt(codec, calibration) if chosen is None else chosen.table
    address = address_of(server)
    subject = subject_of(model, inputs, address, credentials)
    wanted = Wanted(
        server=None if address == OWN else address,
        credentials=credentials or Credentials(),
        edge_profile=None if edge_profile is None else str(edge_profile),
        cloud_profile=None if cloud_profile is None else str(cloud_profile),
        link=link,
        file=subject.file,
        repetitions=repetitions,
        seconds=seconds,
        codec="raw" if chosen else codec,
        codecs=chosen,
        books={} if table is None else table.books,
        calibrate=calibrate,
    )
    loaded = subject.load()
    with loaded.wrapped:
        _check_form(subject, loaded)
        if chosen is None and table is not None:
            table.check(loaded.wrapped.weights_hash(), loaded.wrapped.structure_digest())
        with gather(loaded, wanted, say, progress) as gathered:
            return _decided(loaded, gathered, goal, limits, chooser, partitioner_option, watts)


def _decided(
    loaded: Loaded,
    gathered: Gathered,
    goal: Objective,
    limits: Constraints,
    chooser: Partitioner,
    option: str | None,
    power: Power | None,
) -> Planned:
    repredict = partial(gathered.candidates, power=power)
    candidates = repredict()
    decision = chooser.decide(Situation(candidates, goal, limits, gathered.edge, gathered.cloud, option))
    decided = {one.key: one for one in decision.ranking}  # a partitioner may predict otherwise
    return Planned(
        model=loaded.spec.model_id,
        decision=decision,
        candidates=[decided.get(one.key, one) for one in candidates],
        constraints=limits,
        edge=gathered.edge,
        cloud=gathered.cloud,
        link=gathered.link,
        load=gathered.load,
        calibration=gathered.calibration,
        power=power,
        breaks=_breaks(decision, _judged_by(decision, goal), gathered.link, repredict),
        codecs=gathered.codecs,
        server_is_ours=gathered.server_is_ours,
        warnings=gathered.warnings,
    )


def _breaks(
    decision: Decision, objective: Objective, link: Link, repredict: Callable[..., list[Candidate]]
) -> Sequence[BreakEven]:
    """Among many codecs, without those that can win on no link: each question asks for all others."""
    if len(objective.weights) == 1 and any(one.codec for one in decision.ranking):
        kept = {one.key for one in (*undominated(decision.ranking), *decision.ranking[:2])}
        scores = {key: score for key, score in decision.scores.items() if key in kept}
        decision, repredict = replace(decision, scores=scores), partial(repredict, keys=kept)
    return break_evens(decision, objective, link, repredict)


def _check_form(subject: Subject, loaded: Loaded) -> None:
    """An input of another form than the example, on which both sides are measured, is not what would be planned."""
    held = next((one for one in subject.inputs if one.item is None), None)
    if held is None:
        return
    args, kwargs = to_device(held.read(loaded.spec), loaded.wrapped.device)
    if loaded.wrapped.plan(*args, **kwargs).digest != loaded.plan_digest:
        raise SpecError(
            "the input has another form (shapes, dtypes, structure) than the example of the model's spec, on which "
            "both sides are measured: give one of the example's form, or none"
        )


def _judged_by(decision: Decision, objective: Objective) -> Objective:
    """A partitioner may have gone by another objective than the one that was asked for."""
    try:
        return objective if decision.objective == str(objective) else Objective.parse(decision.objective)
    except SpecError:  # "cycle (latency)"
        return objective


def watts_of(power: tuple[float, float] | None) -> Power | None:
    """This machine's at work and idle; None where they are not given. Raises SpecError for what is none."""
    if power is None:
        return None
    if not isinstance(power, (tuple, list)) or len(power) != 2:
        raise SpecError(f"power: expected watts of this machine at work and idle, such as (6, 2), found {power!r}")
    return Power(*power)


def _amount(name: str, value: str | float | None) -> float | None:
    return units.size(option(name), value) if isinstance(value, str) else value


def given_link(uplink: str | None, downlink: str | None, rtt: str | None) -> Link | None:
    """A link by its numbers; None where none is given. Raises SpecError for half of one."""
    if uplink is None and downlink is None and rtt is None:
        return None
    if uplink is None or rtt is None:
        raise SpecError(
            f"a link that is not probed needs {option('uplink')} and {option('rtt')} ({option('downlink')} is the same "
            f"as {option('uplink')} by default)"
        )
    up, fixed = units.rate(option("uplink"), uplink), units.nanoseconds(option("rtt"), rtt)
    down = units.rate(option("downlink"), downlink) if downlink else up
    given = f"given: {uplink} up, {downlink or uplink} down, {rtt} round trip"
    return Link(Curve.line(fixed, up), Curve.line(0.0, down), given)
