"""Planning and verifying run the model for themselves: on copies of the inputs, and with its buffers put back."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import nn

from shared_hooks.tensors.trees import classes_of, flatten, unflatten
from shared_hooks.tensors.views import View

ALIGN: Final = 64


def copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model's inputs with every tensor copied."""
    structure, tensors = flatten((args, kwargs))
    made: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(structure, fresh_copies(tensors), _find_local)
    return made


def _find_local(name: str) -> type | None:
    # inputs of our own caller: their classes are ours to use, whatever module they are from
    return classes_of({name.partition(":")[0]})(name)


def fresh_copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same shapes, strides and aliasing: tensors that share a storage share one afterwards, too.

    On the CPU they also begin at the same place within 64 bytes: kernels round by it (a row of a data set).
    """
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if _strided(tensor):
            view, key = View.of(tensor), tensor.untyped_storage()._cdata
            low, high = spans.get(key, (view.offset, view.end))
            spans[key] = (min(low, view.offset), max(high, view.end))
    copies: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for tensor in tensors:
            if not _strided(tensor):
                found.append(tensor.detach().clone())
                continue
            low, high = spans[tensor.untyped_storage()._cdata]
            key_of_copy = (tensor.untyped_storage()._cdata, tensor.dtype)
            if key_of_copy not in copies:
                copies[key_of_copy] = _aligned_alike(tensor.detach().as_strided((high - low,), (1,), low))
            whole = copies[key_of_copy]
            found.append(whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - low))
    return found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in row-major order, as one run of bytes on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # one element may have any stride, and counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format).as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def _aligned_alike(run: torch.Tensor) -> torch.Tensor:
    """A copy of a gapless run that begins at the same place within 64 bytes."""
    wanted, nbytes = run.data_ptr() % ALIGN, run.numel() * run.element_size()
    if run.device.type != "cpu" or not wanted or wanted % run.element_size() or not nbytes:
        return run.clone()
    room = np.empty(nbytes + ALIGN, dtype=np.uint8)
    skip = (wanted - room.ctypes.data) % ALIGN
    # a storage of its own that begins there, and no offset into one
    return torch.from_numpy(room[skip : skip + nbytes]).view(run.dtype).copy_(run)


def _strided(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided and not tensor.is_nested and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    )


class Buffers:
    """The buffers of a model as they are now, so that trial runs leave no trace in them (batch statistics,
    counters).
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        """Write back what was changed in place; what was replaced by another tensor stays."""
        with torch.no_grad():
            for buffer, before in self._kept:
                # batch normalisation writes without raising the version counter, so the values are compared
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
