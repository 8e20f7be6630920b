"""The generators of random numbers that a forward draws from without being handed one: Python's, NumPy's, torch's."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch

Interval = tuple[int, int]


def _python_and_numpy() -> dict[str, Any]:
    """States of the generators that torch does not know, comparable."""
    states: dict[str, Any] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, key, *rest = numpy.get_state()
        states["numpy"] = (kind, key.tobytes(), *rest)
    return states


class Dice:
    """All of them as they are now, to be put back: runs for planning's sake are nobody's draws."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy = None if numpy is None else numpy.get_state()
        self._comparable = _python_and_numpy()

    @property
    def rolled(self) -> bool:
        """Whether any of them stands elsewhere now."""
        others = _python_and_numpy()
        return not torch.equal(self._torch, torch.get_rng_state()) or any(
            others[name] != state for name, state in self._comparable.items()
        )

    @property
    def others(self) -> list[str]:
        """Those of them that stand elsewhere now and are not torch's: "python", "numpy"."""
        now = _python_and_numpy()
        return [name for name, state in self._comparable.items() if now[name] != state]

    def restore(self) -> None:
        """As they were."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            importlib.import_module("numpy.random").set_state(self._numpy)


class DiceWatch:
    """Between which looks Python's and NumPy's generators were used."""

    def __init__(self) -> None:
        self.drawn: dict[str, list[Interval]] = {}
        self._before = _python_and_numpy()
        self._seq = 0

    def look(self, seq: int) -> None:
        """Compare with the last look."""
        now = _python_and_numpy()
        for name, state in now.items():
            if state != self._before.get(name, state):
                self.drawn.setdefault(name, []).append((self._seq, seq))
        self._before, self._seq = now, seq
