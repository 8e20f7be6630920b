"""The orthonormal discrete cosine transform (DCT-II) of the last two dimensions, as two products of matrices."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

BANDS = 8
"""Bands of spatial frequencies: coefficients of one band are of like size."""


@lru_cache(maxsize=32)
def matrix(size: int, device: torch.device) -> torch.Tensor:
    """(size, size), float32, a frequency a row."""
    places = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi / size * (places[None] + 0.5) * places[:, None]) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows.to(device, torch.float32)


def forward(maps: torch.Tensor) -> torch.Tensor:
    """(..., H, W) to coefficients of that shape, the slow ones first."""
    down, across = matrix(maps.shape[-2], maps.device), matrix(maps.shape[-1], maps.device)
    return down @ maps @ across.T


def inverse(coefficients: torch.Tensor) -> torch.Tensor:
    """The reverse of `forward`."""
    device = coefficients.device
    down, across = matrix(coefficients.shape[-2], device), matrix(coefficients.shape[-1], device)
    return down.T @ coefficients @ across


@lru_cache(maxsize=64)
def bands(height: int, width: int) -> torch.Tensor:
    """(height, width): the band of each coefficient, uint8, 0 to `BANDS` - 1."""
    down = torch.arange(height) * BANDS // height
    across = torch.arange(width) * BANDS // width
    return torch.maximum(down[:, None], across[None]).to(torch.uint8)
