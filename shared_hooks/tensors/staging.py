"""Between a CUDA device and this side's memory: pinned memory, streams beside the model's, no wait for others' work.

A copy between the device and ordinary memory goes through a small buffer of the driver's, piece by piece, in the
stream of the kernels. From and to pinned memory it is one transfer, on a stream of its own: kernels of other requests
run meanwhile. Pinned memory is taken from the system for good (torch keeps it for the next), so there is a bound, and
beyond it ordinary memory serves. On other devices all of this is a plain copy, or none.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import torch

LEAST_PINNED: Final = 64 << 10
"""Bytes from which pinning pays."""
MOST_PINNED: Final = 512 << 20
"""Bytes of this process in use at a time."""


class Pinned:
    """How much pinned memory is in use. Any thread may call."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self.nbytes = 0

    def room(self, nbytes: int) -> torch.Tensor | None:
        """So many bytes (uint8), pinned, until nobody refers to the tensor or its memory; None beyond the bound, and
        where the system has none.
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


PINNED: Final = Pinned(MOST_PINNED)
_streams: dict[tuple[torch.device, str], Any] = {}
_making: Final = threading.Lock()


def room(nbytes: int, device: torch.device) -> torch.Tensor:
    """So many bytes (uint8) of this side's memory, not initialised, from which a copy to ``device`` is fastest. Raises
    what torch raises without memory.
    """
    made = PINNED.room(nbytes) if device.type == "cuda" else None
    return torch.empty(nbytes, dtype=torch.uint8) if made is None else made


def wait(device: torch.device) -> None:
    """Until the device has done what this thread's stream was given; other streams' work continues. Raises what went
    wrong there.
    """
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, complete; itself if it is there. Of the device's work it waits for this thread's stream alone."""
    if not tensor.is_cuda:
        return tensor.cpu()
    plain = tensor.resolve_conj().resolve_neg()
    made = PINNED.room(plain.nbytes) if plain.is_contiguous() else None
    if made is None:
        return tensor.cpu()
    found = made.view(plain.dtype).view(plain.shape)
    side, made_here = _side(plain.device, "out"), torch.cuda.current_stream(plain.device)
    side.wait_stream(made_here)
    with torch.cuda.stream(side):
        found.copy_(plain, non_blocking=True)
        plain.record_stream(side)
    done = torch.cuda.Event()
    done.record(side)
    done.synchronize()
    return found


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On ``device``; itself if it is there. From pinned memory, which must not be written until this thread's stream
    has used the result, nobody waits: the stream does.
    """
    if device.type != "cuda" or tensor.is_cuda or tensor.nbytes < LEAST_PINNED or not tensor.is_pinned():
        return tensor.to(device)
    side, used_here = _side(device, "in"), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        moved = tensor.to(device, non_blocking=True)
    used_here.wait_stream(side)
    moved.record_stream(used_here)
    return moved


def _side(device: torch.device, way: str) -> Any:
    """The stream of copies one way."""
    device = torch.cuda.current_stream(device).device  # with its number
    with _making:
        if (device, way) not in _streams:
            _streams[device, way] = torch.cuda.Stream(device)
        return _streams[device, way]
