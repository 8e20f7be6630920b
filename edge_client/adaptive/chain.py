"""`ChainChooser`: the cuts of a chain of servers, chosen from measurements, and moved as links change.

Each machine's profile gives the time of its part: the tail of one cut, less the tail of the next. Each link is measured
between its two ends, by the server before it. The least sum is found by dynamic programming over the cuts.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from edge_client.adaptive.beginning import AutoOptions, loaded_of
from edge_client.call import Call
from edge_client.core import ClientCore
from edge_client.planning.link import Link
from edge_client.planning.objective import Constraints
from edge_client.planning.predict import check_same_model
from edge_client.probing import fetch_profile, probe
from edge_client.screen import counted, in_notebook
from edge_client.screen import progress as bar
from edge_client.survey import Say, SurveySources, edge_profile, probe_sizes
from edge_client.user_input import LoadedModel
from edge_client.user_text import AUTO
from shared_hooks.errors import CutRefused, IsthmusError, QuotaExceeded, SpecError, logged
from shared_hooks.lifecycle import Stage
from shared_hooks.profiling import profile as profiles
from shared_hooks.profiling.profile import CutProfile, Profile
from shared_hooks.profiling.profiler import identity

log = logging.getLogger("edge_client")

EVERY_SECONDS: Final = 20.0
"""The interval of measuring links while requests are made."""
DECISIONS: Final = 1000
"""The number of decisions kept."""
BETTER: Final = 0.95
"""Cuts are moved if others take less than this share of the time, by the same measurements."""


@dataclass(frozen=True)
class Station:
    """A machine of a chain: its name, its profile, and the link to it from the previous one; None for the edge."""

    name: str
    profile: Profile
    link: Link | None = None


@dataclass(frozen=True)
class PlacedPart:
    """One machine's part, which begins after ``cut``, empty for the edge's. Times in ns."""

    name: str
    cut: str
    network_ns: float
    compute_ns: float
    bytes_up: int


def best_cuts(stations: Sequence[Station]) -> tuple[str, ...]:
    """Return the cuts of the fastest chain, by dynamic programming. Raises CutRefused if the machines have too few
    common cuts.
    """
    names = _names(stations)
    if len(names) < len(stations) - 1:
        raise CutRefused(f"{len(names)} cuts for a chain of {len(stations)} machines")
    costs = [_edge_ns(stations, name) + _link_ns(stations, 1, name) for name in names]
    came: list[list[int]] = []
    for at in range(1, len(stations) - 1):
        best, frm = [math.inf] * len(names), [-1] * len(names)
        for later in range(at, len(names)):
            for earlier in range(later):
                ns = costs[earlier] + _middle_ns(stations, at, names[earlier], names[later])
                if ns < best[later]:
                    best[later], frm[later] = ns, earlier
            best[later] += _link_ns(stations, at + 1, names[later])
        costs = best
        came.append(frm)
    last = len(stations) - 1
    totals = [cost + _tail_ns(stations, last, name) for cost, name in zip(costs, names, strict=True)]
    at = min(range(len(names)), key=totals.__getitem__)
    found = [at]
    for frm in reversed(came):
        at = frm[at]
        found.append(at)
    return tuple(names[one] for one in reversed(found))


def parts_of(stations: Sequence[Station], cuts: Sequence[str]) -> list[PlacedPart]:
    """Return each machine's part with these cuts."""
    parts = [PlacedPart(stations[0].name, "", 0.0, _edge_ns(stations, cuts[0]), 0)]
    for at, cut in enumerate(cuts, 1):
        ends = _tail_ns(stations, at, cut) if at == len(cuts) else _middle_ns(stations, at, cut, cuts[at])
        answers = _answer_ns(stations, at)
        nbytes = _cut(stations[0].profile, cut).wire_bytes
        parts.append(PlacedPart(stations[at].name, cut, _link_ns(stations, at, cut) + answers, ends, nbytes))
    return parts


def _names(stations: Sequence[Station]) -> list[str]:
    """Return the cuts that all machines know, in order."""
    known = [{cut.name for cut in one.profile.cuts} for one in stations[1:]]
    return [cut.name for cut in stations[0].profile.cuts if all(cut.name in one for one in known)]


def _cut(profile: Profile, name: str) -> CutProfile:
    found = profile.cut(name)
    assert found is not None
    return found


def _edge_ns(stations: Sequence[Station], name: str) -> float:
    profile = stations[0].profile
    finish = profile.finish_ns.middle if profile.finish_ns else 0.0
    return sum(one.middle for one in _cut(profile, name).stages.values()) + finish


def _link_ns(stations: Sequence[Station], at: int, name: str) -> float:
    link = stations[at].link
    assert link is not None
    return link.up.ns(_cut(stations[0].profile, name).wire_bytes)


def _answer_ns(stations: Sequence[Station], at: int) -> float:
    link = stations[at].link
    assert link is not None
    return link.down.ns(stations[at].profile.answer_bytes)


def _tail_ns(stations: Sequence[Station], at: int, name: str) -> float:
    return sum(one.middle for one in _cut(stations[at].profile, name).stages.values())


def _middle_ns(stations: Sequence[Station], at: int, first: str, second: str) -> float:
    """Return a server's part between two cuts: its tail of the first without that of the second, and packing what
    crosses.
    """
    edge, here = stations[0].profile, stations[at].profile
    begins, ends = _cut(here, first).stages, _cut(here, second).stages
    own = max(0.0, begins["compute"].middle - ends["compute"].middle)
    enters = sum(begins[name].middle for name in ("decode", "inject") if name in begins)
    packs = _cut(edge, second).stages["encode"].middle * here.alone_ns.middle / max(1.0, edge.alone_ns.middle)
    return enters + own + packs


