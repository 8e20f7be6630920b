"""From both sides' decoding profiles, the link and the workload: what every cut takes.

    first token = edge(prompt) + network(hidden states of the prompt, logits) + tail(prompt)
    round       = drafts + edge(step) + network(hidden states, logits) + queue + tail(step)
    token       = round / tokens that a round is expected to give
    reply       = first token + (new tokens - 1) * token

A step of several tokens (drafted ones and the last) costs a step, and for each further token what it costs in a prompt.
Steps grow evenly with the tokens before them, so a reply's mean step is its middle one. All is exact at every cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_client.load import Load
from edge_client.modes import EDGE_ONLY
from edge_client.planning.candidate import Candidate
from edge_client.planning.generation.overhead import Overhead
from edge_client.planning.generation.workload import Workload
from edge_client.planning.link import Link
from edge_client.planning.predict import Power
from shared_hooks.errors import SpecError
from shared_hooks.metrics import Reading
from shared_hooks.profiling.decoding.profile import DecodingProfile, Part
from shared_hooks.showing import short

GOALS = ("token", "first-token", "reply")
"""What a plan of a generation may be about."""


@short
@dataclass(frozen=True)
class GenerationCandidate:
    """A cut after a block, or everything here. Memory is that of weights which the side uses, and of what it keeps at
    the end of the reply.
    """

    first: Candidate
    """The first token."""
    token: Candidate
    """Each further one, on average."""
    reply: Candidate
    tokens_per_round: float
    edge_weights_bytes: int
    edge_state_bytes: float
    cloud_weights_bytes: int
    cloud_state_bytes: float

    @property
    def name(self) -> str:
        """EDGE_ONLY, or the block after which the model is cut."""
        return self.token.name

    @property
    def tokens_per_second(self) -> float:
        """While decoding."""
        return 1e9 / self.token.latency_ns if self.token.latency_ns else 0.0

    def of(self, goal: str) -> Candidate:
        """By a name of `GOALS`."""
        return {"token": self.token, "first-token": self.first, "reply": self.reply}[goal]


def predict_generation(
    edge: DecodingProfile,
    cloud: DecodingProfile | None,
    link: Link | None,
    workload: Workload,
    *,
    head: DecodingProfile | None = None,
    overhead: Overhead | None = None,
    load: Load | None = None,
    power: Power | None = None,
    edge_factor: float = 1.0,
    server_factor: float = 1.0,
) -> list[GenerationCandidate]:
    """Edge-only, and a cut after every block. Without ``cloud`` or ``link`` edge-only alone. ``head``: this
    side's profile in split steps, where that is not what it takes by itself. The factors multiply the times of either
    side. Raises SpecError for profiles of different models.
    """
    found = [_alone(edge.times(edge_factor), workload, power)]
    if cloud is None or link is None:
        return found
    check_same_blocks(edge, cloud)
    here = (head or edge).times(edge_factor)
    ways = _Ways(here, cloud.times(server_factor), link, workload, overhead or Overhead(), load or Load(), power)
    return found + [ways.cut(at) for at in range(len(edge.blocks))]


def check_goal(goal: str) -> None:
    """SpecError for another word than those of `GOALS`."""
    if goal not in GOALS:
        raise SpecError(f"a plan of a generation is about {', '.join(GOALS)}, not {goal!r}")


def check_same_blocks(edge: DecodingProfile, cloud: DecodingProfile) -> None:
    """SpecError naming what differs."""
    mine, theirs = [one.name for one in edge.blocks], [one.name for one in cloud.blocks]
    if mine != theirs:
        raise SpecError(
            f"the two decoding profiles are of different models: {edge.model_id} has {len(mine)} blocks from {mine[0]} "
            f"on the edge, {cloud.model_id} has {len(theirs)} from {theirs[0]} on the cloud"
        )


@dataclass(frozen=True)
class _Ways:
    edge: DecodingProfile
    cloud: DecodingProfile
    link: Link
    workload: Workload
    overhead: Overhead
    load: Load
    power: Power | None

    def cut(self, at: int) -> GenerationCandidate:
        head = (self.edge.before, *self.edge.blocks[: at + 1])
        tail = (*self.cloud.blocks[at + 1 :], self.cloud.after)
        name, hidden = self.edge.blocks[at].name, self.edge.blocks[at].hidden_bytes
        # the server runs the code before its blocks, too; its time is in what `before` says there
        work = (self.cloud.before, *tail)
        memory = _memory(head, self.workload)
        return _candidate(
            name,
            at,
            self.workload,
            self._first(head, work, hidden),
            self._round(head, work, hidden),
            memory=memory,
            power=self.power,
            edge=(sum(part.weights_bytes for part in head), _state(head, self.workload)),
            cloud=(sum(part.weights_bytes for part in tail), _state(tail, self.workload)),
        )

    def _first(self, head: Sequence[Part], tail: Sequence[Part], hidden: int) -> _Round:
        tokens = self.workload.prompt_tokens
        up = tokens * hidden + self.overhead.prefill_up.at(tokens)
        down = self._logits(1) + self.overhead.prefill_down.at(tokens)
        here = sum(part.prefill.at(tokens) for part in head)
        return self._stages(here, up, down, sum(part.prefill.at(tokens) for part in tail))

    def _round(self, head: Sequence[Part], tail: Sequence[Part], hidden: int) -> _Round:
        drafting, before = self.workload.drafting, self.workload.middle
        tokens = drafting.tokens + 1
        up = tokens * hidden + self.overhead.step_up.at(before)
        down = self._logits(tokens) + self.overhead.step_down.at(before)
        here = sum(part.chunk_ns(tokens, before) for part in head)
        return self._stages(
            here + drafting.tokens * drafting.token_ns, up, down, sum(part.chunk_ns(tokens, before) for part in tail)
        )

    def _logits(self, tokens: int) -> float:
        return self.workload.answer_bytes(tokens, self.edge.words, self.edge.word_bytes)

    def _stages(self, here: float, up: float, down: float, there: float) -> _Round:
        network = max(0.0, self.link.network_ns(up, down) + self.overhead.network_ns)
        stages = {"edge": max(0.0, here), "network": network, "queue": self.load.queue_ns, "tail": there}
        return _Round(stages, up, down)


@dataclass(frozen=True)
class _Round:
    """One round trip, or some of them."""

    stages: Mapping[str, float]
    up: float
    down: float

    def times(self, factor: float) -> _Round:
        return _Round({name: ns * factor for name, ns in self.stages.items()}, self.up * factor, self.down * factor)

    def plus(self, other: _Round) -> _Round:
        stages = {name: ns + other.stages[name] for name, ns in self.stages.items()}
        return _Round(stages, self.up + other.up, self.down + other.down)


def _alone(edge: DecodingProfile, workload: Workload, power: Power | None) -> GenerationCandidate:
    drafting = workload.drafting
    first = _Round({"edge": sum(part.prefill.at(workload.prompt_tokens) for part in edge.parts)}, 0, 0)
    step = sum(part.chunk_ns(drafting.tokens + 1, workload.middle) for part in edge.parts)
    return _candidate(
        EDGE_ONLY,
        None,
        workload,
        first,
        _Round({"edge": step + drafting.tokens * drafting.token_ns}, 0, 0),
        memory=_memory(edge.parts, workload),
        power=power,
        edge=(sum(part.weights_bytes for part in edge.parts), _state(edge.parts, workload)),
        cloud=(0, 0.0),
    )


def _candidate(
    name: str,
    layer_id: int | None,
    workload: Workload,
    first: _Round,
    one: _Round,
    *,
    memory: Reading,
    power: Power | None,
    edge: tuple[int, float],
    cloud: tuple[int, float],
) -> GenerationCandidate:
    per_round = workload.drafting.tokens_per_round
    token = one.times(1 / per_round)
    reply = first.plus(token.times(workload.new_tokens - 1))

    def made(what: _Round) -> Candidate:
        return Candidate(
            name,
            layer_id,
            what.stages,
            bytes_up=round(what.up),
            bytes_down=round(what.down),
            edge_energy=_energy(what, power),
            edge_memory=memory,
        )

    return GenerationCandidate(made(first), made(token), made(reply), per_round, *edge, *cloud)


def _state(parts: Sequence[Part], workload: Workload) -> float:
    return sum(part.state_bytes.at(workload.last) for part in parts)


def _memory(parts: Sequence[Part], workload: Workload) -> Reading:
    total = sum(part.weights_bytes for part in parts) + _state(parts, workload)
    return Reading.estimated(float(total), "weights that are used here, and what is kept at the end of the reply")


def _energy(what: _Round, power: Power | None) -> Reading:
    if power is None:
        return Reading.unavailable("steps are too short for a meter")
    work = what.stages["edge"]
    joules = (power.active * work + power.idle * (sum(what.stages.values()) - work)) / 1e9
    return Reading.estimated(joules, f"given: {power.active:g} W while it computes, {power.idle:g} W while it waits")
