"""``--split auto``: which candidate to use now. Pure logic: observations and the time are arguments.

All times are nanoseconds; ``now`` is a reading of any one monotonic clock. Not thread-safe: hold a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from edge_client.call import Load
from edge_client.planning.codecs import Codecs
from edge_client.planning.link import FLOOR, Curve, Link, LinkEstimate, Tracker
from edge_client.planning.objective import Candidate, Constraints, Objective, decide, undominated
from edge_client.planning.partitioners import Partitioner, Situation
from edge_client.planning.predict import Correction, GivenPower, predict
from edge_client.user_text import EDGE_ONLY
from shared_hooks.errors import SpecError
from shared_hooks.profiling.profile import FileInput, Profile

# Whether another cut is better by enough, for long enough, to switch to it.


SECOND: Final = 1_000_000_000
CALM_AFTER: Final = 10 * SECOND
"""After this time a move no longer makes the next one harder."""
CLEAR: Final = 0.2
"""A gain that needs no repetition right after a sudden change."""


@dataclass(frozen=True)
class Steady:
    """When to move: after a ``gain`` (0.10 = 10 % better) over ``decisions`` or ``seconds``, whichever is first; at
    once if the current candidate is impossible or ``worse`` times as bad as the best. Every move doubles the gain that
    the next one needs (up to half), until a sudden change is observed or no move was made for some seconds.
    """

    gain: float = 0.10
    decisions: int = 3
    seconds: float = 0.5
    worse: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.gain < 1 or self.decisions < 1 or self.seconds < 0 or self.worse <= 1:
            raise SpecError(f"{self}: expected 0 <= gain < 1, decisions >= 1, seconds >= 0, worse > 1")


class Steadiness:
    """The gain that the next move needs, after the previous ones. Times are nanoseconds."""

    def __init__(self, steady: Steady) -> None:
        self._steady = steady
        self.is_shaken = False
        """Whether a sudden change was observed since the last choice."""
        self._better: tuple[int, int] | None = None  # since when, and in how many decisions, another cut was better
        self._moves: list[int] = []  # when it moved since the last sudden change

    def may_switch(self, now: int, held: float, best: float) -> bool:
        """Return whether to replace the current candidate, given the scores of both: less is better."""
        if best >= held:
            self._better = None
            return False
        steady = self._steady
        if held >= steady.worse * best:
            return True
        self._moves = [when for when in self._moves if now - when < CALM_AFTER]
        needed = max(steady.gain, min(0.5, steady.gain * 2 ** len(self._moves)))
        if best > (1 - needed) * held:
            self._better = None
            return False
        if self.is_shaken and best <= (1 - CLEAR) * held:  # two observations, or a late request, have already shown it
            return True
        since, count = self._better or (now, 0)
        self._better = since, count + 1
        return count + 1 >= steady.decisions or now - since >= steady.seconds * SECOND

    def chosen(self, now: int, *, moved: bool) -> None:
        """Record a choice; ``moved``: it changed the candidate."""
        if moved:
            self._moves.append(now)
            self._better = None
        self.is_shaken = False

    def shaken(self) -> None:
        """Record a sudden change, after which earlier moves no longer matter."""
        self._moves.clear()
        self.is_shaken = True


# When the link is probed beside the requests, and with how many bytes. Pure: the time is passed in (ns, of one
# clock).


EVERY: Final = SECOND
WAITS: Final = 2 * SECOND
"""The time between probes: at least, and if the last one found nothing new."""
SOON: Final = SECOND // 4
"""The time after a probe before one that something depends on."""
DOUBT_WAITS: Final = 8 * SECOND
"""The longest time before a doubt's next probe: it grows fourfold while probes find nothing new."""
SHARE: Final = 0.1
"""The share of what a better link might gain that probing may cost requests."""
REGRET: Final = 4 * SECOND
LARGEST_FLOOR: Final = 8 * FLOOR
"""Probes have at least `FLOOR` bytes; twice as many after each move that a probe caused and requests revoked."""
LONG_AGO: Final = 1 << 62


