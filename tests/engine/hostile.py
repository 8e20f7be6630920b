"""A sample of good bytes, and the check that bad ones are refused cheaply."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import BadFrame, IsthmusError
from tests.engine.cutting import case_of

FRONT = 32  # magic 8, recipe size 4, header size 4, payload size 8, checksum 8
ALIGN = 64  # the payload starts at a multiple of it, after zeros


def sample(name: str = "branch_on_item", cut: int | str = 1) -> EarlyOutput:
    case = case_of(name)
    args, kwargs = case.inputs()
    early = WrappedModel(case.build()).forward(*args, end=cut, **kwargs)
    assert isinstance(early, EarlyOutput)
    return early


EARLY = sample()
DATA = EARLY.to_bytes()


def refused(data: bytes, error: type[IsthmusError] = BadFrame, limit: int = 1 << 20, room: int = 1 << 20) -> None:
    """``data`` must be refused with ``error``, without allocating more than ``room`` bytes beyond its own size."""

    class Allocated(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and func._schema.name.startswith("aten::empty"):
                self.total += out.untyped_storage().nbytes()
            return out

    tracemalloc.start()
    try:
        with Allocated() as allocated, pytest.raises(error):
            EarlyOutput.from_bytes(data, max_bytes=limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # parsing JSON that did arrive costs up to some 20 times its size; what is only announced costs nothing
    assert peak < room + 20 * len(data), f"{peak} bytes were allocated"
    assert allocated.total <= room
