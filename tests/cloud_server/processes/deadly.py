"""A model whose tail does what the first number of its input says; its layers write in place."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import nn

EXIT, SEGV, KILL, SLEEP, SYSTEM_EXIT, RAISE, KEEP, STOP = range(21, 29)
WORDS = ("--threads=1", "--device=cpu", f"--model=deadly={__name__}:Deadly", "--example=2,8")
NAP_SECONDS = 600.0


class Mood(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def forward(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        match int(x.flatten()[0]):
            case 21:
                os._exit(3)
            case 22:
                os.kill(os.getpid(), signal.SIGSEGV)
            case 23:
                os.kill(os.getpid(), signal.SIGKILL)
            case 24:
                time.sleep(NAP_SECONDS)
            case 25:
                raise SystemExit(4)
            case 26:
                raise ValueError("twenty-six")
        return hidden


class Deadly(nn.Module):
    """(n, 8) -> (n, 3) and (n, 8)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act, self.mood, self.last = nn.ReLU(inplace=True), Mood(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.act(self.second(self.act(self.first(x))))
        return {"logits": self.last(self.mood(hidden, x)), "hidden": hidden}
