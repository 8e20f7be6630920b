"""Which cut is best for split generation: the time of a token, the first one, and a whole reply, from numbers alone.

Measurements are kept as JSON; they apply to other links, lengths and drafts.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from edge_client.call import Load
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Candidate, Constraints, Decision, Objective, decide
from edge_client.planning.predict import GivenPower
from edge_client.user_text import EDGE_ONLY
from shared_hooks.errors import SpecError
from shared_hooks.metrics import Reading
from shared_hooks.profiling import decoding
from shared_hooks.profiling.decoding import DecoderPart, DecodingProfile, LineFit
from shared_hooks.profiling.profile import Fields
from shared_hooks.showing import short

# From both sides' decoding profiles, the link and the workload: what every cut takes.
#
#     first token = edge(prompt) + network(hidden states of the prompt, logits) + tail(prompt)
#     round       = drafts + edge(step) + network(hidden states, logits) + queue + tail(step)
#     token       = round / tokens that a round is expected to give
#     reply       = first token + (new tokens - 1) * token
#
# A step of several tokens (drafted ones and the last) costs a step, and for each further token what it costs in a
# prompt. Steps grow evenly with the tokens before them, so a reply's mean step is its middle one. All is exact at
# every cut.


# The overhead of a split step over the model's own work, measured on a few real ones.


HEADER_BYTES: Final = 200
"""Bytes of a step's header each way, if not measured."""


@short
@dataclass(frozen=True)
class Overhead:
    """The overhead of steps. ``network_ns``: of a step, beyond the link; negative if steps were faster than its probe.
    Bytes besides the hidden states (``up``) and the logits (``down``): of a step by the tokens before it, of a prompt
    by its tokens.
    """

    network_ns: float = 0.0
    step_up: LineFit = field(default_factory=lambda: LineFit(HEADER_BYTES))
    prefill_up: LineFit = field(default_factory=lambda: LineFit(HEADER_BYTES))
    step_down: LineFit = field(default_factory=lambda: LineFit(HEADER_BYTES))
    prefill_down: LineFit = field(default_factory=lambda: LineFit(HEADER_BYTES))

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        lines = ("step_up", "prefill_up", "step_down", "prefill_down")
        return {
            "network_ns": self.network_ns,
            **{
                f"{name}_bytes": {"fixed": getattr(self, name).fixed, "per_token": getattr(self, name).slope}
                for name in lines
            },
        }


# The workload of a generation: lengths of prompt and reply, what is returned of the logits, and what is drafted.


TOKEN_BYTES: Final = 8
"""Bytes of a token id, if only the token comes back."""
PLACE_BYTES: Final = 4
"""Bytes of a token id with its logit."""


@dataclass(frozen=True)
class PredictedDrafting:
    """``tokens`` are guessed on the edge before each round trip, in ``token_ns`` each (0: looked up in the text), and
    each is right with probability ``acceptance`` if those before it are.
    """

    tokens: int = 0
    acceptance: float = 0.0
    token_ns: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise SpecError(f"drafting {self.tokens} tokens: expected 0 or more")
        if not 0 <= self.acceptance <= 1:  # rejects NaN, too
            raise SpecError(f"acceptance {self.acceptance}: expected a share from 0 to 1")
        if not 0 <= self.token_ns < math.inf:
            raise SpecError(f"a drafted token takes {self.token_ns} ns: expected 0 or more")

    @property
    def tokens_per_round(self) -> float:
        """The expected tokens of a round trip: the accepted ones, and the one that the model adds."""
        a, k = self.acceptance, self.tokens
        return sum(a**at for at in range(k + 1))


