"""Predict the time of a token, of the first one and of a reply at every cut of a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from edge_client import user_text
from edge_client.client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.generation.survey import gather_generation
from edge_client.options import PlanGenerationOptions
from edge_client.pages import duration, stem
from edge_client.pages import render as page_of
from edge_client.planning.explain import BreakEven, break_evens, explain, round_trip
from edge_client.planning.generation import (
    KEY,
    GenerationCandidate,
    MeasuredGeneration,
    PredictedDrafting,
    Workload,
    check_goal,
    decide_generation,
    read_measured,
)
from edge_client.planning.link import Link
from edge_client.planning.objective import Candidate, Constraints, Decision, Objective
from edge_client.planning.predict import watts_of
from edge_client.process import local_server
from edge_client.screen import Column, Row, Tabular, fitted, printable, size
from edge_client.settings import OWN
from edge_client.survey import Say
from edge_client.tasks.plan import given_link
from edge_client.tasks.subject import Model, Subject, address_of, subject_of
from edge_client.transport import ConnectionOptions
from edge_client.user_text import option
from shared_hooks.errors import SpecError
from shared_hooks.files import write_text
from shared_hooks.options import takes

# The content of a plan of a generation: every cut, the decision, and the data of both.


@dataclass(frozen=True, repr=False)
class PlannedGeneration(Tabular):
    """Result of `edge_client.plan_generation`. A row is a cut, in the order of the blocks; times in ns, bytes per
    token.

    ``goal``: what is optimised, a token, the first one, or the reply; ``decision``: the result (`best`, `best_cut`);
    ``measured``: its measurements; ``link``: the link it is for; ``origin``: where the numbers come from.
    """

    model: str
    goal: str
    workload: Workload
    decision: Decision
    candidates: Sequence[GenerationCandidate]
    measured: MeasuredGeneration
    link: Link
    origin: str
    breaks: Sequence[BreakEven]

    shown = {  # noqa: RUF012
        "best": "best",
        "name": "cut after",
        "token_ns": "ms a token",
        "first_token_ns": "ms to the first",
        "reply_ns": "ms a reply",
        "edge_ns": "edge",
        "network_ns": "network",
        "server_ns": "server",
        "bytes_up": "bytes up",
        "edge_memory_bytes": "edge memory",
        "reason": "not allowed",
    }

    drawn = "token_ns"

    @property
    def best(self) -> str:
        """The winner's name: "edge-only" or a block."""
        return self.decision.winner.name

    @property
    def best_cut(self) -> str | None:
        """The best block to cut after, whether it is the winner or not; None if no cut is allowed."""
        return self.decision.best_cut.name if self.decision.best_cut else None

    def title(self) -> str:
        winner = next(one for one in self.candidates if one.name == self.best)
        return (
            f"{self.model}: {winner.name} is best in {self.decision.objective} of {self._of}, "
            f"{winner.token.latency_ns / 1e6:.3f} ms a token predicted"
        )

    @property
    def _of(self) -> str:
        return {"token": "a token", "first-token": "the first token", "reply": "a reply"}[self.goal]

    def rows(self) -> list[Row]:
        rank = {one.name: number for number, one in enumerate(self.decision.ranking, 1)}
        return [
            {
                "name": one.name,
                "block": one.token.layer_id,
                "rank": rank.get(one.name),
                "best": one.name == self.best,
                "token_ns": one.token.latency_ns,
                "first_token_ns": one.first.latency_ns,
                "reply_ns": one.reply.latency_ns,
                "tokens_per_second": one.tokens_per_second,
                "tokens_per_round": one.tokens_per_round,
                "edge_ns": one.token.stages_ns["edge"],
                "network_ns": one.token.stages_ns.get("network", 0.0),
                "server_ns": one.token.stages_ns.get("queue", 0.0) + one.token.stages_ns.get("tail", 0.0),
                "bytes_up": one.token.bytes_up,
                "bytes_down": one.token.bytes_down,
                "first_bytes_up": one.first.bytes_up,
                "edge_memory_bytes": one.token.edge_memory.value,
                "edge_state_bytes": one.edge_state_bytes,
                "cloud_memory_bytes": one.cloud_weights_bytes + one.cloud_state_bytes,
                "cloud_state_bytes": one.cloud_state_bytes,
                "edge_energy_j": one.token.edge_energy.value,
                "allowed": one.name not in self.decision.rejected,
                "reason": self.decision.rejected.get(one.name),
            }
            for one in self.candidates
        ]

    def explain(self) -> str:
        """Explain why the winner wins, and what would have to change for the runner-up to win."""
        return self._explained()[0]

    def _explained(self) -> tuple[str, dict[str, Any]]:
        return explain(self.decision, [one.of(self.goal) for one in self.candidates], self.breaks)

    def as_dict(self, explanation: bool = False) -> dict[str, Any]:
        """Return JSON data. Its ``measured`` can be passed to a later plan."""
        drafting, answer = self.workload.drafting, self.workload.answer
        return {
            "model": self.model,
            "goal": self.goal,
            "workload": {
                "prompt_tokens": self.workload.prompt_tokens,
                "new_tokens": self.workload.new_tokens,
                "top_logits": answer[1] if answer is not None and len(answer) == 2 else None,
                "draft": drafting.tokens,
                "acceptance": drafting.acceptance if drafting.tokens else None,
            },
            "decision": self.decision.as_dict(),
            "candidates": self.rows(),
            "link": self.link.as_dict(),
            "origin": self.origin,
            KEY: self.measured.as_dict(),
            **({"explanation": self._explained()[1]} if explanation else {}),
        }

    def text(self, top: int | None = None, width: int | None = None) -> str:
        """Format the plan as the command prints it, in the order of the blocks; with ``top``, the best so many, best
        first.
        """
        known = {row["name"]: row for row in self.rows()}
        names = list(known) if top is None else [one.name for one in self.decision.ranking[:top]]
        spare = ("server memory", "memory", "down", "up", "server", "net", "edge", "tokens/s")
        found = fitted(self._columns([known[name] for name in names]), spare, width)
        return "\n".join([found, "", *self.below(len(names))])

    def _columns(self, rows: Sequence[Row]) -> list[Column]:
        def ms(key: str, digits: int = 2) -> list[str]:
            return [f"{row[key] / 1e6:.{digits}f}" for row in rows]

        def sizes(key: str) -> list[str]:
            return [size(round(row[key])) for row in rows]

        marks = ["*" if row["best"] else "" if row["allowed"] else "x" for row in rows]
        return [
            Column("", marks, right=False),
            Column("cut after", [printable(row["name"]) for row in rows], right=False),
            Column("ms a token", ms("token_ns")),
            Column("tokens/s", [f"{row['tokens_per_second']:.1f}" for row in rows]),
            Column("ms to first", ms("first_token_ns", 1)),
            Column("edge", ms("edge_ns")),
            Column("net", ms("network_ns")),
            Column("server", ms("server_ns")),
            Column("up", sizes("bytes_up")),
            Column("down", sizes("bytes_down")),
            Column("memory", sizes("edge_memory_bytes")),
            Column("server memory", sizes("cloud_memory_bytes")),
        ]

    def below(self, shown: int | None = None) -> list[str]:
        """Return the lines below a table that shows so many candidates (None: all)."""
        shown = len(self.candidates) if shown is None else shown
        decision, work, lines = self.decision, self.workload, []
        if shown < len(self.candidates):
            lines.append(f"the best {shown} of {len(self.candidates)} candidates, the best first")
        lines.append(f"{self.model}: {self.best} is best in {decision.objective} of {self._of} (*)")
        if decision.runner_up:
            lines.append(f"runner-up: {decision.runner_up.name}")
        if decision.best_cut is None:
            lines.append("best cut: none is allowed")
        elif decision.best_cut is not decision.winner:
            lines.append(f"best cut: {decision.best_cut.name}")
        if decision.rejected:
            lines.append(f"x: {decision.rejection([one.of(self.goal) for one in self.candidates])}")
        lines.append(f"{work.new_tokens} tokens after {work.prompt_tokens}; bytes are of a token, memory is at the end")
        if work.drafting.tokens:
            lines.append(
                f"{work.drafting.tokens} drafted a round trip, {work.drafting.acceptance:.0%} accepted: "
                f"{work.drafting.tokens_per_round:.2f} tokens a round trip"
            )
        lines.append(f"link, {self.link.source}: {self.link.rtt_ns / 1e6:.3f} ms round trip; up: {self.link.speed_up}")
        lines.append(f"{self.origin}; the server's blocks: {self.measured.cloud.note or 'each measured'}")
        if work.prompt_tokens + work.new_tokens > 2 * max(self.measured.edge.lengths, default=0):
            most = max(self.measured.edge.lengths, default=0)
            lines.append(f"measured up to {most} tokens only: what is beyond is drawn out by a line")
        return lines


