"""Predict what every cut takes on this device, this link and this server, and find the best.

`plan_chain` does the same for a chain of servers; `edge_client.adaptive.chain` does its measurements and search. A few
real requests show what they take beyond the sum of their parts.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from edge_client import user_text
from edge_client.adaptive.chain import PlacedPart, Station, best_cuts, measured, parts_of
from edge_client.call import Load
from edge_client.client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.options import PlanChainOptions, PlanOptions
from edge_client.planning import page
from edge_client.planning.codecs import Codecs, learnt, named
from edge_client.planning.explain import BreakEven, break_evens, explain
from edge_client.planning.leakage import bound_of
from edge_client.planning.link import Curve, Link
from edge_client.planning.mincut import Best, best_set
from edge_client.planning.objective import STAGES, Candidate, Constraints, Decision, Objective, undominated
from edge_client.planning.partitioners import Partitioner, Situation, find_partitioner
from edge_client.planning.predict import CUTS_MEASURED, Correction, GivenPower, watts_of
from edge_client.screen import Column, Row, Tabular, fitted, one_line, printable, size, table
from edge_client.settings import OWN, chain_of
from edge_client.survey import Gathered, SurveySources, gather
from edge_client.sweeping import settings
from edge_client.tasks.engines import TORCH, EnginePlan, EngineTimes, engines_of, measure
from edge_client.tasks.subject import Model, Subject, address_of, subject_of
from edge_client.transport import ConnectionOptions
from edge_client.user_input import LoadedModel
from edge_client.user_text import option
from shared_hooks.errors import SpecError
from shared_hooks.files import write_text
from shared_hooks.models.inputs import to_device
from shared_hooks.options import takes
from shared_hooks.profiling.profile import Profile

# The content of a plan: every candidate, the decision, and the data of both.


NOTES_WIDTH = 100
"""Columns of the lines below a plan's table."""