@dataclass(frozen=True)
class Workload:
    """The task. ``answer``: what of the logits comes back: None for all, ("top", k), ("token",)."""

    prompt_tokens: int = 128
    new_tokens: int = 128
    answer: tuple[str] | tuple[str, int] | None = None
    drafting: PredictedDrafting = field(default_factory=PredictedDrafting)

    def __post_init__(self) -> None:
        for name, tokens in (("prompt", self.prompt_tokens), ("reply", self.new_tokens)):
            if tokens < 1:
                raise SpecError(f"a {name} of {tokens} tokens: expected 1 at least")
        if self.answer is not None and not (
            self.answer == ("token",) or (self.answer[0] == "top" and len(self.answer) == 2 and self.answer[1] > 0)
        ):
            raise SpecError(f"no such answer: {self.answer!r:.60}")

    @property
    def middle(self) -> float:
        """The number of tokens before the middle step: as times grow linearly, the mean step is that one."""
        return self.prompt_tokens + self.new_tokens / 2

    @property
    def last(self) -> int:
        """The number of tokens whose state is kept at the end."""
        return self.prompt_tokens + self.new_tokens

    def answer_bytes(self, tokens: int, words: int, word_bytes: int) -> float:
        """Return the bytes of the logits of so many tokens."""
        if self.answer is None:
            return float(tokens * words * word_bytes)
        if len(self.answer) == 2:
            return float(tokens * min(self.answer[1], words) * (word_bytes + PLACE_BYTES))
        return float(tokens * TOKEN_BYTES)


# Whether a running session should move its cut: the cost of the move, and after how many tokens it has paid off.
#
# *Carrying* sends what the blocks between the two cuts keep (keys and values) to the other side. *Replaying* opens a
# new session at the new cut: this side computes the head of all tokens so far once more, sends their hidden states,
# and the server computes its tail of them.


@short
@dataclass(frozen=True)
class SessionMove:
    """The bytes and ns of either way to move a session. ``gain_ns``: how much faster a token is at the new cut;
    negative: slower.
    """

    carried_bytes: float
    carry_ns: float
    replayed_bytes: float
    replay_ns: float
    gain_ns: float

    @property
    def pays_after(self) -> float:
        """The number of tokens after which the cheaper way has paid off; infinite if tokens are not faster."""
        return min(self.carry_ns, self.replay_ns) / self.gain_ns if self.gain_ns > 0 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; null for what never pays off."""
        pays = self.pays_after
        return {
            "carried_bytes": self.carried_bytes,
            "carry_ns": self.carry_ns,
            "replayed_bytes": self.replayed_bytes,
            "replay_ns": self.replay_ns,
            "gain_ns": self.gain_ns,
            "pays_after": pays if math.isfinite(pays) else None,
        }


def moving(
    edge: DecodingProfile, cloud: DecodingProfile, link: Link, old: int, new: int, tokens: int, gain_ns: float
) -> SessionMove:
    """Moving a session with so many tokens from the cut after block number ``old`` to that after ``new``.

    ``gain_ns``: the time of a token at the old cut less that at the new one.
    """
    first, last = sorted((old, new))
    between: list[DecoderPart] = list(edge.blocks[first + 1 : last + 1])
    carried = sum(block.state_bytes.at(tokens) for block in between)
    up = new < old
    carry = link.network_ns(carried if up else HEADER_BYTES, HEADER_BYTES if up else carried)
    replayed = float(tokens * edge.blocks[new].hidden_bytes + HEADER_BYTES)
    head, tail = (edge.before, *edge.blocks[: new + 1]), (*cloud.blocks[new + 1 :], cloud.after)
    again = sum(part.prefill.at(tokens) for part in (*head, *tail))
    return SessionMove(carried, carry, replayed, link.network_ns(replayed, HEADER_BYTES) + again, gain_ns)


GOALS = ("token", "first-token", "reply")
"""What a plan of a generation can optimise."""


@short
@dataclass(frozen=True)
class GenerationCandidate:
    """A cut after a block, or everything here. Memory: of the weights that the side uses, and of its state at the
    reply's end.
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
        """The rate while decoding."""
        return 1e9 / self.token.latency_ns if self.token.latency_ns else 0.0

    def of(self, goal: str) -> Candidate:
        """Return the candidate for a name in `GOALS`."""
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
    power: GivenPower | None = None,
    edge_factor: float = 1.0,
    server_factor: float = 1.0,
) -> list[GenerationCandidate]:
    """Predictions for edge-only, and for a cut after every block; only edge-only without ``cloud`` or ``link``.

    ``head``: this side's profile in split steps, if it differs from that alone. The factors multiply the times of
    either side. Raises SpecError for profiles of different models.
    """
    found = [_alone(edge.times(edge_factor), workload, power)]
    if cloud is None or link is None:
        return found
    check_same_blocks(edge, cloud)
    here = (head or edge).times(edge_factor)
    ways = _Ways(here, cloud.times(server_factor), link, workload, overhead or Overhead(), load or Load(), power)
    return found + [ways.cut(at) for at in range(len(edge.blocks))]


