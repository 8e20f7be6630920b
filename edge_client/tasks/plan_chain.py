"""`plan_chain`: where a model had better be cut along a chain of servers, and what a request then takes.

What is measured, and how the least is found: `edge_client.adaptive.chain`. What requests take besides is learnt from a
few real ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from edge_client.adaptive.chain import Placed, Station, best_cuts, measured, parts_of
from edge_client.client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.options import PlanChainOptions
from edge_client.screen.text import Row, Tabular, printable, size, table
from edge_client.settings import chain_of
from edge_client.survey.gather import Wanted
from edge_client.tasks.subject import Model, subject_of
from edge_client.transport import ConnectionOptions
from shared_hooks.errors import SpecError
from shared_hooks.options import takes

ASKED: Final = 5
"""Real requests at the chosen cuts, after one that does not count."""


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


@takes(PlanChainOptions)
def plan_chain(server: Sequence[str], model: Model, *, options: PlanChainOptions) -> PlannedChain:
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
    credentials = options.credentials or Credentials()
    subject = subject_of(model, None, chain[0], credentials)
    loaded = subject.load()
    with loaded.wrapped, ExitStack() as stack:
        wanted = Wanted(server=chain[0], credentials=credentials, seconds=options.seconds)
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
        took = [client.infer(*loaded.args, **loaded.kwargs).measured_ns for _ in range(1 + ASKED)][1:]
        return replace(found, besides_ns=statistics.median(took) - found.latency_ns)
