"""Freed memory is given back after much was let go."""

from __future__ import annotations

from cloud_server.scheduling.scheduler import STEP_BYTES, Trim


def test_memory_is_trimmed_after_large_frees() -> None:
    trim = Trim()
    calls: list[int] = []
    trim._trim = calls.append
    held = (0, STEP_BYTES, STEP_BYTES // 2, 3 * STEP_BYTES, STEP_BYTES, STEP_BYTES, 0)
    assert [trim.look(nbytes) for nbytes in held] == [False, False, False, False, True, False, True]
    assert calls == [0, 0]
