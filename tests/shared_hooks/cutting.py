"""Head and tail in one process, through bytes: what most tests of the engine do.

``ISTHMUS_EVERY_CUT=1``: models of many layers are cut everywhere, too, and what else is sampled is done whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import CutRefused
from tests.covering import ALL
from tests.zoo import CASES, Call, Case

MAX_BYTES = 1 << 24
MANY_CUTS = 12


def case_of(name: str) -> Case:
    """The case of the zoo with this name."""
    return next(case for case in CASES if case.name == name)


def through_bytes(early: EarlyOutput) -> EarlyOutput:
    """What the other side gets."""
    return EarlyOutput.from_bytes(early.to_bytes(), max_bytes=MAX_BYTES)


def head(edge: WrappedModel, case: Case, cut: int | str, call: Call) -> EarlyOutput:
    """The edge's half, sent and received."""
    args, kwargs = call
    with case.setting():
        return through_bytes(edge.forward(*args, end=cut, **kwargs))


def tail(cloud: WrappedModel, case: Case, cut: int | str, early: EarlyOutput) -> Any:
    """The cloud's half."""
    with case.setting():
        return cloud.forward(early, start=cut)


def whole(wrapped: WrappedModel, case: Case, call: Call) -> Any:
    """The wrapped model without a cut, in the gradient mode of `Case.run` (kernels may depend on it)."""
    args, kwargs = call
    with torch.no_grad(), case.setting():
        return wrapped.forward(*args, **kwargs)


def planned(case: Case) -> WrappedModel:
    """A wrapped instance with a plan for the case's inputs."""
    wrapped = WrappedModel(case.build())
    args, kwargs = case.inputs()
    with case.setting():
        wrapped.plan(*args, **kwargs)
    return wrapped


def cuts_of(wrapped: WrappedModel) -> Iterator[int | str]:
    """ "input", then every layer, and every block that ends at a place of its own: those that can be cut after."""
    plan = wrapped._planner.latest
    with contextlib.suppress(CutRefused):
        plan.cutting("input")
        yield "input"
    blocks = [(plan.position(block.name), block.name) for block in plan.blocks if block.can_split]
    layers = [(plan.position(layer.layer_id), layer.layer_id) for layer in wrapped.layers if layer.can_split]
    yield from (cut for _, cut in sorted([*blocks, *layers], key=lambda pair: pair[0]))


def some_cuts_of(wrapped: WrappedModel, case: Case, most: int = MANY_CUTS) -> list[int | str]:
    """Return at most ``most`` cuts, evenly spread; the first one depends on the case."""
    cuts = list(cuts_of(wrapped))
    step = 1 if ALL or not cuts else -(-len(cuts) // most)
    return cuts[len(case.name) % step :: step]