def measured(
    chain: Sequence[str], loaded: LoadedModel, wanted: SurveySources, say: Say, progress: bool
) -> tuple[Station, ...]:
    """Return the edge, and each server with the link to it. Raises the errors of profiles and probes."""
    who = identity(loaded.wrapped, loaded.spec.model_id, loaded.plan_digest)
    edge = edge_profile(loaded, wanted, say, progress)
    stations = [Station("edge", edge)]
    for at, name in enumerate(chain):
        with bar(f"profile of {name}", None, progress) as advance:
            profile, link = _asked(chain, at, edge, wanted, counted(advance, wanted.seconds))
        for text in profiles.check(profile, who):
            say(f"warning: {name}: {text}")
        check_same_model(edge, profile)
        stations.append(Station(name, profile, link))
    return tuple(stations)


class ChainChooser:
    """The cuts of ``client``'s chain, measured on construction, which takes seconds. `cuts` is thread-safe.

    ``call``: what is planned and measured on. Raises SpecError for another objective than latency, and the errors of
    profiles and probes.
    """

    def __init__(self, client: ClientCore, options: AutoOptions, call: Call) -> None:
        if set(options.goal.weights) != {"latency"} or options.decider is not None:
            raise SpecError('split="auto" along a chain makes the latency least: objective="latency", no partitioner')
        if options.constraints != Constraints() or options.edge_profile or options.cloud_profile:
            raise SpecError('split="auto" along a chain keeps to no constraints, and measures every profile itself')
        self._client = client
        self._on_decision = options.on_decision
        self._wanted = SurveySources(
            server=client.chain[0], credentials=client.connection.credentials, seconds=options.profile_seconds
        )
        shown = in_notebook() or sys.stderr.isatty() if options.progress is None else options.progress
        self.stations = measured(client.chain, loaded_of(client, call), self._wanted, options.say or log.warning, shown)
        self._cuts = best_cuts(self.stations)
        self.decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS)
        self._used = 0.0
        self._closed = threading.Event()
        self._noted(AUTO, "measured")
        self._thread = threading.Thread(target=self._look, name="edge-chain-links", daemon=True)
        self._thread.start()

    @property
    def cuts(self) -> tuple[str, ...]:
        """The current cuts."""
        self._used = time.monotonic()
        return self._cuts

    def close(self) -> None:
        """Stop measuring."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(EVERY_SECONDS):
            if time.monotonic() - self._used < EVERY_SECONDS:
                with logged(log, "measuring the links of the chain"):
                    try:
                        self.look()
                    except IsthmusError as error:  # a server is down: requests report it
                        log.info("the links of the chain were not measured: %s", error)

    def look(self) -> None:
        """Measure the links, and move the cuts if that is worthwhile."""
        self.stations = tuple(self._linked())
        best, now = best_cuts(self.stations), self._cuts
        before, after = (latency_ns(self.stations, cuts) for cuts in (now, best))
        if best != now and after < BETTER * before:
            self._cuts = best
            self._noted(now, f"{after / 1e6:.1f} ms in place of {before / 1e6:.1f}, as the links are now")

    def _linked(self) -> Iterator[Station]:
        edge, *servers = self.stations
        yield edge
        for at, one in enumerate(servers):
            try:
                link = _asked(self._client.chain, at, edge.profile, self._wanted, lambda *_: None, one.profile)[1]
            except QuotaExceeded:  # the quota of this minute is used up
                yield one
            else:
                yield replace(one, link=link)

    def _noted(self, old: str | tuple[str, ...], reason: str) -> None:
        found = {"cuts": list(self._cuts), "latency_ns": latency_ns(self.stations, self._cuts), "reason": reason}
        self.decisions.append(found)
        if self._on_decision is not None:
            self._on_decision(found)
        self._client.lifecycle.emit(Stage.ON_SPLIT_CHANGE, old=old, new=self._cuts, reason=reason)


def latency_ns(stations: Sequence[Station], cuts: Sequence[str]) -> float:
    """Return the predicted time of a request."""
    return sum(one.network_ns + one.compute_ns for one in parts_of(stations, cuts))


def _asked(
    chain: Sequence[str],
    at: int,
    edge: Profile,
    wanted: SurveySources,
    on_progress: Callable[[int, int, str], None],
    known: Profile | None = None,
) -> tuple[Profile, Link]:
    """Return the profile of a server, unless it is ``known``, and the link to it from the previous one."""
    name, following = chain[at], list(chain[1 : at + 1])
    how: dict[str, Any] = {"weights_hash": edge.model.weights_hash, "credentials": wanted.credentials}
    settings = (wanted.warmup, wanted.repetitions, wanted.seconds)
    if known is not None and not following:
        link, _ = probe(chain[0], probe_sizes(edge, None), (0, known.answer_bytes), credentials=wanted.credentials)
        return known, link
    data = fetch_profile(chain[0], edge.model.model_id, *settings, on_progress, following=following, **how)
    if following:
        profile = profiles.from_json(data.get("profile"), "cloud", f"the profile of {name}")
        return profile, Link.from_dict(data.get("link"), f"the server before {name}")
    profile = profiles.from_json(data, "cloud", f"the profile that {name} sent")
    link, _ = probe(chain[0], probe_sizes(edge, None), (0, profile.answer_bytes), credentials=wanted.credentials)
    return profile, link