@dataclass(frozen=True, repr=False)
class Planned(Tabular):
    """Result of `edge_client.plan`. A row is a candidate, in the order of the layers; times in ns.

    ``candidates``: predictions for every way to run a request; ``decision``: the ranking and the best one (`best` is
    its name, `best_cut` the best cut's); ``edge`` and ``cloud``: both sides' profiles; ``link`` and ``load``: as
    probed; ``breaks``: what would have to change for the runner-up to win; ``warnings``: what makes the plan less
    certain; ``engines``: the same for other engines; ``codecs``: those it chose among, None for a single codec. The
    median of real requests lies between ``latency_low_ns`` and ``latency_high_ns`` nine times of ten
    (docs/planning.md).
    """

    model: str
    decision: Decision
    candidates: Sequence[Candidate]
    constraints: Constraints
    edge: Profile
    cloud: Profile
    link: Link
    load: Load
    correction: Correction | None
    power: GivenPower | None
    breaks: Sequence[BreakEven]
    server_is_ours: bool
    warnings: Sequence[str]
    codecs: Codecs | None = None
    edge_speed: float = 1.0
    branches: Best | None = None
    """The best of all sets of calls (docs/branches.md); None if only single cuts are possible."""
    engines: Mapping[str, EnginePlan] = field(default_factory=dict)
    """The plan with heads in the other engines given, by name."""

    shown = {  # noqa: RUF012
        "best": "best",
        "name": "cut after",
        "codec": "codec",
        "latency_ns": "ms",
        "latency_low_ns": "at least",
        "latency_high_ns": "at most",
        "edge_ns": "edge",
        "network_ns": "network",
        "tail_ns": "server",
        "bytes_up": "bytes up",
        "edge_memory_bytes": "edge memory",
        "reason": "not allowed",
    }

    drawn = "latency_ns"

    @property
    def best(self) -> str:
        """The winner's name, which is what `split` of an `EdgeClient` takes."""
        return self.decision.winner.name

    @property
    def best_cut(self) -> str | None:
        """The best split that both sides compute, whether it is the winner or not; None if no cut is allowed."""
        return self.decision.best_cut.name if self.decision.best_cut else None

    def title(self) -> str:
        winner = self.decision.winner
        few = " (one sample)" if min(self.edge.alone_ns.n, self.cloud.alone_ns.n) == 1 else ""
        return (
            f"{self.model}: {winner.key} is best in {self.decision.objective} of {len(self.candidates)} candidates, "
            f"{winner.latency_ns / 1e6:.3f} ms{_spread(winner)} predicted{few}"
        )

    def rows(self) -> list[Row]:
        rank = {one.key: number for number, one in enumerate(self.decision.ranking, 1)}
        return [
            {
                "name": one.name,
                "codec": one.codec or None,
                "layer_id": one.layer_id,
                "rank": rank.get(one.key),
                "best": one.key == self.decision.winner.key,
                "latency_ns": one.latency_ns,
                **one.interval(),
                **{f"{stage}_ns": one.stages_ns.get(stage, 0.0) for stage in STAGES},
                "bytes_up": one.bytes_up,
                "bytes_down": one.bytes_down,
                "edge_memory_bytes": one.edge_memory.value,
                "edge_energy_j": one.edge_energy.value,
                "edge_energy_status": one.edge_energy.status,
                "requests_per_second": one.throughput,
                "accuracy": one.accuracy,
                "allowed": one.key not in self.decision.rejected,
                "reason": self.decision.rejected.get(one.key),
            }
            for one in self.candidates
        ]

    def write_page(self, path: str | Path) -> None:
        """Write the plan's page: the graph with the best cut along branches, and every candidate.

        Raises SpecError if that fails, or jinja2 is missing.
        """
        settings.check("jinja2")
        write_text(path, page.render(self.model, self.decision, self.candidates, self.branches))

    def explain(self) -> str:
        """Explain why the winner wins, stage by stage, and what would have to change for the runner-up to win."""
        return self._explained()[0]

    def _explained(self) -> tuple[str, dict[str, Any]]:
        return explain(self.decision, self.candidates, self.breaks)

    def as_dict(self, explanation: bool = False) -> dict[str, Any]:
        """Return JSON data with all that docs/planning.md names."""
        constraints, power, load = self.constraints, self.power, self.load
        return {
            "model": self.model,
            "decision": self.decision.as_dict(),
            "candidates": [
                {
                    **one.as_dict(),
                    "allowed": one.key not in self.decision.rejected,
                    "reason": self.decision.rejected.get(one.key, ""),
                }
                for one in self.candidates
            ],
            "constraints": {
                "max_edge_memory": constraints.max_edge_memory,
                "max_leakage": None if constraints.leakage is None else constraints.leakage.most,
                "max_bytes_per_second": constraints.max_bytes_per_second,
                "rate": constraints.rate,
                "min_accuracy": constraints.min_accuracy,
            },
            "codecs": self.codecs and {"names": list(self.codecs.names), "max_loss": self.codecs.max_loss},
            "link": self.link.as_dict(),
            "load": {"pending": load.pending, "workers": load.workers, "queue_ns": load.queue_ns},
            "correction": self.correction.as_dict() if self.correction else None,
            "power": {"active": power.active, "idle": power.idle} if power else None,
            "edge_speed": self.edge_speed,
            "edge_machine": dict(self.edge.machine),
            "cloud_machine": dict(self.cloud.machine),
            "server_is_ours": self.server_is_ours,
            "warnings": list(self.warnings),
            "branches": None if self.branches is None else self.branches.as_dict(),
            "engines": {name: one.as_dict() for name, one in self.engines.items()},
            **({"explanation": self._explained()[1]} if explanation else {}),
        }

    def text(self, top: int | None = None, width: int | None = None) -> str:
        """Format the plan as the command prints it, in the order of the layers; with ``top``, the best so many, best
        first.

        Columns are left out to fit into ``width``, but names are never shortened.
        """
        shown = self._best_of_each() if top is None else list(self.decision.ranking[:top])
        energy = any(one.edge_energy.value is not None for one in self.candidates)
        found = fitted(self._columns(shown, energy), ("memory", "mJ", "up", "server", "net", "edge"), width)
        notes = self._below(len(shown), energy, top is not None)
        # the length of a note depends on what could be measured
        wrap = partial(textwrap.wrap, width=NOTES_WIDTH, subsequent_indent="  ", break_long_words=False)
        return "\n".join([found, "", *(line for note in notes for line in wrap(note, break_on_hyphens=False))])

    def _best_of_each(self) -> list[Candidate]:
        """Return every candidate; where codecs are chosen, too, the best codec of every cut."""
        best: dict[str, str] = {}
        for one in (*self.decision.ranking, *self.candidates):
            best.setdefault(one.name, one.key)
        return [one for one in self.candidates if best[one.name] == one.key]

    def _columns(self, shown: Sequence[Candidate], energy: bool) -> list[Column]:
        def stages(*names: str) -> list[str]:
            return [f"{sum(one.stages_ns.get(name, 0.0) for name in names) / 1e6:.2f}" for one in shown]

        joules, memory = [one.edge_energy.value for one in shown], [one.edge_memory.value for one in shown]
        return [
            Column("", [self._mark(one) for one in shown], right=False),
            Column("cut after", [printable(one.name) for one in shown], right=False),
            *([Column("codec", [one.codec for one in shown], right=False)] if self.codecs else []),
            Column("ms", [f"{one.latency_ns / 1e6:.2f}{_spread(one)}" for one in shown]),
            Column("edge", stages("prepare", "edge", "encode", "finish")),
            Column("net", stages("network")),
            Column("server", stages("queue", "tail")),
            Column("up", [size(one.bytes_up) for one in shown]),
            Column("memory", ["-" if one is None else size(round(one)) for one in memory]),
            *([Column("mJ", ["-" if one is None else f"{one * 1e3:.1f}" for one in joules])] if energy else []),
        ]

    def _mark(self, one: Candidate) -> str:
        return "*" if one is self.decision.winner else "x" if one.key in self.decision.rejected else ""

    def _below(self, shown: int, energy: bool, top: bool) -> list[str]:
        decision, winner, lines = self.decision, self.decision.winner, []
        if top and shown < len(self.candidates):
            lines.append(f"the best {shown} of {len(self.candidates)} candidates, the best first")
        elif shown < len(self.candidates):
            lines.append(f"of each cut the best codec; {len(self.candidates)} candidates in all")
        if self.codecs is not None:
            loss = "no loss" if not self.codecs.max_loss else f"a loss of {100 * self.codecs.max_loss:.3g} % at most"
            lines.append(f"codecs: {', '.join(self.codecs.names)}; {loss} allowed")
        lines.append(f"{self.model}: {winner.key} is best in {decision.objective} (*)")
        if decision.runner_up:
            near = ": their intervals overlap" if decision.runner_up.as_near_as(winner) else ""
            lines.append(f"runner-up: {decision.runner_up.key}{near}")
        if decision.best_cut is None:
            lines.append(f"best cut: none{' is allowed' if any(one.is_cut for one in self.candidates) else ''}")
        elif decision.best_cut is not winner:
            lines.append(f"best cut: {decision.best_cut.key}, {decision.best_cut.latency_ns / 1e6:.2f} ms")
        if decision.rejected:
            lines.append(f"x: {decision.rejection(self.candidates)}")
        lines.append(self._interval_of(winner))
        lines.append(f"link, {self.link.source}: {self.link.rtt_ns / 1e6:.3f} ms round trip")
        lines.append(f"up: {self.link.speed_up}")
        if self.link.measured_up is not None:  # the time of a few bytes does not depend on the rate
            lines.append("up is by the probe's largest rounds, net what its rounds of like size took")
        for side, profile in (("edge", self.edge), ("cloud", self.cloud)):
            speed = (
                f", planned for {self.edge_speed:g} times its speed" if side == "edge" and self.edge_speed != 1 else ""
            )
            lines.append(f"{side}: {_machine(profile.machine)}{speed}")
        lines += self._along_branches()
        lines += self._by_engine()
        if not energy and self.candidates:
            lines.append(f"no energy: {one_line(self.candidates[0].edge_energy.note)}")
        return lines

    def _along_branches(self) -> list[str]:
        """Format the best set of calls and its gain, if it is better than every single cut."""
        best, plain = self.branches, self.decision.best_cut
        if best is None or best.is_plain or plain is None or best.latency_ns >= plain.latency_ns:
            return []
        gain = f"{plain.latency_ns / best.latency_ns:.2f}x faster"
        took = f"{best.latency_ns / 1e6:.2f} ms, {size(best.bytes_up)} up, {gain}"
        why = f"; it cannot be cut: {one_line(best.reason)}" if best.reason else ' (split="min", --split min)'
        return [f"along branches: {printable(' + '.join(best.names))}: {took} than after {plain.name}{why}"]

    def _by_engine(self) -> list[str]:
        """Format a line per engine: its best cut, its time, and its error."""
        lines = []
        for name, one in self.engines.items():
            winner, cut = one.decision.winner, one.decision.best_cut
            text = f"heads in {name}: {winner.key} is best, {winner.latency_ns / 1e6:.2f} ms"
            if cut is not None:
                text += "" if cut is winner else f"; best cut {cut.key}, {cut.latency_ns / 1e6:.2f} ms"
                text += f", head {cut.stages_ns.get('edge', 0.0) / 1e6:.2f} ms"
                text += f", off by {one.differences[cut.name]:.1e}" if cut.name in one.differences else ""
            if one.refused:
                text += f"; not at {len(one.refused)} cuts, such as {one_line(next(iter(one.refused.items()))[1])[:90]}"
            lines.append(text)
        return lines

    def _interval_of(self, winner: Candidate) -> str:
        """Explain the numbers in brackets, or why there are none."""
        cuts = set() if self.correction is None else {one.name for one in self.correction.samples}
        if winner.interval_ns is not None:
            return f"[at least, at most]: nine times of ten, by real requests at {len(cuts)} cuts"
        if self.correction is None or self.correction.error_ns is None:
            requested = f"real requests were made at {len(cuts)} of them" if cuts else "no real requests were made"
            return f"no intervals: they take real requests at {CUTS_MEASURED} cuts; {requested}"
        return "no interval: how long the server reads the file is estimated"


