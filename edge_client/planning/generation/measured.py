"""All that was measured for a plan of a generation: kept as JSON, it answers for other links, lengths and drafts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from edge_client.call import Load
from edge_client.planning.generation.predict import GenerationCandidate, Overhead, Workload, predict_generation
from edge_client.planning.link import Curve, Link
from edge_client.planning.predict import Power
from shared_hooks.errors import SpecError
from shared_hooks.profiling.decoding import profile
from shared_hooks.profiling.decoding.profile import DecodingProfile, Line, Part
from shared_hooks.profiling.profile import Fields
from shared_hooks.showing import short

# What a few real steps at two cuts tell: what the blocks take on either side in split steps, and what else crosses.
#
# The earlier cut leaves all but the first block to the server, the later one none. What the server takes less at the
# later one is that of the blocks between, shared out as they share their time on the edge alone; the rest is what
# comes after the blocks, with all that a session does with a step. On the edge it is the other way round. A processor
# that waits for the network between two steps is slower than one that continues, so this is not what it takes alone.


NOTE = "from steps at two cuts; blocks share the server's time as they do the edge's"


@dataclass(frozen=True)
class StepSample:
    """One forward of a split generation after block number ``cut``. ``tokens``: of the prompt, or before the step.
    Times in ns: on the edge with what generate() does around it, from sending to the answer, and of the server.
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
    """The server's. ``samples`` are of the first cut and the last, at the same numbers of tokens.

    Raises ValueError where one of these is missing.
    """
    last = len(edge.blocks) - 1
    steps = _Ends.of([one for one in samples if not one.prompt], lambda one: one.server_ns, first=last, second=0)
    prompts = _Ends.of([one for one in samples if one.prompt], lambda one: one.server_ns, first=last, second=0)
    return replace(
        edge,
        side="cloud",
        machine=machine,
        before=Part(edge.before.name, Line(), Line()),
        blocks=_shared(edge, steps.more, prompts.more, samples),
        after=replace(edge.after, step=steps.least, prefill=prompts.least),
        note=NOTE,
    )


def head_profile(edge: DecodingProfile, samples: Sequence[StepSample]) -> DecodingProfile:
    """The edge's in split steps. Raises as `cloud_profile` does."""
    last = len(edge.blocks) - 1
    steps = _Ends.of([one for one in samples if not one.prompt], lambda one: one.edge_ns, first=0, second=last)
    prompts = _Ends.of([one for one in samples if one.prompt], lambda one: one.edge_ns, first=0, second=last)
    blocks = _shared(edge, steps.more, prompts.more, samples)
    # the first block is in the least; before it is what is left of that
    before = replace(edge.before, step=steps.least - blocks[0].step, prefill=prompts.least - blocks[0].prefill)
    return replace(edge, before=before, blocks=blocks, note=NOTE)


def overhead_of(
    edge: DecodingProfile,
    samples: Sequence[StepSample],
    link: Link | None,
    answer_bytes: Callable[[int], float],
) -> Overhead:
    """Medians of measured less predicted. ``link``: as it was probed where the steps went; None: nothing is said of the
    network. ``answer_bytes``: of the logits of so many tokens, as they came back.
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
    """What one side takes, by tokens: at the cut where that is least, and how much more at the other."""

    least: Line
    more: Line

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
        return cls(Line.fit([(tokens, middle[first, tokens]) for tokens in both]), Line.fit(more))


def _shared(edge: DecodingProfile, steps: Line, prompts: Line, samples: Sequence[StepSample]) -> tuple[Part, ...]:
    """Each block's part of what all but the first take; as much of it as the first has, for the first."""
    at = statistics.median(one.tokens for one in samples)
    of_steps, of_prompts = _shares(edge, lambda part: part.step.at(at)), _shares(edge, lambda part: part.prefill.at(at))
    return tuple(
        replace(block, step=steps.times(of_steps[number]), prefill=prompts.times(of_prompts[number]))
        for number, block in enumerate(edge.blocks)
    )


def _shares(edge: DecodingProfile, cost: Callable[[Part], float]) -> list[float]:
    """Each block's share; those of all but the first add up to 1."""
    costs = [cost(block) for block in edge.blocks]
    total = sum(costs[1:])
    return [one / total if total else 1 / max(1, len(costs) - 1) for one in costs]


def _rest(samples: Sequence[StepSample], beside: Callable[[StepSample], float]) -> Line:
    return Line.fit([(one.tokens, max(0.0, beside(one))) for one in samples]) if samples else Line()


KEY: Final = "measured"
"""Its place in a plan's JSON."""
_LINES: Final = ("step_up", "prefill_up", "step_down", "prefill_down")


@short
@dataclass(frozen=True)
class Measured:
    """Both sides' profiles, the link, and what real steps took beside these."""

    edge: DecodingProfile
    """By itself."""
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
        power: Power | None = None,
    ) -> list[GenerationCandidate]:
        """What `predict_generation` makes of it; on another ``link``, or with either side's times multiplied."""
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
        """JSON-able."""
        return {
            "edge": profile.to_json(self.edge),
            "head": profile.to_json(self.head),
            "cloud": profile.to_json(self.cloud),
            "link": self.link.as_dict(),
            "overhead": self.overhead.as_dict(),
            "load": {"pending": self.load.pending, "workers": self.load.workers, "queue_ns": self.load.queue_ns},
        }


def read_measured(path: str | Path) -> Measured:
    """From a plan's JSON. Raises SpecError that names the place."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    top = Fields(data, str(path)).inner(KEY)
    link, overhead, load = top.inner("link"), top.inner("overhead"), top.inner("load")
    lines = [overhead.inner(f"{name}_bytes") for name in _LINES]
    return Measured(
        profile.from_json(top.need("edge"), f"{top.place}.edge"),
        profile.from_json(top.need("head"), f"{top.place}.head"),
        profile.from_json(top.need("cloud"), f"{top.place}.cloud"),
        Link(_curve(link, "up_points"), _curve(link, "down_points"), f"{link.text('source')}, kept in a file"),
        Overhead(
            overhead.number("network_ns", profile.LEAST),
            *(Line(one.number("fixed"), one.number("per_token")) for one in lines),
        ),
        Load(load.whole("pending"), load.whole("workers"), load.number("queue_ns")),
    )


def _curve(fields: Fields, key: str) -> Curve:
    try:
        return Curve(tuple((int(size), float(ns)) for size, ns in fields.of(key, list, "a list of [bytes, ns]")))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{fields.place}.{key}: {error}") from error
