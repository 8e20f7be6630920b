"""What a forward may change, as it is at one moment: random generators, buffers, the Python state of the modules.

Written back only where it differs: other threads run the same model, and one without state is not touched.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from shared_hooks.state import PythonState


class Moment:
    """Taken when it is made. Parameters are not kept; of Python's objects what `PythonState` finds."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._generators = self._draws()
        self._state = PythonState(model)
        tensors = {id(tensor): tensor for tensor in (*model.buffers(), *self._state.tensors())}
        kept = [tensor for tensor in tensors.values() if not isinstance(tensor, nn.Parameter) and _writable(tensor)]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in kept]

    def restore(self) -> None:
        """As it was."""
        self._state.restore()
        with torch.no_grad():
            for tensor, values in self._tensors:
                # batch normalisation writes without raising the version counter, so the values are compared
                if not torch.equal(tensor, values):
                    tensor.copy_(values)
        self._put_generators_back()

    def _draws(self) -> list[Any]:
        on_gpu = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return [torch.get_rng_state(), on_gpu, random.getstate(), np.random.get_state(legacy=False)]  # noqa: NPY002 (models draw from it)

    def _put_generators_back(self) -> None:
        cpu, gpu, python, numpy = self._generators
        moved = [not _alike(before, now) for before, now in zip(self._generators, self._draws(), strict=True)]
        if moved[0]:
            torch.set_rng_state(cpu)
        if moved[1]:
            torch.cuda.set_rng_state(gpu, self._device)
        if moved[2]:
            random.setstate(python)
        if moved[3]:
            np.random.set_state(numpy)  # noqa: NPY002


def _writable(tensor: torch.Tensor) -> bool:
    """Whether a copy can be written back: no meta tensor, and no element that lies in two places."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return not any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return bool(a == b)