def _machine(machine: Mapping[str, Any]) -> str:
    threads = machine.get("threads")
    of_threads = "" if not threads or machine.get("device") != "cpu" else f", {threads} thread{'s' * (threads != 1)}"
    return printable(f"{machine.get('name', '?')}{of_threads}")


def _spread(one: Candidate) -> str:
    return "" if one.interval_ns is None else " [{:.1f}, {:.1f}]".format(*(ns / 1e6 for ns in one.interval_ns))


@takes(PlanOptions)
def plan(server: str | None, model: Model, inputs: Any = None, *, options: PlanOptions) -> Planned:
    """Predict what every cut of ``model`` takes, and decide (docs/planning.md). Takes half a minute, or as given.

        found = edge_client.plan("cloud:50051", "digits", "photo.png")
        found.best                # what `split` takes
        print(found.explain())
        found.to_polars()         # one row a candidate

    ``server``: HOST:PORT; None: the default (ISTHMUS_SERVER, settings), else one is started on this machine, as with
    "own". ``model``: a name, a TOML file, a ``torch.nn.Module`` that the server serves, or a `ModelChoice` with device
    and threads. ``inputs``: None if the model's spec has an example, on which both sides are measured; else a tensor,
    an array, a tuple of arguments, a dictionary of keyword arguments. For files or a folder, the first one's
    preparation is timed, and it may cross as it is.

    ``objective``: "latency", "energy", "bytes", "throughput", "server-time", or weights, "latency=1,bytes=0.2".
    Constraints on the best: ``max_edge_memory`` ("64MiB", or bytes), ``max_bytes_per_second`` at ``rate`` requests per
    second, ``min_accuracy``, and ``max_leakage`` (0 to 1), as ``leakage`` (`edge_client.leakage`: a file or a table)
    measured it. ``uplink``, ``downlink`` ("5mbit") and ``rtt`` ("30ms") replace probing the link; the profiles' files
    replace measuring. ``edge_speed``: plan for a device this many times as fast as the measured one (0.2: five times
    slower), whose energy is then unknown. ``power``: watts of this machine, (active, idle). ``correct``: make real
    requests at a few cuts, before and after, to measure what a request takes beyond the profiles, and how far off
    predictions are (None: if both the link and this side are measured). ``repetitions`` and ``seconds`` bound each
    profile. ``codec="auto"``: every codec at every cut is a candidate; lossy ones only where ``calibration``
    (`edge_client.calibrate`) shows a loss of at most ``max_loss``. ``engine``: what runs heads, one or several of
    "torch", "onnxruntime" (a head as `edge_client.export` writes it), "compile" and "aotinductor" (PyTorch's
    compilers); other heads than "torch" are timed here, for ``seconds`` each (`Planned.engines`). If the model's choice
    gives no number of threads, the fastest one is found first. ``say`` receives lines for people as they come up;
    warnings are in the result, too.

    Raises SpecError (an invalid option, a profile of another model, no allowed candidate), ServerUnavailable,
    Disagreement, UnknownModel, CutRefused (the server's model has no example), InputMismatch.
    """
    if not 0 < options.edge_speed < math.inf:
        raise SpecError(f"{option('edge_speed', options.edge_speed)}: must be a number above 0, such as 0.2")
    if options.edge_speed != 1 and options.correct:
        what = f"{option('correct')} compares with requests of this machine"
        raise SpecError(f"{option('edge_speed', options.edge_speed)}: not with {option('correct')}: {what}")
    goal, codec = Objective.parse(options.objective), named(options.codec)
    limits = Constraints(
        _amount("max_edge_memory", options.max_edge_memory),
        _amount("max_bytes_per_second", options.max_bytes_per_second),
        options.rate,
        options.min_accuracy,
        bound_of(options.max_leakage, options.leakage, codec),
    )
    chooser = find_partitioner(options.partitioner) if isinstance(options.partitioner, str) else options.partitioner
    watts = watts_of(options.power)
    link = given_link(options.uplink, options.downlink, options.rtt)
    chosen = Codecs.of(codec, options.calibration, options.max_loss)
    table = learnt(codec, options.calibration) if chosen is None else chosen.table
    engines = engines_of(options.engine)
    if options.edge_profile is not None and engines != (TORCH,):
        raise SpecError(f"{option('engine')}: heads are timed on this machine, not with {option('edge_profile')}")
    address = address_of(server)
    subject = subject_of(model, inputs, address, options.credentials)
    as_measured = link is None and options.edge_profile is None and options.edge_speed == 1
    wanted = SurveySources(
        server=None if address == OWN else address,
        credentials=options.credentials or Credentials(),
        edge_profile=None if options.edge_profile is None else str(options.edge_profile),
        cloud_profile=None if options.cloud_profile is None else str(options.cloud_profile),
        link=link,
        file=subject.file,
        repetitions=options.repetitions,
        seconds=options.seconds,
        codec="raw" if chosen else codec,
        codecs=chosen,
        books={} if table is None else table.books,
        correct=as_measured if options.correct is None else options.correct,
        edge_speed=options.edge_speed,
        choose_threads=True,
    )
    loaded = subject.load()
    with loaded.wrapped:
        _check_form(subject, loaded)
        if limits.leakage is not None:
            limits.leakage.table.check(loaded.wrapped.weights_hash())
        if chosen is None and table is not None:
            table.check(loaded.wrapped.weights_hash(), loaded.wrapped.structure_digest())
        way = goal, limits, chooser, options.partitioner_option, watts
        with gather(loaded, wanted, options.say, options.progress) as gathered:
            found = _decided(loaded, gathered, *way)
            others = [one for one in engines if one != TORCH]
            if not others:
                return found
            order = [one.name for one in sorted(found.candidates, key=lambda one: one.latency_ns) if one.is_cut]
            order = list(dict.fromkeys(order))
            by_engine = {}
            for name in others:
                times = measure(name, loaded, subject, order, options.seconds, options.say)
                by_engine[name] = _with_engine(times, gathered, *way)
            return replace(found, engines=by_engine)