# The page of a plan of a generation: a token, the first one and memory against the cut, in one file.


TEMPLATE: Final = Path(__file__).parent / "generation_page.html.j2"
ROUND_TRIPS_MS: Final = (5, 20, 50, 100)
PROMPTS: Final = (128, 512, 2048)
HEADERS: Final = (
    "cut after",
    "a token",
    "to the first",
    "a reply",
    "edge",
    "network",
    "server",
    "up",
    "down",
    "memory",
)
CONTENTS: Final = (
    ("token", "a token"),
    ("first", "the first token"),
    ("memory", "memory"),
    ("cuts", "all cuts"),
)


def write_page(found: PlannedGeneration, path: str | Path) -> None:
    """Write the plan's page. Raises SpecError if that fails, or jinja2 is missing."""
    try:
        page = render(found)
    except ImportError as error:
        raise SpecError('a report needs jinja2: pip install "isthmus[sweep]"') from error
    write_text(path, page)


def render(found: PlannedGeneration) -> str:
    """Render the page as HTML."""
    rows, work = found.rows(), found.workload
    return page_of(
        TEMPLATE,
        ("lines",),
        {"file": stem(f"{found.model}-generation"), "model": found.model, "charts": _charts(found)},
        title=f"{found.model}: where to cut a generation",
        kicker="Isthmus plan",
        heading=f"Where to cut {found.model} for generation",
        lead=f"Predicted for {work.new_tokens} tokens after {work.prompt_tokens}. {found.title()}.",
        partial=None,
        contents=list(CONTENTS),
        cards=_cards(found),
        headers=list(HEADERS),
        rows=[_row(row) for row in rows],
        best=[at for at, row in enumerate(rows) if row["best"]],
        below=found.below(),
    )


