"""Ended at any line of the model's run, a request leaves nothing half done: the next one is answered rightly."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cloud_server.scheduling.scheduler import Overtime
from shared_hooks.crossing import generators
from shared_hooks.modules.attach import running
from studies.attacks.bulk import Target
from studies.attacks.corpus import KEEPER, READER, Recording, record

WATCH = ("watchdog.py", "threading.py", "contextlib.py")


def _at_a_lock(frame: FrameType) -> bool:
    """Whether this line takes or releases a lock: between a block's last line and the release, which has the line of
    the ``with``, nothing comes in earnest.
    """
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return text.startswith("with ") and "lock" in text


@contextmanager
def ended_at(target: Target, number: int) -> Iterator[list[str]]:
    """`Overtime` comes at the ``number``-th line that runs where it may come; the place is reported."""
    left, places = number, list[str]()
    thread, until = threading.get_ident(), target.core._executor._watchdog._until

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        swallows = frame.f_code.co_name in ("__del__", "_free_weak_ref") or frame.f_code.co_filename.endswith(
            "_dynamo/utils.py"
        )
        if swallows or frame.f_code.co_filename.endswith(("weakref.py", "_weakrefset.py")):
            return None  # Python swallows what is raised there; in earnest it is raised again
        if frame.f_code.co_filename.endswith(WATCH):
            return None
        if _at_a_lock(frame):
            return line
        if event == "line" and until.get(thread, float("inf")) != float("inf") and not places:
            left -= 1
            if left < 0:
                places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                raise Overtime
        return line

    sys.settrace(line)
    try:
        yield places
    finally:
        sys.settrace(None)
    if not places:
        places.append(str(left))


# a weak reference of torch's that is ended while it is made complains when it goes, and nobody can catch that
@pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <function StorageWeakRef:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("fresh", [False, True], ids=["tail", "rehearsal"])
@pytest.mark.parametrize("model", [KEEPER, READER])
def test_ended_anywhere(model: str, fresh: bool) -> None:
    recordings = [*record(model, 1, 3)]
    target = Target((model,))
    try:
        recording = recordings[-1]
        assert target.honest(recording, 1) == ""
        lines = _lines(target, recording, fresh=fresh)
        state = generators.now(generators.ALL)
        for turn in range(24):
            if fresh:
                _forget(target)
            with ended_at(target, turn * lines // 24) as places:
                wrong = target.honest(recording, 100 + turn)
            assert wrong == "" or "for more than" in wrong, (places, wrong)
            assert not _get_current_function_mode_stack() and not _get_current_dispatch_mode_stack(), places
            assert running.get() is None and not torch.is_autocast_enabled("cpu"), places
            assert all(map(torch.equal, state, generators.now(generators.ALL))), places
            assert target.honest(recording, 200 + turn) == "", places
    finally:
        target.core.close()


def test_ended_while_torch_has_a_mode_off_its_stack() -> None:
    """Nothing puts it back then: the run that is ended must not take off what is not there."""
    recording = [*record(READER, 1, 3)][-1]
    target = Target((READER,))
    thread, until = threading.get_ident(), target.core._executor._watchdog._until
    places: list[str] = []

    def line(frame: FrameType, event: str, _: Any) -> Any:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and text == "_push_mode(old)" and thread in until and not places:
            places.append(frame.f_code.co_name)
            raise Overtime
        return line

    try:
        assert target.honest(recording, 1) == ""
        sys.settrace(line)
        try:
            wrong = target.honest(recording, 2)
        finally:
            sys.settrace(None)
        assert places and "for more than" in wrong, wrong
        assert not _get_current_function_mode_stack() and not _get_current_dispatch_mode_stack()
        assert target.honest(recording, 3) == ""
    finally:
        target.core.close()


def _forget(target: Target) -> None:
    """All recipes; a worker may still be at one, for the next request."""
    recipes = target.engines[0]._wrapped.recipes
    with recipes._lock:
        recipes._kept.clear()


def _lines(target: Target, recording: Recording, *, fresh: bool) -> int:
    """How many lines run where a request may be ended."""
    if fresh:
        _forget(target)
    with ended_at(target, NEVER) as left:
        target.honest(recording, 99)
    return NEVER - int(left[-1])


NEVER = 1 << 40
