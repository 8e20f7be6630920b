"""A world in virtual time: an edge, a server that comes and goes, a link behind a token bucket; and who decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_client.adaptive.client import POLL_SECONDS, is_late
from edge_client.adaptive.controller import SplitController
from edge_client.adaptive.monitor import PROBE_SECONDS, probed
from edge_client.planning.codecs import Codecs
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Candidate
from edge_client.planning.predict import predict
from edge_client.user_text import EDGE_ONLY
from shared_hooks.errors import ServerUnavailable
from shared_hooks.profiling.profile import Profile

SECOND = 1_000_000_000
TRACE = (100, 5, 50, 1, None, 100)
"""Mbit/s; None = the server is gone."""
SECONDS = 15.0


@dataclass(frozen=True)
class Phase:
    """``mbit`` None = the server is gone."""

    seconds: float
    mbit: float | None


@dataclass
class World:
    """``noise``: standard deviation of the logarithm of every duration. ``edge``, ``server``: true speed factors."""

    edge: Profile
    cloud: Profile
    phases: Sequence[Phase]
    rtt_ms: float = 10.0
    noise: float = 0.08
    burst: int = 32 << 10
    outliers: float = 0.0
    seed: int = 0
    tokens_at: float = 0.0
    codecs: Codecs | None = None
    tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.tokens = self.burst
        self.ends = [sum(phase.seconds for phase in self.phases[: at + 1]) * SECOND for at in range(len(self.phases))]

    def phase_at(self, now: float) -> int:
        return next((at for at, end in enumerate(self.ends) if now < end), len(self.phases) - 1)

    def rate(self, now: float) -> float | None:
        mbit = self.phases[self.phase_at(now)].mbit
        return None if mbit is None else mbit * 125_000

    def link(self, now: float) -> Link:
        """As it truly is, without its bucket."""
        rate = self.rate(now)
        assert rate is not None
        return Link(Curve.line(self.rtt_ms * 1e6, rate), Curve.line(0, 125e6))

    def shaken(self, ns: float) -> float:
        jump = 3.0 if self.random.random() < self.outliers else 1.0
        return ns * self.random.lognormvariate(0, self.noise) * jump

    def carry(self, now: float, nbytes: float) -> float | None:
        """When the last of ``nbytes`` handed over now is through; None if the server goes away first."""
        at = max(now, self.tokens_at)
        if at > now + 60 * SECOND:
            return None
        left = float(nbytes)
        while True:
            rate = self.rate(at)
            if rate is None:
                self.tokens, self.tokens_at = self.burst, at
                return None
            self.tokens = min(self.burst, self.tokens + (at - self.tokens_at) * rate / 1e9)
            self.tokens_at = at
            end = self.ends[self.phase_at(at)]
            taken = min(left, self.tokens)
            self.tokens -= taken
            left -= taken
            if left <= 1e-6:
                return at
            need = left / rate * 1e9
            if at + need <= end or end == self.ends[-1]:
                self.tokens, self.tokens_at = 0.0, at + need
                return at + need
            left -= (end - at) * rate / 1e9
            self.tokens, self.tokens_at, at = 0.0, end, end


@dataclass
class Run:
    """What came of it: per request when it began, its latency, what it ran as; and the moves."""

    began: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    moves: list[tuple[float, str, str]] = field(default_factory=list)
    probes: int = 0

    @property
    def mean(self) -> float:
        return sum(self.latencies) / len(self.latencies)


def oracle(world: World, period_ms: float) -> Run:
    """Knows the link of the moment and every expected time."""

    best: dict[float | None, Candidate] = {}

    def pick(now: float) -> Candidate:
        rate = world.rate(now)
        if rate not in best:
            known = predict(world.edge, None, None)[:1]
            if rate is not None:
                known = predict(world.edge, world.cloud, world.link(now), codecs=world.codecs)
            best[rate] = min(known, key=lambda one: one.latency_ns)
        return best[rate]

    return _run(world, period_ms, pick, None)


def controlled(world: World, controller: SplitController, period_ms: float) -> Run:
    """The controller, fed with what a client would report."""
    return _run(world, period_ms, None, controller)


def _run(
    world: World, period_ms: float, pick: Callable[[float], Candidate] | None, controller: SplitController | None
) -> Run:
    run, now, total = Run(), 0.0, world.ends[-1]
    truth = {one.key: one for one in predict(world.edge, world.cloud, world.link(0), codecs=world.codecs)}
    there, next_grid = True, 0.0
    while now < total:
        rate = world.rate(now)
        if controller is not None:
            if there != (rate is not None):
                there = rate is not None
                (controller.server_back if there else controller.server_gone)(int(now))
            choice = controller.choose(int(now))
            candidate = choice.candidate
            name = candidate.key
            if choice.moved:
                run.moves.append((now, name, choice.reason))
            _probe(world, controller, now, run)
        else:
            assert pick is not None
            candidate = pick(now)
            name = candidate.key
        end = _request(world, controller, truth, candidate, now)
        run.began.append(now)
        run.latencies.append(end - now)
        run.names.append(name)
        next_grid = max(next_grid + period_ms * 1e6, end)
        now = next_grid
    return run


def _probe(world: World, controller: SplitController, now: float, run: Run) -> None:
    largest = controller.wants_probe(int(now))
    if largest is None or controller.link is None or world.rate(now) is None:
        return
    run.probes += 1
    rtt = min(world.shaken(world.rtt_ms * 1e6) for _ in range(2))
    at = now + 2 * rtt

    def train(large: int, small: int) -> tuple[float, float]:
        nonlocal at
        controller.probe_sends(large + small)
        first = world.carry(at, large)
        second = None if first is None else world.carry(first, small)
        if first is None or second is None or second - at > PROBE_SECONDS * SECOND:
            raise ServerUnavailable("it took too long")
        began, at = at, second + world.shaken(world.rtt_ms * 1e6)
        return second - first, at - began - rtt

    link = probed(train, rtt, largest, 1e9 / controller.link.up.bytes_per_second, PROBE_SECONDS * SECOND)
    controller.observe_link(int(at), link)


def _request(
    world: World, controller: SplitController | None, truth: dict[str, Candidate], chosen: Candidate, now: float
) -> float:
    """When it is answered. ``chosen``: with what was predicted of it."""
    name = chosen.key
    true = truth[name]
    work = world.shaken(true.stages_ns["edge"])
    if controller:
        controller.observe_edge(int(now + work), name, int(work))
    if name == EDGE_ONLY:
        return now + work
    sent = now + work + true.stages_ns["encode"]
    arrived = world.carry(sent, true.bytes_up)
    tail = world.shaken(true.stages_ns["tail"])
    if arrived is not None:
        network = arrived - sent + world.shaken(world.rtt_ms * 1e6)
        end = sent + network + tail
    else:
        gone = world.ends[world.phase_at(sent) - 1] if world.rate(sent) is None else world.ends[world.phase_at(sent)]
        end = max(sent, gone) + 0.05 * SECOND  # noticed
    alone = world.shaken(truth[EDGE_ONLY].stages_ns["edge"])
    if controller:
        at = sent + POLL_SECONDS * SECOND
        while at < end:
            controller.observe_slow(int(at), name, true.bytes_up, int(at - sent))
            if is_late(chosen, at - sent):
                if at + alone < end:
                    waited = int(at + alone - sent)
                    controller.observe_slow(int(at + alone), name, true.bytes_up, waited, given_up=True)
                    return at + alone
                break
            at += POLL_SECONDS * SECOND
    if arrived is None:
        return end + alone
    if controller:
        controller.observe_transfer(int(end), true.bytes_up, true.bytes_down, int(network))
        controller.observe_server(int(end), name, int(tail), 0)
        controller.observe_bytes(name, true.bytes_up)
    return end
