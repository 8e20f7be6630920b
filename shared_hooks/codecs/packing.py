"""Symbols of a few bits, several to a byte: neighbours in one byte, the first in its lowest bits.

A coder of bytes then sees pairs, fours or eights of symbols: their frequencies tell it what lies beside what, and a
symbol may take less than a bit.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

PLACES = {1: 8, 2: 4, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1}
"""Bits of a symbol -> symbols to a byte: as many as begin at whole powers of two."""

# symbols lie a byte apart in one integer; each shift brings the upper half of what is together beside the lower one
_SHIFTS: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {
    2: (torch.int16, (4,)),
    4: (torch.int32, (6, 12)),
    8: (torch.int64, (7, 14, 28)),
}


def packed_size(count: int, bits: int) -> int:
    """Bytes of ``count`` symbols."""
    return -(-count // PLACES[bits])


def packed(symbols: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes, on the same device. ``symbols``: (count,) uint8, contiguous, all below ``2**bits``."""
    places = PLACES[bits]
    if places == 1:
        return symbols
    if missing := -len(symbols) % places:
        symbols = torch.nn.functional.pad(symbols, (0, missing))
    if symbols.storage_offset() % places:
        symbols = symbols.clone()
    integer, shifts = _SHIFTS[places]
    together = symbols.view(integer)
    for shift in shifts:
        together = together | together >> shift
    return together.to(torch.uint8)  # the lowest byte


def unpacked(data: npt.NDArray[np.uint8], count: int, bits: int, top: int) -> torch.Tensor:
    """(count,) float32 on the CPU: the symbols. Raises ValueError where one is beyond ``top``."""
    places = PLACES[bits]
    if places == 1:
        if data.max(initial=0) > top:
            raise ValueError("a symbol beyond its range")
        return torch.from_numpy(data.astype(np.float32))
    symbols = _symbols(places)
    if not np.all(symbols <= top, axis=1).take(data).all():
        raise ValueError("a symbol beyond its range")
    found = np.empty((len(data), places), dtype=np.float32)
    np.take(symbols, data, axis=0, out=found, mode="clip")  # any byte has a row: nothing is clipped
    return torch.from_numpy(found.reshape(-1)[:count])


@cache
def _symbols(places: int) -> npt.NDArray[np.float32]:
    """(256, places): what is in each byte."""
    width = 8 // places
    return (np.arange(256)[:, None] >> width * np.arange(places) & (1 << width) - 1).astype(np.float32)