def check_goal(goal: str) -> None:
    """Raise SpecError for a word not in `GOALS`."""
    if goal not in GOALS:
        raise SpecError(f"a plan of a generation is about {', '.join(GOALS)}, not {goal!r}")


def check_same_blocks(edge: DecodingProfile, cloud: DecodingProfile) -> None:
    """Raise SpecError naming the difference."""
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
    power: GivenPower | None

    def cut(self, at: int) -> GenerationCandidate:
        head = (self.edge.before, *self.edge.blocks[: at + 1])
        tail = (*self.cloud.blocks[at + 1 :], self.cloud.after)
        name, hidden = self.edge.blocks[at].name, self.edge.blocks[at].hidden_bytes
        # the server runs the code before its blocks, too; its time is that of `before` there
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

    def _first(self, head: Sequence[DecoderPart], tail: Sequence[DecoderPart], hidden: int) -> _Round:
        tokens = self.workload.prompt_tokens
        up = tokens * hidden + self.overhead.prefill_up.at(tokens)
        down = self._logits(1) + self.overhead.prefill_down.at(tokens)
        here = sum(part.prefill.at(tokens) for part in head)
        return self._stages(here, up, down, sum(part.prefill.at(tokens) for part in tail))

    def _round(self, head: Sequence[DecoderPart], tail: Sequence[DecoderPart], hidden: int) -> _Round:
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
    """One round trip, or several."""

    stages: Mapping[str, float]
    up: float
    down: float

    def times(self, factor: float) -> _Round:
        return _Round({name: ns * factor for name, ns in self.stages.items()}, self.up * factor, self.down * factor)

    def plus(self, other: _Round) -> _Round:
        stages = {name: ns + other.stages[name] for name, ns in self.stages.items()}
        return _Round(stages, self.up + other.up, self.down + other.down)


def _alone(edge: DecodingProfile, workload: Workload, power: GivenPower | None) -> GenerationCandidate:
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
    power: GivenPower | None,
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


def _state(parts: Sequence[DecoderPart], workload: Workload) -> float:
    return sum(part.state_bytes.at(workload.last) for part in parts)


def _memory(parts: Sequence[DecoderPart], workload: Workload) -> Reading:
    total = sum(part.weights_bytes for part in parts) + _state(parts, workload)
    return Reading.estimated(float(total), "weights that are used here, and what is kept at the end of the reply")


def _energy(what: _Round, power: GivenPower | None) -> Reading:
    if power is None:
        return Reading.unavailable("steps are too short for a meter")
    work = what.stages["edge"]
    joules = (power.active * work + power.idle * (sum(what.stages.values()) - work)) / 1e9
    return Reading.estimated(joules, f"given: {power.active:g} W while it computes, {power.idle:g} W while it waits")


# The best cut for a generation: by the time of a token, the first token, or the whole reply, under constraints.


def decide_generation(
    candidates: Sequence[GenerationCandidate],
    goal: str = "token",
    objective: Objective | None = None,
    constraints: Constraints | None = None,
) -> Decision:
    """As `decide`, for the candidates' ``goal`` (a name in `GOALS`). Raises SpecError for another word, for unknown
    numbers, and if no candidate is allowed.
    """
    check_goal(goal)
    return decide([one.of(goal) for one in candidates], objective, constraints)


# Derived from a few real steps at two cuts: the time of the blocks on either side in split steps, and the rest of
# what crosses.
#
# The earlier cut leaves all but the first block to the server, the later one none. The difference of the server's
# times is that of the blocks between, divided as their times on the edge alone are; the remainder is the code after
# the blocks, with the session's overhead of a step. On the edge it is the other way round. A processor that waits for
# the network between two steps is slower than one that continues, so this is not its time alone.


