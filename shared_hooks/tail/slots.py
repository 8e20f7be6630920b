"""The slots of one request: flat tensors that hold what crossed, in memory wholly written before anybody reads it.

A slot begins at the address modulo 64 at which its storage began on the edge: some kernels round otherwise for memory
that is aligned otherwise. With `guarded`, a debugging aid, each slot ends where a page begins that may not be touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared_hooks.crossing import ALIGN, EarlyOutput, Slot
from shared_hooks.errors import BadFrame
from shared_hooks.tensors.staging import to_device

GUARD = "ISTHMUS_GUARD_PAGES"
_guarding = os.environ.get(GUARD, "") not in ("", "0")


@contextmanager
def guarded() -> Iterator[None]:
    """Put guard pages round all slots made in the block (of the whole process): a touch beyond one ends it.

    Setting the environment variable ``ISTHMUS_GUARD_PAGES=1`` does the same from the start. CPU and Linux only.
    """
    global _guarding
    before, _guarding = _guarding, True
    try:
        yield
    finally:
        _guarding = before


def slots_of(early: EarlyOutput, device: torch.device) -> list[torch.Tensor]:
    """One flat tensor a slot, on the tail's device. Raises `BadFrame` for bytes that no tensor of its type has."""
    found: list[torch.Tensor] = []
    pieces = iter(early.pieces)
    starts = early.starts or (0,) * len(early.crossing.slots)
    for slot, start in zip(early.crossing.slots, starts, strict=True):
        own = [next(pieces) for _ in slot.pieces]
        found.append(_filled(slot, start, own, device, may_use=early.disposable or not slot.written))
    _check_truth(early, found)
    return found


def blank_slots(slots: tuple[Slot, ...], device: torch.device) -> list[torch.Tensor]:
    """The same without content."""
    return [_made(slot, 0, device) for slot in slots]


def _filled(slot: Slot, start: int, pieces: list[torch.Tensor], device: torch.device, *, may_use: bool) -> torch.Tensor:
    if len(pieces) == 1 and slot.pieces[0].offset == 0 and slot.pieces[0].numel == slot.elements and not _guarding:
        moved = to_device(pieces[0].reshape(-1), device)
        copied = moved.data_ptr() != pieces[0].data_ptr()  # reshaping alone gives another view of the same memory
        if (may_use or copied) and (moved.is_cuda or moved.data_ptr() % ALIGN == start):
            return moved
    whole = _made(slot, start, device)
    for view, piece in zip(slot.pieces, pieces, strict=True):
        whole.as_strided(view.shape, view.stride, whole.storage_offset() + view.offset).copy_(piece)
    return whole


def _made(slot: Slot, start: int, device: torch.device) -> torch.Tensor:
    """Zeros: what no piece covers must be nobody's memory."""
    if _guarding and device.type == "cpu":
        return _between_guards(slot, start)
    front = 0 if device.type == "cuda" else start // slot.dtype.itemsize
    return torch.zeros(front + slot.elements, dtype=slot.dtype, device=device)[front:]


def _check_truth(early: EarlyOutput, slots: list[torch.Tensor]) -> None:
    """Truth values are 0 or 1; kernels that count and then copy rely on it."""
    for number in early.crossing.truths:
        if slots[number].numel() and int(slots[number].view(torch.uint8).max()) > 1:
            raise BadFrame(f"slot {number} holds truth values other than 0 and 1")


_PAGE = mmap.PAGESIZE


def _between_guards(slot: Slot, start: int) -> torch.Tensor:
    size = -(-(max(slot.storage_bytes, 1) + start) // ALIGN) * ALIGN
    pages = -(-size // _PAGE) * _PAGE
    area = mmap.mmap(-1, pages + 2 * _PAGE)
    memory = (ctypes.c_char * len(area)).from_buffer(area)
    base = ctypes.addressof(memory)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for guard in (base, base + _PAGE + pages):
        if protect(ctypes.c_void_p(guard), ctypes.c_size_t(_PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    # as near to the guard behind it as its alignment allows
    first = _PAGE + pages - size + start
    inner = (ctypes.c_char * max(slot.storage_bytes, 1)).from_address(base + first)
    inner.owner = memory  # type: ignore[attr-defined]
    return torch.frombuffer(inner, dtype=torch.uint8)[: slot.storage_bytes].view(slot.dtype)
