"""The measurements for planning a generation, made through a client: this side, a few split steps, the link."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from edge_client.core import ClientCore
from edge_client.generation.link import SessionLink
from edge_client.generation.summary import Clock, criteria_with
from edge_client.planning.generation import (
    MeasuredGeneration,
    StepSample,
    Workload,
    cloud_profile,
    decide_generation,
    head_profile,
    overhead_of,
)
from edge_client.planning.objective import Constraints, Objective
from edge_client.probing import probe
from edge_client.screen import counted, progress
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.generation import EdgeLink, SplitForward
from shared_hooks.profiling.decoding import (
    LEAST_ROUNDS,
    LENGTHS,
    NEW_TOKENS,
    DecodingMeasurement,
    DecodingProfile,
    generated,
)

# A few real steps of a split generation, at the first and at the last cut: the server's time, and what crosses.

QUEUED: Final = "queue"
"""The server's duration that is waiting, not work."""


class StepSampler:
    """Split replies to the same prompts as ``measurement``, cut after the first and the last block alternately.

    ``link_at``: returns the link to the server's half at a cut; ``answer``: as in `SplitForward`. Raises CutRefused for
    a model with one block, and the errors of steps.
    """

    def __init__(
        self,
        model: nn.Module,
        measurement: DecodingMeasurement,
        link_at: Callable[[str], EdgeLink],
        answer: tuple[str, int] | None = None,
    ) -> None:
        names = measurement.blocks
        self._model = model
        self._measurement = measurement
        if len(names) < 2:
            raise CutRefused(f"the model has one block, {names[0]}: there is no choice of a cut")
        self._ways = {
            at: SplitForward(model, names[at], link_at(names[at]), answer=answer) for at in (0, len(names) - 1)
        }
        self.samples: list[StepSample] = []
        self._round(measurement.lengths[:1])

    def round(self) -> None:
        """One reply to a prompt of each length at each cut."""
        self.samples += self._round(self._measurement.lengths)

    def _round(self, lengths: Sequence[int]) -> list[StepSample]:
        return [
            sample
            for tokens in lengths
            for at, split in self._ways.items()
            for sample in self._reply(split, at, self._measurement.prompt(tokens), tokens)
        ]

    def _reply(self, split: SplitForward, at: int, inputs: dict[str, torch.Tensor], tokens: int) -> list[StepSample]:
        """Return the samples of one reply; steps count as having their middle one's tokens."""
        split.records.clear()
        with split:
            ends = token_times(self._model, inputs, NEW_TOKENS)
        return [
            StepSample(
                at,
                number == 0,
                tokens if number == 0 else tokens + NEW_TOKENS // 2,
                (after - before) - record.wait_ns,
                record.wait_ns,
                sum(ns for name, ns in record.server.items() if name != QUEUED),
                record.bytes_up,
                record.bytes_down,
            )
            for number, (before, after, record) in enumerate(zip(ends, ends[1:], split.records, strict=False))
        ]


def token_times(model: nn.Module, inputs: dict[str, torch.Tensor], tokens: int) -> list[int]:
    """Clock readings (ns) before generate() and after each token. No hook is added to the model, which a split one
    would detect.
    """
    ends = _Ends()
    generated(model, inputs, tokens, stopping_criteria=criteria_with(ends, None))
    return [ends.began, *ends.ends]


class _Ends(Clock):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        self.ends.append(time.perf_counter_ns())
        return super().__call__(input_ids, scores, **more)


def survey_decoding(
    measurement: DecodingMeasurement,
    sampler: StepSampler | None,
    seconds: float,
    on_progress: Callable[[str, float], None] | None = None,
    *,
    least: int = LEAST_ROUNDS,
) -> tuple[DecodingProfile, Sequence[StepSample]]:
    """Return this side's profile, and samples of steps, measured alternately for ``seconds`` and at least ``least``
    rounds, so that a machine that slows down does so for both. ``on_progress`` is called with what comes next and the
    remaining seconds.
    """
    began, rounds = time.monotonic(), 0
    while rounds < least or time.monotonic() - began < seconds:
        if on_progress:
            on_progress(f"round {rounds + 1}", max(0.0, seconds - (time.monotonic() - began)))
        measurement.round()
        if sampler is not None:
            sampler.round()
        rounds += 1
    return measurement.result(), sampler.samples if sampler else []


PROBE_SECONDS: Final = 2.0
QUICK_SECONDS: Final = 3.0
QUICK_LENGTHS: Final = (16,)
"""Prompt lengths besides the workload's, if a cut is chosen without showing the plan."""


def gather_generation(
    client: ClientCore,
    workload: Workload,
    *,
    model: Any = None,
    seconds: float = 20.0,
    lengths: Sequence[int] = LENGTHS,
    least: int = LEAST_ROUNDS,
    show: bool = False,
) -> MeasuredGeneration:
    """Measure ``client``'s model and server for about ``seconds``: replies here and split after the first and last
    block, alternately, at least ``least`` rounds, to random prompts of these ``lengths`` and the workload's.

    ``model``: with the same weights, instead of the client's. Raises SpecError, CutRefused (a model without blocks or
    one that cannot be split), and the errors of requests.
    """
    if client.server is None:
        raise SpecError("a plan of a generation is measured with a server, and this client has none")
    own = client.wrapped.model if model is None else model
    measurement = DecodingMeasurement(own, client.model_id, "edge", lengths=sorted({*lengths, workload.prompt_tokens}))
    answer = workload.answer if workload.answer is not None and len(workload.answer) == 2 else None
    with progress("decoding", None, show) as advance:
        sampler = StepSampler(own, measurement, partial(SessionLink, client), answer)
        edge, samples = survey_decoding(
            measurement, sampler, seconds, lambda what, left: advance(what, left=left), least=least
        )
    hidden = edge.blocks[0].hidden_bytes
    logits = round(workload.answer_bytes(1, edge.words, edge.word_bytes))
    with progress("probing the link", None, show) as advance:
        link, load = probe(
            client.server,
            sorted({0, hidden, hidden * edge.lengths[0], hidden * edge.lengths[-1], 64 << 10}),
            (0, logits, 4 * logits),
            PROBE_SECONDS,
            counted(advance),
            credentials=client.connection.credentials,
        )
    overhead = overhead_of(
        edge, samples, link, lambda tokens: Workload(answer=answer).answer_bytes(tokens, edge.words, edge.word_bytes)
    )
    cloud = cloud_profile(edge, samples, {"name": client.server})
    return MeasuredGeneration(edge, head_profile(edge, samples), cloud, link, overhead, load)


def best_generation_cut(
    client: ClientCore,
    workload: Workload | None = None,
    *,
    model: Any = None,
    goal: str = "token",
    objective: Objective | None = None,
    constraints: Constraints | None = None,
    seconds: float = QUICK_SECONDS,
) -> str:
    """Return the block after which ``client``'s model is best cut for a generation, even if everything here would be
    faster.

    It is measured for ``seconds`` and at least one round (54 tokens, two thirds of them split). Raises as
    `gather_generation` does, SpecError if constraints leave no candidate and CutRefused if they leave no cut.
    """
    workload = workload or Workload()
    measured = gather_generation(client, workload, model=model, seconds=seconds, lengths=QUICK_LENGTHS, least=1)
    found = measured.candidates(workload)
    best = decide_generation(found, goal, objective, constraints).best_cut
    if best is None:
        raise CutRefused("no cut is allowed: only the whole model here satisfies the constraints")
    return best.name