NOTE = "from steps at two cuts; blocks share the server's time as they do the edge's"


@dataclass(frozen=True)
class StepSample:
    """One forward of a split generation after block number ``cut``. ``tokens``: of the prompt, or before the step.
    Times in ns: on the edge, including generate()'s own work, from sending to the answer, and of the server.
    """

    cut: int
    prompt: bool
    tokens: int
    edge_ns: float
    wait_ns: float
    server_ns: float
    bytes_up: int
    bytes_down: int


def cloud_profile(edge: DecodingProfile, samples: Sequence[StepSample], machine: dict[str, Any]) -> DecodingProfile:
    """Return the server's profile. ``samples``: at the first and the last cut, for the same numbers of tokens.

    Raises ValueError if one of these is missing.
    """
    last = len(edge.blocks) - 1
    steps = _Ends.of([one for one in samples if not one.prompt], lambda one: one.server_ns, first=last, second=0)
    prompts = _Ends.of([one for one in samples if one.prompt], lambda one: one.server_ns, first=last, second=0)
    return replace(
        edge,
        side="cloud",
        machine=machine,
        before=DecoderPart(edge.before.name, LineFit(), LineFit()),
        blocks=_shared(edge, steps.more, prompts.more, samples),
        after=replace(edge.after, step=steps.least, prefill=prompts.least),
        note=NOTE,
    )


def head_profile(edge: DecodingProfile, samples: Sequence[StepSample]) -> DecodingProfile:
    """Return the edge's profile in split steps. Raises as `cloud_profile` does."""
    last = len(edge.blocks) - 1
    steps = _Ends.of([one for one in samples if not one.prompt], lambda one: one.edge_ns, first=0, second=last)
    prompts = _Ends.of([one for one in samples if one.prompt], lambda one: one.edge_ns, first=0, second=last)
    blocks = _shared(edge, steps.more, prompts.more, samples)
    # the least contains the first block; `before` is the remainder
    before = replace(edge.before, step=steps.least - blocks[0].step, prefill=prompts.least - blocks[0].prefill)
    return replace(edge, before=before, blocks=blocks, note=NOTE)


def overhead_of(
    edge: DecodingProfile,
    samples: Sequence[StepSample],
    link: Link | None,
    answer_bytes: Callable[[int], float],
) -> Overhead:
    """Medians of measured less predicted times. ``link``: as probed where the steps ran; None: without the network.
    ``answer_bytes``: of the logits of so many tokens, as they came back.
    """
    steps, prompts = ([one for one in samples if one.prompt is kind] for kind in (False, True))
    network = 0.0
    if link is not None and steps:
        network = statistics.median(
            one.wait_ns - one.server_ns - link.network_ns(one.bytes_up, one.bytes_down) for one in steps
        )
    return Overhead(
        network_ns=network,
        step_up=_rest(steps, lambda one: one.bytes_up - edge.blocks[one.cut].hidden_bytes),
        prefill_up=_rest(prompts, lambda one: one.bytes_up - one.tokens * edge.blocks[one.cut].hidden_bytes),
        step_down=_rest(steps, lambda one: one.bytes_down - answer_bytes(1)),
        prefill_down=_rest(prompts, lambda one: one.bytes_down - answer_bytes(1)),
    )


@dataclass(frozen=True)
class _Ends:
    """One side's time by tokens: at the cut where that is least, and how much more at the other."""

    least: LineFit
    more: LineFit

    @classmethod
    def of(
        cls, samples: Sequence[StepSample], value: Callable[[StepSample], float], *, first: int, second: int
    ) -> _Ends:
        found: dict[tuple[int, int], list[float]] = {}
        for one in samples:
            found.setdefault((one.cut, one.tokens), []).append(value(one))
        middle = {key: statistics.median(times) for key, times in found.items()}
        both = sorted(tokens for cut, tokens in middle if cut == first and (second, tokens) in middle)
        if not both:
            raise ValueError("no steps at both cuts")
        more = [(tokens, max(0.0, middle[second, tokens] - middle[first, tokens])) for tokens in both]
        return cls(LineFit.fit([(tokens, middle[first, tokens]) for tokens in both]), LineFit.fit(more))