def _with_engine(
    times: EngineTimes,
    gathered: Gathered,
    goal: Objective,
    limits: Constraints,
    chooser: Partitioner,
    option: str | None,
    power: GivenPower | None,
) -> EnginePlan:
    """Return the same plan with the heads of an engine."""
    changed = replace(gathered, edge=times.profile(gathered.edge))
    candidates = times.usable(changed.candidates(power=power), gathered.edge_speed)
    decision = chooser.decide(Situation(candidates, goal, limits, changed.edge, gathered.cloud, option))
    return EnginePlan(times.engine, decision, candidates, times.differences, times.refused)


def _decided(
    loaded: LoadedModel,
    gathered: Gathered,
    goal: Objective,
    limits: Constraints,
    chooser: Partitioner,
    option: str | None,
    power: GivenPower | None,
) -> Planned:
    repredict = partial(gathered.candidates, power=power)
    candidates = repredict()
    decision = chooser.decide(Situation(candidates, goal, limits, gathered.edge, gathered.cloud, option))
    decided = {one.key: one for one in decision.ranking}  # a partitioner may predict differently
    branches = None
    if gathered.codecs is None:
        recorded = loaded.wrapped.plan(*loaded.args, **loaded.kwargs)
        factor, known = 1 / gathered.edge_speed, {one.name: one.latency_ns for one in candidates if one.is_cut}
        branches = best_set(recorded, gathered.edge, gathered.cloud, gathered.link, edge_factor=factor, predicted=known)
    return Planned(
        model=loaded.spec.model_id,
        decision=decision,
        candidates=[decided.get(one.key, one) for one in candidates],
        constraints=limits,
        edge=gathered.edge,
        cloud=gathered.cloud,
        link=gathered.link,
        load=gathered.load,
        correction=gathered.correction,
        power=power,
        breaks=_breaks(decision, _judged_by(decision, goal), gathered.link, repredict),
        codecs=gathered.codecs,
        edge_speed=gathered.edge_speed,
        server_is_ours=gathered.server_is_ours,
        warnings=gathered.warnings,
        branches=branches,
    )


