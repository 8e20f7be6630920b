"""Which tests a run takes: of functions with many cases a share, another one each day, so that all are run in turns.

``ISTHMUS_TURN``: which share, 0 to `TURNS` - 1; absent: all. ``make test`` sets it, a plain ``pytest`` does not.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Final

import pytest

TURNS: Final = 4
FEW: Final = 12
"""Functions of at most so many cases run them all."""


def turn() -> int | None:
    """The share that this run takes; None: all. Raises `pytest.UsageError`."""
    text = os.environ.get("ISTHMUS_TURN", "")
    if not text:
        return None
    if not text.isdecimal() or int(text) >= TURNS:
        raise pytest.UsageError(f"ISTHMUS_TURN={text}: must be 0 to {TURNS - 1}, or absent for all cases")
    return int(text)


def of_turn(names: Sequence[str], turn: int) -> set[str]:
    """Those of the tests that are run; ``names``: node ids, ``file::function[case]``."""
    cases: dict[str, list[str]] = collections.defaultdict(list)
    for name in names:
        cases[name.partition("[")[0]].append(name)
    kept: set[str] = set()
    for every in cases.values():
        kept.update(every if len(every) <= FEW else every[turn::TURNS])
    return kept
