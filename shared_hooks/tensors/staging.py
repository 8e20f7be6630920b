"""Copies between a CUDA device and this side's memory: pinned memory, separate streams, no waiting for others' work.

A copy between the device and ordinary memory passes through a small buffer of the driver's, piece by piece, in the
stream of the kernels. To and from pinned memory it is one transfer, on a separate stream, while kernels of other
requests run. Pinned memory is never returned to the system (torch keeps it for the next copy), so it is limited, and
beyond that ordinary memory is used. On other devices all of this is a plain copy, or none.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from shared_hooks import devices
from shared_hooks.tensors.trees import classes_of, flatten, is_namedtuple, unflatten
from shared_hooks.tensors.views import View

# Planning and verifying run the model for themselves: on copies of the inputs, and with its buffers restored.


ALIGN: Final = 64


def copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a model's inputs with every tensor copied."""
    structure, tensors = flatten((args, kwargs))
    made: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(structure, fresh_copies(tensors), own_class)
    return made


def own_class(name: str) -> type | None:
    """Return a class by its name in a structure, for inputs of this side's caller, whose classes may be used."""
    return classes_of({name.partition(":")[0]})(name)


def fresh_copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same shapes, strides and aliasing: tensors that share a storage also share one afterwards.

    On the CPU they have the same alignment within 64 bytes, on which kernels' rounding depends (a row of a data set).
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
                copies[key_of_copy] = _copy_aligned(tensor.detach().as_strided((high - low,), (1,), low))
            whole = copies[key_of_copy]
            found.append(whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - low))
    return found


def held(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor: its share if it is divided among processes (a DTensor)."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in row-major order, as a flat tensor of bytes on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # one element may have any stride, and counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format).as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def _copy_aligned(run: torch.Tensor) -> torch.Tensor:
    """Return a copy of a contiguous range with the same alignment within 64 bytes."""
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
    """The current content of a model's buffers, so that trial runs leave no trace in them (batch statistics,
    counters).
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        """Restore what was changed in place; a buffer that was replaced by another tensor stays."""
        with torch.no_grad():
            for buffer, before in self._kept:
                # batch normalisation writes without raising the version counter, so the values are compared
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


# Whether two nested values are the same, bit for bit.


def identical(a: Any, b: Any) -> bool:
    """Return whether two nested values are equal: types, dtypes, shapes and every bit of every tensor."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) or is_namedtuple(a):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    if hasattr(a, "__dict__") and not isinstance(a, type):
        return identical(vars(a), vars(b))
    return bool(a == b)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout != torch.strided or a.is_quantized:
        return bool(torch.equal(a.to_dense(), b.to_dense()))
    return bool(torch.equal(bytes_of(a), bytes_of(b)))


LEAST_PINNED: Final = 64 << 10
"""The size from which pinning is worthwhile."""
MOST_PINNED: Final = 512 << 20
"""The limit of pinned bytes in use by this process."""


class PinnedMemory:
    """Limits the pinned memory in use. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self.nbytes = 0

    def room(self, nbytes: int) -> torch.Tensor | None:
        """Pinned memory of so many bytes (uint8), until the last reference is gone; None beyond the limit, and if the
        system has none.
        """
        if nbytes < LEAST_PINNED:
            return None
        with self._lock:
            if self.nbytes + nbytes > self._most:
                return None
            self.nbytes += nbytes
        try:
            made = self._made(nbytes)
        except RuntimeError:
            self._back(nbytes)
            return None
        # of the storage: views of the tensor live longer than it
        weakref.finalize(made.untyped_storage(), self._back, nbytes)
        return made

    def _made(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _back(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes -= nbytes


PINNED: Final = PinnedMemory(MOST_PINNED)
_streams: dict[tuple[torch.device, str], Any] = {}
_making: Final = threading.Lock()


def room(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised memory of so many bytes (uint8) from which a copy to ``device`` is fastest. Raises what torch
    raises without memory.
    """
    made = PINNED.room(nbytes) if devices.pins(device) else None
    return torch.empty(nbytes, dtype=torch.uint8) if made is None else made


def wait(device: torch.device) -> None:
    """Wait for the work in this thread's stream; other streams continue. Raises its errors."""
    devices.wait_for_stream(device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU, complete; itself if it is there. Waits only for this thread's stream."""
    if not devices.pins(tensor.device):
        return tensor.cpu()
    plain = tensor.resolve_conj().resolve_neg()
    made = PINNED.room(plain.nbytes) if plain.is_contiguous() else None
    if made is None:
        return tensor.cpu()
    found = made.view(plain.dtype).view(plain.shape)
    side, made_here = _side(plain.device, "out"), devices.current_stream(plain.device)
    side.wait_stream(made_here)
    with devices.on_stream(side, plain.device):
        found.copy_(plain, non_blocking=True)
        plain.record_stream(side)
    done = devices.new_event(plain.device)
    done.record(side)
    done.synchronize()
    return found


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on ``device``; itself if it is there. A copy from pinned memory, which must not be written
    until this thread's stream has used the result, does not block.
    """
    is_there = tensor.device.type == device.type
    if not devices.pins(device) or is_there or tensor.nbytes < LEAST_PINNED or not tensor.is_pinned():
        return tensor.to(device)
    side, used_here = _side(device, "in"), devices.current_stream(device)
    with devices.on_stream(side, device):
        moved = tensor.to(device, non_blocking=True)
    used_here.wait_stream(side)
    moved.record_stream(used_here)
    return moved


def _side(device: torch.device, way: str) -> Any:
    """Return the stream of copies in one direction."""
    device = devices.current_stream(device).device  # with its number
    with _making:
        if (device, way) not in _streams:
            _streams[device, way] = devices.new_stream(device)
        return _streams[device, way]
