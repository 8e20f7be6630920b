"""What a few real steps at two cuts tell: what the blocks take on either side in split steps, and what else crosses.

The earlier cut leaves all but the first block to the server, the later one none. What the server takes less at the
later one is that of the blocks between, shared out as they share their time on the edge alone; the rest is what comes
after the blocks, with all that a session does with a step. On the edge it is the other way round. A processor that
waits for the network between two steps is slower than one that continues, so this is not what it takes alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge_client.planning.generation.overhead import Overhead
from edge_client.planning.link import Link
from shared_hooks.profiling.decoding.line import Line
from shared_hooks.profiling.decoding.profile import DecodingProfile, Part

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
