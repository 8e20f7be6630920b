"""Threads that run one model at once: at will where its Python writes no state, else one after the other.

What code keeps in an attribute from one line to the next would be another thread's by then: a wrong answer, made of
somebody else's data.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from shared_hooks.purity.modules import pure_modules


class Turns:
    """Of one model. Looked at when it first runs: by then it is as it stays."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._lock = threading.RLock()
        self._turn: AbstractContextManager[Any] | None = None

    def one(self) -> AbstractContextManager[Any]:
        """A turn; nests in one thread."""
        if self._turn is None:
            modules = set(self._model.modules())
            self._turn = nullcontext() if pure_modules(modules) == modules else self._lock
        return self._turn