def _shared(
    edge: DecodingProfile, steps: LineFit, prompts: LineFit, samples: Sequence[StepSample]
) -> tuple[DecoderPart, ...]:
    """Return each block's part of the time of all blocks but the first, scaled for the first."""
    at = statistics.median(one.tokens for one in samples)
    of_steps, of_prompts = _shares(edge, lambda part: part.step.at(at)), _shares(edge, lambda part: part.prefill.at(at))
    return tuple(
        replace(block, step=steps.times(of_steps[number]), prefill=prompts.times(of_prompts[number]))
        for number, block in enumerate(edge.blocks)
    )


def _shares(edge: DecodingProfile, cost: Callable[[DecoderPart], float]) -> list[float]:
    """Return each block's share; those of all but the first add up to 1."""
    costs = [cost(block) for block in edge.blocks]
    total = sum(costs[1:])
    return [one / total if total else 1 / max(1, len(costs) - 1) for one in costs]


def _rest(samples: Sequence[StepSample], beside: Callable[[StepSample], float]) -> LineFit:
    return LineFit.fit([(one.tokens, max(0.0, beside(one))) for one in samples]) if samples else LineFit()


KEY: Final = "measured"
"""Its key in a plan's JSON."""
_LINES: Final = ("step_up", "prefill_up", "step_down", "prefill_down")


@short
@dataclass(frozen=True)
class MeasuredGeneration:
    """Both sides' profiles, the link, and the overhead of real steps."""

    edge: DecodingProfile
    """Running alone."""
    head: DecodingProfile
    """In split steps."""
    cloud: DecodingProfile
    link: Link
    overhead: Overhead = field(default_factory=Overhead)
    load: Load = field(default_factory=Load)

    def candidates(
        self,
        workload: Workload,
        link: Link | None = None,
        edge_factor: float = 1.0,
        server_factor: float = 1.0,
        *,
        power: GivenPower | None = None,
    ) -> list[GenerationCandidate]:
        """Return the predictions for it (`predict_generation`), possibly on another ``link``, or with either side's
        times multiplied.
        """
        return predict_generation(
            self.edge,
            self.cloud,
            self.link if link is None else link,
            workload,
            head=self.head,
            overhead=self.overhead,
            load=self.load,
            power=power,
            edge_factor=edge_factor,
            server_factor=server_factor,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "edge": decoding.to_json(self.edge),
            "head": decoding.to_json(self.head),
            "cloud": decoding.to_json(self.cloud),
            "link": self.link.as_dict(),
            "overhead": self.overhead.as_dict(),
            "load": {"pending": self.load.pending, "workers": self.load.workers, "queue_ns": self.load.queue_ns},
        }


def read_measured(path: str | Path) -> MeasuredGeneration:
    """Read a plan's JSON. Raises SpecError that names the place."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    top = Fields(data, str(path)).inner(KEY)
    link, overhead, load = top.inner("link"), top.inner("overhead"), top.inner("load")
    lines = [overhead.inner(f"{name}_bytes") for name in _LINES]
    return MeasuredGeneration(
        decoding.from_json(top.need("edge"), f"{top.place}.edge"),
        decoding.from_json(top.need("head"), f"{top.place}.head"),
        decoding.from_json(top.need("cloud"), f"{top.place}.cloud"),
        Link(_curve(link, "up_points"), _curve(link, "down_points"), f"{link.text('source')}, kept in a file"),
        Overhead(
            overhead.number("network_ns", decoding.LEAST),
            *(LineFit(one.number("fixed"), one.number("per_token")) for one in lines),
        ),
        Load(load.whole("pending"), load.whole("workers"), load.number("queue_ns")),
    )


def _curve(fields: Fields, key: str) -> Curve:
    try:
        return Curve(tuple((int(size), float(ns)) for size, ns in fields.of(key, list, "a list of [bytes, ns]")))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{fields.place}.{key}: {error}") from error
