"""What crosses a cut and is final before it: nothing writes there any more, so it may leave while the head runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from shared_hooks.planning.cutting import Capture, Cutting
from shared_hooks.recording import Op, Trace

Call = tuple[str, int]
"""Path of a module, and the number of its call."""


def finals(trace: Trace, cutting: Cutting) -> Mapping[Call | None, tuple[int, ...]]:
    """By the call after which they are final, slots that are before the cut's own; None: inputs that stay as they are.

    It is what the plan has seen: a run that does otherwise has to be found out by who relies on it.
    """
    number_of = {storage: slot for slot, storage in enumerate(cutting.storages)}
    last = {slot: _captured(trace, capture) for slot, capture in enumerate(cutting.captures)}
    for event in trace.events:
        if event.seq < cutting.position:
            for storage in (*event.writes, *(storage for storage, _ in event.overwrites)):
                if (slot := number_of.get(storage)) is not None:
                    last[slot] = max(last[slot], event.seq)
    calls = sorted((call.exit, call.path, call.number) for call in trace.calls if call.exit < cutting.position)
    found: dict[Call | None, tuple[int, ...]] = {}
    for slot, capture in enumerate(cutting.captures):
        if capture.kind == "nothing":
            continue
        key: Call | None = None
        if last[slot] >= 0:
            at = bisect_left(calls, last[slot], key=lambda call: call[0])
            if at == len(calls):
                continue
            key = calls[at][1:]
        found[key] = (*found.get(key, ()), slot)
    return found


def _captured(trace: Trace, capture: Capture) -> int:
    """The seq at which a head has it."""
    if capture.kind == "result":
        return next(call.exit for call in trace.calls if (call.path, call.number) == capture.where)
    if capture.kind == "op":
        op: Op = trace.ops[capture.where]
        return op.end
    if capture.kind == "kernel":
        kernel: Op = trace.unseen[capture.where[1]]
        return kernel.end
    return -1
