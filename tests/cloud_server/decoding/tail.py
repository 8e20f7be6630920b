"""A decoding tail that adds up what it was sent: each answer depends on every step before it, and on nothing else."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

from shared_hooks import WrappedModel
from shared_hooks.errors import InputMismatch, UnknownLayer
from tests.waiting import PATIENCE

CUT = "second"


class Adding:
    """``(WrappedModel, cut) -> DecodingTail``. What the header of a step says beside is done: see `Sum.step`."""

    def __init__(self, wrapped: WrappedModel, cut: str) -> None:
        if cut != CUT:
            raise UnknownLayer(f'no layer "{cut}"')
        self.wrapped = wrapped

    def open(self) -> Sum:
        return Sum(self.wrapped, [], torch.zeros(1, dtype=torch.float64))


class Gate:
    """Where a step waits whose header says ``wait``, having said that it is there. Of all tails of this process."""

    entered, opened = threading.Event(), threading.Event()


class Sum:
    def __init__(self, wrapped: WrappedModel, rows: list[torch.Tensor], total: torch.Tensor) -> None:
        self.wrapped, self.rows, self.total = wrapped, rows, total
        self.nbytes = sum(row.nbytes for row in rows)

    def step(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        if header.get("need"):
            return {"need": "more"}, []
        if header.get("wait"):
            Gate.entered.set()
            assert Gate.opened.wait(PATIENCE)
        if "nap" in header:
            time.sleep(header["nap"])
        while header.get("spin"):
            pass
        if header.get("fail") == "refuse":
            raise InputMismatch("refused, as it was asked to")
        if header.get("fail") == "raise":
            raise ValueError("raised, as it was asked to")
        if header.get("fail") == "exit":
            raise SystemExit(3)
        if header.get("fail") == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if header.get("spoil"):
            next(self.wrapped.model.parameters()).data = torch.zeros(8, 8)
        self.rows += tensors
        self.nbytes += sum(tensor.nbytes for tensor in tensors)
        self.total = sum((tensor.double().sum() for tensor in tensors), self.total)
        return {"rows": len(self.rows), "pid": os.getpid()}, [self.total, *(tensors if header.get("echo") else [])]

    def fork(self) -> Sum:
        return Sum(self.wrapped, list(self.rows), self.total)
