"""A decoding tail whose steps go through a layer of the model again and again, and stop where a test wants them to."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any, ClassVar

import torch

from shared_hooks import WrappedModel
from shared_hooks.errors import InputMismatch
from tests.waiting import PATIENCE


class Stop:
    """Where a step waits, having said that it is there."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE)

    def reached(self) -> None:
        assert self.entered.wait(PATIENCE)


stops: defaultdict[str, Stop] = defaultdict(Stop)
"""By a name of the test's choosing, for all tails of this process."""


class Layers:
    """``(WrappedModel, cut) -> DecodingTail``."""

    def __init__(self, wrapped: WrappedModel, cut: str) -> None:
        self.layer: Any = wrapped.model.last

    def open(self) -> Rows:
        return Rows(self.layer, [])


class Rows:
    """A session: ``times`` calls of the layer on what came. Its steps are counted, by name, as they go on."""

    done: ClassVar[defaultdict[str, int]] = defaultdict(int)
    """Calls of the layer that came back, by the step's ``name``."""

    def __init__(self, layer: Any, kept: list[torch.Tensor]) -> None:
        self.layer, self.kept = layer, kept
        self.nbytes = 0

    def step(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        (rows,) = tensors
        for number in range(header.get("times", 3)):
            if header.get("stop_at") == number:
                stops[header["stop"]]()
            if header.get("fail_at") == number:
                raise InputMismatch("refused, as it was asked to")
            if header.get("exit_at") == number:
                raise SystemExit(3)
            while header.get("spin_at") == number:
                pass
            rows = self.layer(rows)
            self.done[header.get("name", "")] += 1
        self.kept.append(rows)
        return {"steps": len(self.kept)}, [rows]

    def fork(self) -> Rows:
        return Rows(self.layer, list(self.kept))