def _breaks(
    decision: Decision, objective: Objective, link: Link, repredict: Callable[..., list[Candidate]]
) -> Sequence[BreakEven]:
    """Return break-even points. Among many codecs only those that can win on some link: each point compares
    all others.
    """
    if len(objective.weights) == 1 and any(one.codec for one in decision.ranking):
        kept = {one.key for one in (*undominated(decision.ranking), *decision.ranking[:2])}
        scores = {key: score for key, score in decision.scores.items() if key in kept}
        decision, repredict = replace(decision, scores=scores), partial(repredict, keys=kept)
    return break_evens(decision, objective, link, repredict)


def _check_form(subject: Subject, loaded: LoadedModel) -> None:
    """Raise if an input's form differs from the example's, on which both sides are measured."""
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
    """Return the objective of the decision: a partitioner may have used another one than requested."""
    try:
        return objective if decision.objective == str(objective) else Objective.parse(decision.objective)
    except SpecError:  # "cycle (latency)"
        return objective


def _amount(name: str, value: str | float | None) -> float | None:
    return user_text.size(option(name), value) if isinstance(value, str) else value


def given_link(uplink: str | None, downlink: str | None, rtt: str | None) -> Link | None:
    """Return the link that the numbers describe; None if none is given. Raises SpecError if it is incomplete."""
    if uplink is None and downlink is None and rtt is None:
        return None
    if uplink is None or rtt is None:
        raise SpecError(
            f"a link that is not probed needs {option('uplink')} and {option('rtt')} ({option('downlink')} is the same "
            f"as {option('uplink')} by default)"
        )
    up, fixed = user_text.rate(option("uplink"), uplink), user_text.nanoseconds(option("rtt"), rtt)
    down = user_text.rate(option("downlink"), downlink) if downlink else up
    given = f"given: {uplink} up, {downlink or uplink} down, {rtt} round trip"
    return Link(Curve.line(fixed, up), Curve.line(0.0, down), given)


