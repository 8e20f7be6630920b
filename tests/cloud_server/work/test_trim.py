"""Freed memory is given back after much was let go."""

from __future__ import annotations

from cloud_server.work.trim import STEP_BYTES, Trim


def test_only_after_much_was_let_go() -> None:
    trim = Trim()
    calls: list[int] = []
    trim._trim = calls.append
    let_go = (0, STEP_BYTES // 2, STEP_BYTES, STEP_BYTES, 3 * STEP_BYTES)
    assert [trim.look(nbytes) for nbytes in let_go] == [False, False, True, False, True]
    assert calls == [0, 0]
