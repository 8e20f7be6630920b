"""One run of generate(), and what each part of each of its forwards took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from shared_hooks.profiling.decoding.blocks import Named
from shared_hooks.profiling.decoding.prompts import Prompt, generated
from shared_hooks.profiling.profile import Side

Times = tuple[float, ...]
"""Nanoseconds before the blocks, of each block, and after them."""


class StepTimer:
    """Times the forwards of ``model`` by its blocks. A forward's time before the blocks begins on the edge where the
    one before it has ended: what generate() does between them runs there.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Named], side: Side) -> None:
        self._model = model
        self._blocks = blocks
        self._between = side == "edge"
        parameter = next(model.parameters(), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device
        self._began = 0
        self._marks: list[int] = []
        self._found: list[Times] = []

    def run(self, prompt: Prompt, tokens: int, new: int) -> list[Times]:
        """Of the prompt's forward, and of ``new - 1`` steps."""
        inputs = prompt(tokens)
        self._found = []
        with ExitStack() as hooks:
            hooks.callback(self._model.register_forward_pre_hook(self._begin).remove)
            for _, block in self._blocks:
                hooks.callback(block.register_forward_pre_hook(self._mark).remove)
            hooks.callback(self._blocks[-1][1].register_forward_hook(self._mark).remove)
            hooks.callback(self._model.register_forward_hook(self._end).remove)
            self._began = self._now()
            generated(self._model, inputs, new)
        return self._found

    def _now(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()

    def _begin(self, module: nn.Module, args: Any) -> None:
        now = self._now()
        self._marks = [self._began if self._between else now]

    def _mark(self, *args: Any) -> None:
        self._marks.append(self._now())

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._began = self._now()
        marks = [*self._marks, self._began]
        self._found.append(tuple(float(after - before) for before, after in pairwise(marks)))
