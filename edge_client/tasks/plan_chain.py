"""`plan_chain`: where a model had better be cut along a chain of servers, and what a request then takes.

Each machine's profile says what its part takes: the tail of one cut, less the tail of the next. Each link is measured
between its two ends, by the server before it. The least sum of all is found by dynamic programming over the cuts; what
requests take besides is learnt from a few real ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from edge_client.client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.planning.link import Link
from edge_client.planning.predict import check_same_model
from edge_client.probing import fetch_profile, probe
from edge_client.screen.progress import counted
from edge_client.screen.progress import progress as bar
from edge_client.screen.text import Row, Tabular, printable, size, table
from edge_client.settings import chain_of
from edge_client.survey.gather import Say, Wanted, edge_profile, probe_sizes
from edge_client.tasks.subject import Model, subject_of
from edge_client.transport import ConnectionOptions
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.profiling import profile_file
from shared_hooks.profiling.profile import CutProfile, Profile
from shared_hooks.profiling.profiler import identity

ASKED: Final = 5
"""Real requests at the chosen cuts, after one that does not count."""


@dataclass(frozen=True)
class Station:
    """A machine of a chain: its name, its profile, and the link to it from the one before; None for the edge."""

    name: str
    profile: Profile
    link: Link | None = None


@dataclass(frozen=True)
class Placed:
    """What one machine does: the part that begins after ``cut``, empty for the edge's. Times in ns."""

    name: str
    cut: str
    network_ns: float
    compute_ns: float
    bytes_up: int


@dataclass(frozen=True, repr=False)
class PlannedChain(Tabular):
    """`edge_client.plan_chain` returns it. A row is a machine, in the order of the chain.

    ``cuts``: what `split` of an `EdgeClient` for these servers takes; ``latency_ns``: predicted, with ``besides_ns``:
    what real requests took beyond the sum of their parts (0 where none was made).
    """

    model: str
    parts: Sequence[Placed]
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
        """JSON-able."""
        return {
            "model": self.model,
            "cuts": list(self.cuts),
            "latency_ns": self.latency_ns,
            "besides_ns": self.besides_ns,
            "parts": self.rows(),
            "links": [one.link.as_dict() for one in self.stations if one.link is not None],
        }

    def text(self) -> str:
        """As the command prints it."""
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


def best_cuts(stations: Sequence[Station]) -> tuple[str, ...]:
    """The cuts of the chain that takes the least, by dynamic programming: of each cut the best way to it. Raises
    CutRefused where there are not enough cuts that all machines know.
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


def parts_of(stations: Sequence[Station], cuts: Sequence[str]) -> list[Placed]:
    """What each machine does with these cuts."""
    parts = [Placed(stations[0].name, "", 0.0, _edge_ns(stations, cuts[0]), 0)]
    for at, cut in enumerate(cuts, 1):
        ends = _tail_ns(stations, at, cut) if at == len(cuts) else _middle_ns(stations, at, cut, cuts[at])
        answers = _answer_ns(stations, at)
        nbytes = _cut(stations[0].profile, cut).wire_bytes
        parts.append(Placed(stations[at].name, cut, _link_ns(stations, at, cut) + answers, ends, nbytes))
    return parts


def _names(stations: Sequence[Station]) -> list[str]:
    """Cuts that all machines know, in order."""
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
    """A server's part between two cuts: its tail of the first without that of the second, and packing what crosses."""
    edge, here = stations[0].profile, stations[at].profile
    begins, ends = _cut(here, first).stages, _cut(here, second).stages
    own = max(0.0, begins["compute"].middle - ends["compute"].middle)
    enters = sum(begins[name].middle for name in ("decode", "inject") if name in begins)
    packs = _cut(edge, second).stages["encode"].middle * here.alone_ns.middle / max(1.0, edge.alone_ns.middle)
    return enters + own + packs


def plan_chain(
    server: Sequence[str],
    model: Model,
    *,
    seconds: float = 20.0,
    correct: bool = True,
    credentials: Credentials | None = None,
    progress: bool = True,
    say: Say = lambda text: None,
) -> PlannedChain:
    """Measure a chain of servers and the links between them, and find its best cuts (docs/chains.md).

        found = edge_client.plan_chain(["gateway:50051", "gpu"], "digits")
        with EdgeClient(["gateway:50051", "gpu"], "digits", split=found.cuts) as client: ...

    ``server``: as of an `EdgeClient`; each server measures the next one, and the link to it. ``seconds``: for each
    profile. ``correct``: with a few real requests.

    Raises SpecError, ServerUnavailable, Disagreement, UnknownModel, AccessRefused (of a server that does not know the
    next one), CutRefused (too few cuts).
    """
    chain = chain_of(server)
    if len(chain) < 2:
        raise SpecError("plan_chain takes the servers of a chain, two or more; plan is for one")
    credentials = credentials or Credentials()
    subject = subject_of(model, None, chain[0], credentials)
    loaded = subject.load()
    with loaded.wrapped, ExitStack() as stack:
        who = identity(loaded.wrapped, loaded.spec.model_id, loaded.plan_digest)
        wanted = Wanted(server=chain[0], credentials=credentials, seconds=seconds)
        edge = edge_profile(loaded, wanted, say, progress)
        stations = [Station("edge", edge)]
        for at, name in enumerate(chain):
            with bar(f"profile of {name}", None, progress) as advance:
                profile, link = _asked(chain, at, edge, wanted, counted(advance, seconds))
            for text in profile_file.check(profile, who):
                say(f"warning: {name}: {text}")
            check_same_model(edge, profile)
            stations.append(Station(name, profile, link))
        cuts = best_cuts(stations)
        found = PlannedChain(who.model_id, parts_of(stations, cuts), 0.0, tuple(stations))
        if not correct:
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
        took = [client.infer(*loaded.args, **loaded.kwargs).measured_ns for _ in range(1 + ASKED)][1:]
        return replace(found, besides_ns=statistics.median(took) - found.latency_ns)


def _asked(
    chain: Sequence[str], at: int, edge: Profile, wanted: Wanted, on_progress: Callable[[int, int, str], None]
) -> tuple[Profile, Link]:
    """The profile of a server, and the link to it from the one before."""
    name, following = chain[at], list(chain[1 : at + 1])
    how: dict[str, Any] = {"weights_hash": edge.model.weights_hash, "credentials": wanted.credentials}
    settings = (wanted.warmup, wanted.repetitions, wanted.seconds)
    data = fetch_profile(chain[0], edge.model.model_id, *settings, on_progress, following=following, **how)
    if following:
        profile = profile_file.from_json(data.get("profile"), "cloud", f"the profile of {name}")
        return profile, Link.from_dict(data.get("link"), f"the server before {name}")
    profile = profile_file.from_json(data, "cloud", f"the profile that {name} sent")
    link, _ = probe(chain[0], probe_sizes(edge, None), (0, profile.answer_bytes), credentials=wanted.credentials)
    return profile, link