REQUESTS_MADE: Final = 5
"""Real requests at the chosen cuts, after one for warm-up."""


@dataclass(frozen=True, repr=False)
class PlannedChain(Tabular):
    """Result of `edge_client.plan_chain`. A row is a machine, in the order of the chain.

    ``cuts``: what `split` of an `EdgeClient` for these servers takes; ``latency_ns``: predicted, including
    ``besides_ns``: what real requests took beyond the sum of their parts (0 if none was made).
    """

    model: str
    parts: Sequence[PlacedPart]
    besides_ns: float
    stations: Sequence[Station]

    shown = {"name": "machine", "cut": "begins after", "network_ns": "link", "compute_ns": "its part", "bytes_up": "up"}  # noqa: RUF012
    drawn = "compute_ns"

    @property
    def cuts(self) -> tuple[str, ...]:
        return tuple(part.cut for part in self.parts[1:])

    @property
    def latency_ns(self) -> float:
        return sum(part.network_ns + part.compute_ns for part in self.parts) + self.besides_ns

    def title(self) -> str:
        return f"{self.model}: {', '.join(self.cuts)} is the best chain, {self.latency_ns / 1e6:.3f} ms predicted"

    def rows(self) -> list[Row]:
        return [
            {
                "name": one.name,
                "cut": one.cut or None,
                "network_ns": one.network_ns,
                "compute_ns": one.compute_ns,
                "bytes_up": one.bytes_up,
            }
            for one in self.parts
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "model": self.model,
            "cuts": list(self.cuts),
            "latency_ns": self.latency_ns,
            "besides_ns": self.besides_ns,
            "parts": self.rows(),
            "links": [one.link.as_dict() for one in self.stations if one.link is not None],
        }

    def text(self) -> str:
        """Format the plan as the command prints it."""
        rows = [
            [
                printable(one.name),
                printable(one.cut) or "-",
                f"{one.network_ns / 1e6:.2f}",
                f"{one.compute_ns / 1e6:.2f}",
                size(one.bytes_up) if one.cut else "-",
            ]
            for one in self.parts
        ]
        shown = table(("machine", "begins after", "link ms", "its part ms", "up"), rows)
        found = f"{self.model}: --split {','.join(self.cuts)} is best, {self.latency_ns / 1e6:.2f} ms"
        return "\n".join(
            (shown, "", found, f"besides links and parts: {self.besides_ns / 1e6:.2f} ms, by real requests")
        )