def _cards(found: PlannedGeneration) -> list[dict[str, str]]:
    def best(title: str, key: Callable[[GenerationCandidate], float]) -> dict[str, str]:
        one = min(found.candidates, key=key)
        text = f"{one.tokens_per_second:.1f} tokens/s, {duration(one.first.latency_ns)} to the first"
        return {"title": title, "figure": duration(key(one)), "name": one.name, "text": text}

    return [
        best("Fastest token", lambda one: one.token.latency_ns),
        best("Fastest first token", lambda one: one.first.latency_ns),
        best("Fastest reply", lambda one: one.reply.latency_ns),
    ]


def _charts(found: PlannedGeneration) -> list[dict[str, Any]]:
    """Return charts, each with lines of (block number, value)."""
    measured, work = found.measured, found.workload

    def token(link: Link) -> list[GenerationCandidate]:
        return measured.candidates(work, link)

    links = {f"{_ms(found.link.rtt_ns)} ms, as planned": found.link}
    links |= {f"{rtt} ms": round_trip(found.link, rtt * 1e6) for rtt in ROUND_TRIPS_MS}
    tokens = [(f"round trip {name}", _line(token(link), _token_ms)) for name, link in links.items()]
    blocks = range(len(measured.edge.blocks))
    alone = [[at, _token_ms(found.candidates[0])] for at in blocks]
    prompts = sorted({*PROMPTS, work.prompt_tokens})
    firsts = [
        (
            f"{prompt} tokens",
            _line(measured.candidates(replace(work, prompt_tokens=prompt), found.link), _first_ms),
        )
        for prompt in prompts
    ]
    memory = [
        ("edge", _line(found.candidates, lambda one: (one.token.edge_memory.value or 0) / 2**20)),
        ("server", _line(found.candidates, lambda one: (one.cloud_weights_bytes + one.cloud_state_bytes) / 2**20)),
    ]
    return [
        _chart("token", "A token", "ms", [*tokens, ("edge-only", alone)]),
        _chart("first", "The first token", "ms", firsts),
        _chart("memory", "Memory at the end of the reply", "MiB", memory),
    ]


