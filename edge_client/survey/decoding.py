"""A few real steps of a split generation, at the first and at the last cut: what the server takes, and what crosses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

from edge_client.generation.clock import Clock, criteria_with
from edge_client.planning.generation.fitting import StepSample
from shared_hooks.errors import CutRefused
from shared_hooks.generation import Link, SplitForward
from shared_hooks.profiling.decoding.measure import LEAST_ROUNDS, NEW_TOKENS, Measurement
from shared_hooks.profiling.decoding.profile import DecodingProfile
from shared_hooks.profiling.decoding.prompts import generated

QUEUED: Final = "queue"
"""Among a server's durations: waiting, which is no work."""


class StepSampler:
    """Split replies to the same prompts as ``measurement``, cut after the first and the last block in turns.
    ``link_at``: the way to the server's half at a cut; ``answer``: as of `SplitForward`.

    Raises CutRefused for a model of one block, and what steps raise.
    """

    def __init__(
        self,
        model: nn.Module,
        measurement: Measurement,
        link_at: Callable[[str], Link],
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
        self._round()

    def round(self) -> None:
        """One reply to a prompt of each length at each cut."""
        self.samples += self._round()

    def _round(self) -> list[StepSample]:
        return [
            sample
            for tokens in self._measurement.lengths
            for at, split in self._ways.items()
            for sample in self._reply(split, at, self._measurement.prompt(tokens), tokens)
        ]

    def _reply(self, split: SplitForward, at: int, inputs: dict[str, torch.Tensor], tokens: int) -> list[StepSample]:
        """Steps are counted at their middle one's tokens."""
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
    """Clock (ns) before generate() and after each token. No hook is put on the model: a split one would notice."""
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
    measurement: Measurement,
    sampler: StepSampler | None,
    seconds: float,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[DecodingProfile, Sequence[StepSample]]:
    """This side's profile, and samples of steps, measured in turns for ``seconds`` and three rounds at least: a machine
    that slows down does so for both.
    """
    began, rounds = time.monotonic(), 0
    while rounds < LEAST_ROUNDS or time.monotonic() - began < seconds:
        if on_progress:
            on_progress(f"round {rounds + 1}")
        measurement.round()
        if sampler is not None:
            sampler.round()
        rounds += 1
    return measurement.result(), sampler.samples if sampler else []