class Probing:
    """When to probe one link, and which requests shared the link with a probe.

    A probe is due after observations that only a probe can clarify (``doubtful``), and while no transfer shows the
    goodput but a better link would change the choice: a worse one shows in the requests themselves.
    """

    def __init__(self, largest: int) -> None:
        """``largest``: the most bytes that any request takes."""
        self._largest = largest
        self._last = self._measured_at = self._over = -LONG_AGO  # asked for, goodput known from a transfer, answered
        self._due = self._looked = -LONG_AGO
        self._began: int | None = None  # when the current probe began
        self._took = self._bytes = 0
        self._waits, self._doubt_waits = EVERY, SOON
        self._floor = FLOOR
        self._replaced = self._lured = -LONG_AGO  # when a probe changed the belief, and when a move followed from that

    def wants(
        self, now: int, *, doubtful: bool, congested: bool, shared: bool, goodput: float, gain: Callable[[], float]
    ) -> int | None:
        """Return the bytes of the largest round of a probe that is due; None: no probe now. A call counts as having
        probed.

        ``congested``: the last probe came late, and the next one must find the cause. ``shared``: requests use the
        link. ``goodput``: the estimate in bytes per second. ``gain``: what a better link would gain, 0.2 = 20 %; 0 if
        it would not change the choice. Called if nothing else prevents a probe.
        """
        doubt = doubtful and now - self._last >= self._doubt_waits
        if not doubt and (now < self._due or now - self._measured_at < EVERY):
            return None
        if not congested:
            if now - self._looked < EVERY:
                return None
            expected = gain()
            if expected <= 0:
                self._looked = now
                return None
            if not doubt and shared and now - self._last < self._took / (SHARE * expected):
                self._due = self._last + int(self._took / (SHARE * expected))
                return None
        self._last = self._began = now
        self._due = now + self._waits
        self._bytes = 0
        floor = max(2, min(self._largest, FLOOR) * self._floor // FLOOR)
        return max(floor, int(min(self._largest, 4 * FLOOR, 0.1 * goodput)))

    def sends(self, nbytes: int) -> None:
        """Record that the probe in progress sends more bytes."""
        self._bytes += nbytes

    def ended(self, now: int, *, news: bool) -> None:
        """Record its answer; ``news``: it changed the estimate."""
        if self._began is not None:
            self._took = now - self._began
        self._began, self._over = None, now
        self._last = self._measured_at = max(self._last, now)
        if news:
            self._replaced = now
            self._doubt_waits, self._waits = SOON, EVERY
        else:
            self._doubt_waits = min(DOUBT_WAITS, 4 * self._doubt_waits)
            self._waits = min(WAITS, 2 * self._waits)
        self._due = now + max(self._waits, self._took)

    def gave_up(self) -> None:
        """Record that there will be no answer, because the server is gone."""
        self._began = None

    def soon(self, now: int) -> None:
        """Nothing is known any more: allow the next probe at once."""
        self._last = now - DOUBT_WAITS

    def observed(self, now: int) -> None:
        """Record that a request's transfer has shown the goodput."""
        self._measured_at = now

    def moved(self, now: int) -> None:
        """Record a move, after which a better link may matter more. If a probe had caused the previous move, it
        promised more than requests got (a token bucket let it pass), and the next probes are larger.
        """
        self._looked = -LONG_AGO
        if now - self._lured < REGRET:
            self._floor = min(2 * self._floor, LARGEST_FLOOR)
        self._lured = now if now - self._replaced < EVERY else -LONG_AGO

    def shared_with(self, began: int) -> bool:
        """Return whether a request sent at that time shared the link with a probe, so that its slowness means
        nothing.
        """
        return self._began is not None or self.was_behind(began)

    def was_behind(self, began: int) -> bool:
        """Return whether a request sent at that time shared the link with a probe that is over."""
        return began < self._over

    @property
    def under_way(self) -> int:
        """The bytes sent by the probe in progress."""
        return 0 if self._began is None else self._bytes


# How much slower one side is than its profile, from the times of its parts of the model.

UNTOLD_SHARE: Final = 0.05
"""The overhead of a part, as a share of what the rest of the model takes: a thread that wakes, cold caches, a sleeping
processor.
"""


class Side:
    """The edge or the server: ``factor`` times as slow as its profile.

    A part profiled at ``p`` that took ``m`` spent ``factor * p`` on its layers, and the rest on overhead. The overhead
    is at least 0, so ``factor`` is at most ``m / p``; and it is small compared with the whole model, so ``factor`` is
    at least ``m / (p + small)``. Anything in between is no news: a part of 0.1 ms that takes 0.5 ms says nothing about
    a model of 50 ms. Nor does one that takes 0.05 ms: its profile may include as much overhead, so it alone makes no
    side faster than its profile.
    """

    def __init__(self, whole_ns: float, parts_ns: Mapping[str, float]) -> None:
        self.take(whole_ns, parts_ns)
        self._factor = Tracker(1.0)

    def take(self, whole_ns: float, parts_ns: Mapping[str, float]) -> None:
        """``parts_ns``: as profiled, by the candidates' keys; the learned factor stays."""
        self._whole, self._parts = whole_ns, parts_ns

    @property
    def factor(self) -> float:
        """The current estimate."""
        return self._factor.value

    def expected_ns(self, key: str) -> float:
        """Return the expected time of this candidate's part; 0 for a part that was not profiled."""
        return self._parts.get(key, 0.0) * self.factor

    def doubt(self) -> None:
        """After a long time without observations: as profiled, until the next one, which is fully trusted."""
        self._factor.reset(1.0, stale=True)

    def observe(self, key: str, ns: float) -> bool:
        """Record the time of the candidate's part; returns whether the factor has changed suddenly, or a doubt has
        ended.
        """
        profiled = self._parts.get(key, 0.0)
        if profiled <= 0:
            return False
        small = UNTOLD_SHARE * max(0.0, self._whole - profiled)
        least, most = ns / (profiled + small), max(ns / profiled, min(1.0, (ns + small) / profiled))
        if least < self.factor < most:
            return False
        doubted = self._factor.stale
        return self._factor.observe(min(max(self.factor, least), most)) or doubted


NEAR: Final = 10
ALL_EVERY: Final = SECOND // 2
"""How many candidates are predicted for every request if there are codecs, and how often all are."""
RETRY: Final = 4 * SECOND
LONGEST_RETRY: Final = 64 * SECOND
"""A server that was left because it was slow is tried again after this time, doubled by each try that finds it slow."""
SLOW: Final = 1.5
"""The multiple of its profile from which a server's slowness is checked again."""


@dataclass(frozen=True)
class ChosenWay:
    """What to run the next request with."""

    candidate: Candidate
    """``candidate.name`` is a value for ``split=``, ``candidate.codec`` was chosen with it; its stages are predicted
    with what is known now.
    """
    moved: bool
    """Whether it differs from the last choice: then log ``reason`` and ``numbers``."""
    reason: str
    numbers: Mapping[str, float | int | str | None]
    """For the log: predicted_ms, held (the previous choice), held_ms, best, best_ms, up_bytes_per_second,
    down_bytes_per_second, rtt_ms, queue_ms, edge_factor, server_factor. None: unknown.
    """


class SplitController:
    """Chooses, observes, moves.

    Without a server at the start, omit ``cloud`` and ``link``: everything runs here until `server_found`. For each
    request call ``choice = choose(now)``, run it, then report what was observed. Raises SpecError for profiles of
    different models, an objective without numbers, and if no candidate satisfies the constraints.

    A ``partitioner`` decides about every request, among all predicted candidates, without waiting for a gain to last;
    ``option`` is its own parameter. Without a server there is nothing to decide.
    """

    def __init__(
        self,
        edge: Profile,
        cloud: Profile | None = None,
        link: Link | None = None,
        load: Load | None = None,
        *,
        objective: Objective | None = None,
        constraints: Constraints | None = None,
        file: FileInput | None = None,
        file_crosses: bool = True,
        power: GivenPower | None = None,
        correction: Correction | None = None,
        steady: Steady | None = None,
        partitioner: Partitioner | None = None,
        option: str | None = None,
        codecs: Codecs | None = None,
    ) -> None:
        """``codecs``: those to choose from together with the cut; None: all requests use one."""
        self._codecs = codecs
        self._keys: frozenset[str] | None = None  # of the candidates that may become the best one
        self._near: frozenset[str] = frozenset()
        self._seen_all = -LONG_AGO
        self._seen_bytes: dict[str, Tracker] = {}
        self._all_edge = self._edge = edge
        self._objective = objective or Objective()
        self._constraints = constraints or Constraints()
        self._file, self._file_crosses, self._power, self._correction = file, file_crosses, power, correction
        self._steady = steady or Steady()
        self._steadiness = Steadiness(self._steady)
        self._partitioner, self._option = partitioner, option
        self._here = Side(edge.alone_ns.middle, {EDGE_ONLY: edge.alone_ns.middle})
        self._away = Side(0.0, {})
        self._queue = Tracker(0.0, offset=1e5)
        self._cloud: Profile | None = None
        self._estimate: LinkEstimate | None = None
        self._load = Load()
        self._there = False
        self._predicted: list[Candidate] = []
        self._refused: set[str] = set()
        self._allowed: frozenset[str] | None = None
        self._held: str | None = None
        self._promised: dict[str, float] = {}
        self._probing = Probing(0)
        self._away_seen = -LONG_AGO  # when the server's speed was last observed
        self._retry = RETRY
        if cloud is not None and link is not None:
            self._take_server(cloud, link, load)
        else:
            self._decide(self._candidates())  # raises what `choose` would raise

    # -- choosing

    def choose(self, now: int) -> ChosenWay:
        """Return the candidate for the next request."""
        self._doubt_server(now)
        if self._partitioner is not None and self._there:
            return self._choice_of(self._partitioner, self._candidates())
        near = self._near_now(now)
        candidates = self._candidates(near)
        best, scores = self._decide(candidates)
        if near is None:
            self._seen_all = now
            self._near = frozenset([*sorted(scores, key=lambda key: scores[key])[:NEAR], EDGE_ONLY])
        by_key = {one.key: one for one in candidates}
        held = self._held
        pick, reason = best, "the first choice"
        if held is not None:
            pick, reason = by_key[best.key], ""
            if held not in by_key or held not in scores:
                reason = "no server" if not self._there else f"{held} is not allowed any more"
            elif not self._steadiness.may_switch(now, scores[held], scores[best.key]):
                pick = by_key[held]
                reason = "held"
            else:
                percent = 100 * (1 - scores[best.key] / scores[held])
                reason = f"{best.key} is {percent:.0f} % better than {held} in {self._objective}"
        moved = pick.key != held
        if moved:
            self._probing.moved(now)
            self._held = pick.key
        self._steadiness.chosen(now, moved=moved and held is not None)
        self._promised[pick.key] = pick.latency_ns
        return ChosenWay(pick, moved, reason, self._numbers(pick, by_key.get(held or ""), held, best))

    def _doubt_server(self, now: int) -> None:
        """While everything runs here, nothing shows the server's speed: the estimate of its slowness expires."""
        slow = self._there and self._held == EDGE_ONLY and self._away.factor >= SLOW
        if slow and now - self._away_seen >= self._retry:
            self._away_seen, self._retry = now, min(2 * self._retry, LONGEST_RETRY)
            self._away.doubt()
            self._changed()

    def _choice_of(self, partitioner: Partitioner, candidates: Sequence[Candidate]) -> ChosenWay:
        decision = partitioner.decide(
            Situation(candidates, self._objective, self._constraints, self._edge, self._cloud, self._option)
        )
        pick, held = decision.winner, self._held
        before = next((one for one in candidates if one.key == held), None)
        self._held = pick.key
        self._promised[pick.key] = pick.latency_ns
        best = decision.ranking[0] if decision.ranking else pick
        return ChosenWay(pick, pick.key != held, decision.objective, self._numbers(pick, before, held, best))

    def refuse(self, name: str) -> None:
        """Never choose this candidate again, because its answers were wrong. No effect for EDGE_ONLY."""
        if name != EDGE_ONLY:
            self._refused.add(name)
            self._narrow()
            self._changed()

    def allow(self, names: frozenset[str] | None) -> None:
        """Choose among these (None: all) and EDGE_ONLY: what the server lets this side use."""
        if names != self._allowed:
            self._allowed = names
            self._narrow()
            self._changed()

    def _usable(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        kept = [one for one in candidates if one.name not in self._refused]
        if self._allowed is None:
            return kept
        return [one for one in kept if one.name == EDGE_ONLY or one.name in self._allowed]

    def _near_now(self, now: int) -> frozenset[str] | None:
        """Return the candidates to predict; None: all. With codecs there are a hundred: all are predicted twice per
        second, and after changes; in between those that were near the best, and the current one.
        """
        if (
            self._codecs is None
            or self._steadiness.is_shaken
            or self._held is None
            or now - self._seen_all >= ALL_EVERY
        ):
            return None
        return self._near | {self._held}

    def _candidates(self, near: frozenset[str] | None = None, link: Link | None = None) -> list[Candidate]:
        """``link``: predict for this link instead of the estimated one."""
        there = self._there and self._estimate is not None
        found = predict(
            self._edge,
            self._cloud if there else None,
            (link or self._estimate.link) if self._estimate is not None and there else None,
            replace(self._load, queue_ns=self._queue.value),
            file=self._file,
            file_crosses=self._file_crosses,
            correction=self._correction,
            power=self._power,
            edge_factor=self._here.factor,
            server_factor=self._away.factor,
            codecs=self._codecs,
            only=None if near is None else {key.partition(" + ")[0] for key in near},
            keys=self._keys if near is None else near,
            bytes_up={key: seen.value for key, seen in self._seen_bytes.items()},
        )
        return self._usable(found)

    def _decide(self, candidates: Sequence[Candidate]) -> tuple[Candidate, Mapping[str, float]]:
        if not self._there:  # the only candidate, whatever the constraints
            return candidates[0], {candidates[0].key: 0.0}
        decision = decide(candidates, self._objective, self._constraints, self._held)
        return decision.winner, decision.scores

    def _numbers(
        self, pick: Candidate, held: Candidate | None, held_name: str | None, best: Candidate
    ) -> Mapping[str, float | int | str | None]:
        up, down = self._estimate.goodput() if self._estimate else (None, None)
        return {
            "predicted_ms": pick.latency_ns / 1e6,
            "held": held_name,
            "held_ms": held.latency_ns / 1e6 if held else None,
            "best": best.key,
            "best_ms": best.latency_ns / 1e6,
            "up_bytes_per_second": up,
            "down_bytes_per_second": down,
            "rtt_ms": self._estimate.rtt_ns / 1e6 if self._estimate else None,
            "queue_ms": self._queue.value / 1e6,
            "edge_factor": self._here.factor,
            "server_factor": self._away.factor,
        }

    # -- observing

    def observe_transfer(self, now: int, bytes_up: int, bytes_down: int, network_ns: int, bytes_ahead: int = 0) -> None:
        """Record a request's round trip without the server's own time. ``bytes_ahead``: of other requests still to be
        sent when this one was handed over.
        """
        if self._estimate is None:
            return
        if network_ns > self._estimate.ns(bytes_up, bytes_down) and self._probing.shared_with(now - network_ns):
            return
        bytes_up += bytes_ahead
        if self._estimate.speaks_of_goodput(bytes_up, bytes_down):
            self._probing.observed(now)
        overhead = self._correction.overhead_ns if self._correction else 0.0
        if self._estimate.observe(bytes_up, bytes_down, max(1.0, network_ns - overhead)):
            self._changed()

    def observe_bytes(self, key: str, bytes_up: int) -> None:
        """Record the bytes of a request with this candidate: a codec's output size depends on the data."""
        if self._codecs is None or key == EDGE_ONLY:
            return
        seen = self._seen_bytes.get(key)
        if seen is None:
            self._seen_bytes[key] = Tracker(bytes_up)
        else:
            seen.observe(bytes_up)

    @property
    def link(self) -> Link | None:
        """The estimated link; None before there was a server."""
        return None if self._estimate is None else self._estimate.link

    def observe_edge(self, now: int, key: str, head_ns: int) -> None:
        """Record the time of the candidate's head (EDGE_ONLY: the whole model) here."""
        if self._here.observe(key, head_ns):
            self._changed()

    def observe_server(self, now: int, key: str, tail_ns: int, queue_ns: int) -> None:
        """Record the server's decode, inject, compute and encode, and the wait before them."""
        if self._cloud is None:
            return
        self._away_seen = now
        if self._away.observe(key, tail_ns):
            self._changed()
        if self._away.factor < SLOW:
            self._retry = RETRY
        self._queue.observe(queue_ns)

    def observe_slow(self, now: int, key: str, bytes_up: int, elapsed_ns: int, *, given_up: bool = False) -> None:
        """A request of ``bytes_up`` handed over ``elapsed_ns`` ago is not answered yet, which bounds the link's speed.

        Call it about every 50 ms while waiting; what is too early to mean anything is ignored, unless the request was
        ``given_up``, so that nothing more will be known of it.
        """
        if self._estimate is None or not (given_up or self._is_late(key, elapsed_ns)):
            return
        if self._probing.was_behind(now - elapsed_ns):
            return
        own = self._away.expected_ns(key) + self._queue.value
        self._estimate.bound(bytes_up, self._probing.under_way, elapsed_ns - own)
        self._changed()

    def _is_late(self, key: str, elapsed_ns: int) -> bool:
        promised = self._promised.get(key)
        return promised is not None and elapsed_ns > self._steady.worse * promised + SECOND // 50

    def _changed(self) -> None:
        """A sudden change: earlier moves were no oscillation, and the next decision need not wait."""
        self._steadiness.shaken()

    # -- probing

    def observe_link(self, now: int, link: Link, load: Load | None = None) -> None:
        """Record a probe's result: adopted if it differs, else averaged in."""
        if self._estimate is None:
            return
        self._take_load(load)
        news = self._estimate.replace(link)
        if news and self._held == EDGE_ONLY:  # otherwise real transfers decide
            self._changed()
        self._probing.ended(now, news=news)

    def wants_probe(self, now: int) -> int | None:
        """Return the bytes of the largest round of a probe that is due now, besides the requests; None: no probe
        (`Probing`). A call counts as having probed: `observe_link` or `server_gone` must follow.
        """
        if self._estimate is None or not self._there:
            return None
        return self._probing.wants(
            now,
            doubtful=self._estimate.doubtful,
            congested=self._estimate.congested,
            shared=self._held != EDGE_ONLY,
            goodput=self._estimate.goodput()[0],
            gain=self._gain_of_better_link,
        )

    def probe_sends(self, nbytes: int) -> None:
        """Record that the probe in progress sends more bytes."""
        self._probing.sends(nbytes)

    def _gain_of_better_link(self) -> float:
        """Return what another candidate would gain if bytes took no time; 0 if it would not replace the current one.

        A candidate's time is linear in the time of a byte, so one that is near the best at both ends, now and there, is
        near it on every link in between. If everything runs here the round trip is unknown, too.
        """
        assert self._estimate is not None
        rtt = 0.0 if self._held == EDGE_ONLY else self._estimate.rtt_ns
        best, scores = self._decide(self._candidates(link=Link(Curve(((0, rtt),)), Curve(((0, 0.0),)))))
        held = None if self._held is None else scores.get(self._held)
        if held is None:
            return 1.0
        gain = 1 - scores[best.key] / held if held else 0.0  # a cost of zero is never beaten
        return gain if gain > self._steady.gain else 0.0

    def server_gone(self, now: int) -> None:
        """No connection: everything runs here from the next `choose` on."""
        self._there = False
        self._probing.gave_up()
        self._changed()

    def server_back(self, now: int) -> None:
        """Connected again; what is known of the link is stale. No effect without an earlier `server_found`."""
        if self._estimate is None or self._there:
            return
        self._there = True
        self._estimate.forget()
        self._probing.soon(now)
        self._changed()

    def server_found(self, now: int, cloud: Profile, link: Link, load: Load | None = None) -> None:
        """A server is available that was not at the start. Raises SpecError for another model's profile."""
        try:
            self._take_server(cloud, link, load)
        except SpecError:
            self._there = False
            raise
        self._changed()

    def _take_server(self, cloud: Profile, link: Link, load: Load | None) -> None:
        whole = predict(
            self._all_edge,
            cloud,
            link,
            load,
            file=self._file,
            file_crosses=self._file_crosses,
            correction=self._correction,
            power=self._power,
            codecs=self._codecs,
        )
        heads = {one.key: one.stages_ns["edge"] for one in whole if "edge" in one.stages_ns}
        self._here.take(self._all_edge.alone_ns.middle, heads)
        self._away.take(cloud.alone_ns.middle, {one.key: one.server_ns for one in whole if one.bytes_up})
        self._predicted = whole
        self._narrow()
        self._cloud, self._there = cloud, True
        largest = max((one.bytes_up for one in whole), default=0)
        self._estimate, self._probing = LinkEstimate(link, largest), Probing(largest)
        self._take_load(load)
        self._decide(self._candidates())

    def _narrow(self) -> None:
        """Predict only candidates that may ever be the best, given the objective and constraints; all for a
        partitioner.
        """
        if self._predicted and self._partitioner is None:
            limits = self._constraints
            requested = {
                "energy": "energy" in self._objective.weights,
                "memory": limits.max_edge_memory is not None,
                "accuracy": limits.min_accuracy is not None,
            }
            usable = limits.leaks_no_more(self._usable(self._predicted))
            steady = [one for one in usable if not one.unsteady]  # what may not be ranked makes no other superfluous
            best = undominated(steady or usable, [name for name, asks in requested.items() if asks])
            best += [one for one in usable if steady and one.unsteady]
            kept = {one.name for one in best} | {"input" for one in best if one.layer_id == -1}
            self._keys = None if self._codecs is None else frozenset(one.key for one in best)
            self._edge = replace(self._all_edge, cuts=tuple(cut for cut in self._all_edge.cuts if cut.name in kept))

    def _take_load(self, load: Load | None) -> None:
        if load is not None:
            self._load = load
            self._queue.observe(load.queue_ns)