def _line(
    candidates: Sequence[GenerationCandidate], value: Callable[[GenerationCandidate], float]
) -> list[list[float]]:
    return [[one.token.layer_id, value(one)] for one in candidates if one.token.layer_id is not None]


def _token_ms(one: GenerationCandidate) -> float:
    return one.token.latency_ns / 1e6


def _first_ms(one: GenerationCandidate) -> float:
    return one.first.latency_ns / 1e6


def _chart(key: str, title: str, unit: str, series: Sequence[tuple[str, list[list[float]]]]) -> dict[str, Any]:
    drawn = [{"name": name, "points": points} for name, points in series]
    return {"key": key, "title": title, "unit": unit, "series": drawn}


def _row(row: dict[str, Any]) -> list[str]:
    times = ("token_ns", "first_token_ns", "reply_ns", "edge_ns", "network_ns", "server_ns")
    sizes = ("bytes_up", "bytes_down", "edge_memory_bytes")
    return [row["name"], *(duration(row[key]) for key in times), *(size(round(row[key])) for key in sizes)]


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3g}"


@takes(PlanGenerationOptions)
def plan_generation(server: str | None, model: Model, *, options: PlanGenerationOptions) -> PlannedGeneration:
    """Predict what every cut of a language model takes in a split generation, and decide (docs/planning.md).

        found = edge_client.plan_generation("cloud:50051", "model.toml", prompt_tokens=500, new_tokens=200)
        found.best_cut            # what `SplitGenerator` takes
        found.to_polars()         # one row a candidate

    ``server`` and ``model``: as for `plan`. ``draft`` tokens are drafted before each round trip, a share ``acceptance``
    of which is accepted; they are sent together. ``top_logits``: only the k largest come back. ``goal``: what to
    optimise: "token", "first-token" or "reply"; ``objective`` and ``max_edge_memory`` (weights used here, and the cache
    at the reply's end) as for `plan`. ``uplink``, ``downlink``, ``rtt``: plan for this link instead of the measured
    one. ``measured``: the JSON of an earlier plan, whose measurements are reused. ``seconds``: time to measure.

    Raises SpecError, ServerUnavailable, Disagreement, UnknownModel, CutRefused (a model that cannot be split).
    """
    target = Objective.parse(options.objective)
    check_goal(options.goal)
    if (options.acceptance is None) is not (options.draft == 0):
        raise SpecError(f"{option('draft')} and {option('acceptance')} (the share that is right) go together")
    workload = Workload(
        options.prompt_tokens,
        options.new_tokens,
        None if options.top_logits is None else ("top", options.top_logits),
        PredictedDrafting(options.draft, options.acceptance or 0.0),
    )
    memory = options.max_edge_memory
    limits = Constraints(user_text.size(option("max_edge_memory"), memory) if isinstance(memory, str) else memory)
    link, watts = given_link(options.uplink, options.downlink, options.rtt), watts_of(options.power)
    if options.measured is not None:
        known, origin = read_measured(options.measured), f"measured before: {options.measured}"
    else:
        address = address_of(server)
        subject = subject_of(model, None, address, options.credentials)
        known, origin = _measured(
            address, subject, workload, options.credentials, options.seconds, options.progress, options.say
        )
    ways = partial(known.candidates, workload, power=watts)
    candidates = ways(link)
    decision = decide_generation(candidates, options.goal, target, limits)
    used = known.link if link is None else link

    def repredict(other: Link, edge: float, cloud: float) -> list[Candidate]:
        return [one.of(options.goal) for one in ways(other, edge, cloud)]

    return PlannedGeneration(
        model=known.edge.model_id,
        goal=options.goal,
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
) -> tuple[MeasuredGeneration, str]:
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
