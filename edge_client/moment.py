"""What a forward may change, as it is at one moment: random generators, buffers, the Python state of the modules.

Written back only where it differs: other threads run the same model, and one without state is not touched.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from shared_hooks.attach import COMPILED, Shim
from shared_hooks.python_state import is_custom, plain_tensors

OWN: Final = frozenset(vars(nn.Module())) | {COMPILED}
HOLDERS: Final = (list, dict, set, deque, tuple, OrderedDict, defaultdict)
DEEPEST: Final = 4


class Moment:
    """Taken when it is made. Parameters are not kept, and of Python's objects only what modules hold in attributes, and
    in lists, dictionaries, sets and deques there.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._generators = self._draws()
        modules = list(model.modules())
        self._attributes = [(vars(module), _attributes(module)) for module in modules if is_custom(module)]
        self._attributes += [(module._buffers, dict(module._buffers)) for module in modules if module._buffers]
        self._holders = [
            (holder, holder.copy()) for _, kept in self._attributes for value in kept.values() for holder in _in(value)
        ]
        tensors = {id(tensor): tensor for tensor in (*model.buffers(), *plain_tensors(model))}
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values() if _writable(tensor)]

    def restore(self) -> None:
        """As it was."""
        for owner, before in self._attributes:
            for name in [name for name in owner if name not in before and not _ours(name, owner[name])]:
                del owner[name]
            owner.update({name: value for name, value in before.items() if owner.get(name, OWN) is not value})
        for holder, before in self._holders:
            if not _holds(holder, before):
                holder.clear()
                holder.extend(before) if isinstance(holder, (list, deque)) else holder.update(before)
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


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not _ours(name, value)}


def _ours(name: str, value: Any) -> bool:
    """Torch's, or what `shared_hooks.attach` puts there."""
    return name in OWN or isinstance(value, Shim)


def _in(value: Any, depth: int = DEEPEST) -> Iterator[Any]:
    """Every holder in a value that can be changed."""
    if not depth or type(value) not in HOLDERS:
        return
    if type(value) is not tuple:
        yield value
    for item in list(value.values() if isinstance(value, dict) else value):
        yield from _in(item, depth - 1)


def _holds(holder: Any, before: Any) -> bool:
    """Whether it holds the same objects, in the same order."""
    if isinstance(holder, set):
        return bool(holder == before)
    if isinstance(holder, dict):
        return list(map(id, holder)) == list(map(id, before)) and _holds([*holder.values()], [*before.values()])
    return len(holder) == len(before) and all(a is b for a, b in zip(holder, before, strict=True))


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