@takes(PlanChainOptions)
def plan_chain(server: Sequence[str], model: Model, *, options: PlanChainOptions) -> PlannedChain:
    """Measure a chain of servers and the links between them, and find its best cuts (docs/chains.md).

        found = edge_client.plan_chain(["gateway:50051", "gpu"], "digits")
        with EdgeClient(["gateway:50051", "gpu"], "digits", split=found.cuts) as client: ...

    ``server``: as for `EdgeClient`; each server measures the next one, and the link to it. ``seconds``: for each
    profile. ``correct``: make a few real requests.

    Raises SpecError, ServerUnavailable, Disagreement, UnknownModel, AccessRefused (a server does not know the next
    one), CutRefused (too few cuts).
    """
    chain = chain_of(server)
    if len(chain) < 2:
        raise SpecError("plan_chain takes the servers of a chain, two or more; plan is for one")
    credentials = options.credentials or Credentials()
    subject = subject_of(model, None, chain[0], credentials)
    loaded = subject.load()
    with loaded.wrapped, ExitStack() as stack:
        wanted = SurveySources(server=chain[0], credentials=credentials, seconds=options.seconds)
        stations = measured(chain, loaded, wanted, options.say, options.progress)
        cuts = best_cuts(stations)
        found = PlannedChain(loaded.spec.model_id, parts_of(stations, cuts), 0.0, stations)
        if not options.correct:
            return found
        client = stack.enter_context(
            EdgeClient(
                chain,
                subject.choice.with_spec(subject.spec),
                cuts,
                metrics=False,
                connection=ConnectionOptions(credentials=credentials),
            )
        )
        took = [client.infer(*loaded.args, **loaded.kwargs).measured_ns for _ in range(1 + REQUESTS_MADE)][1:]
        return replace(found, besides_ns=statistics.median(took) - found.latency_ns)
