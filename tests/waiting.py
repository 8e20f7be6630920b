"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

PATIENCE: Final = 60.0
"""Seconds after which a test gives up: far more than anything takes on a busy machine."""


def eventually(claim: Callable[[], Any], says: str = "it did not come true", seconds: float = PATIENCE) -> None:
    """Return as soon as ``claim`` is true; AssertionError with ``says`` where it is not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, says
        time.sleep(0.005)
