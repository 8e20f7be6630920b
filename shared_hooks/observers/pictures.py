"""Attention weights as a picture: queries downwards, keys to the right, the brighter the more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared_hooks.errors import InputMismatch
from shared_hooks.observers.kinds.attention import Attention

if TYPE_CHECKING:
    from PIL import Image

STOPS = np.array([[0, 0, 0], [120, 28, 109], [237, 105, 37], [252, 255, 164]], dtype=np.float64)
LEAST_SIDE = 256


def heat_map(record: Attention, head: int | None = None, row: int = 0) -> Image.Image:
    """An RGB picture of one head, or of the mean over heads, for one row of the batch; scaled to its maximum.

    Small maps are enlarged by a whole factor, so that a weight stays a square. Raises InputMismatch if the weights
    were not kept or there is no such head or row.
    """
    if record.weights is None:
        raise InputMismatch(f"the attention weights of {record.name} were not kept")
    batch, heads = record.shape[:2]
    if not 0 <= row < batch or (head is not None and not 0 <= head < heads):
        raise InputMismatch(f"row {row}, head {head}: {record.name} has {batch} rows and {heads} heads")
    weights = record.weights[row].mean(0) if head is None else record.weights[row, head]
    return coloured(weights.numpy())


def coloured(grid: np.ndarray[Any, Any]) -> Image.Image:
    """An RGB picture of (queries, keys), scaled to its maximum and enlarged by a whole factor."""
    from PIL import Image

    grid = np.nan_to_num(grid.astype(np.float64))
    grid = grid / max(grid.max(initial=0.0), 1e-12) * (len(STOPS) - 1)
    below = np.clip(grid.astype(int), 0, len(STOPS) - 2)
    colours = STOPS[below] + (STOPS[below + 1] - STOPS[below]) * (grid - below)[..., None]
    factor = max(1, LEAST_SIDE // max(grid.shape))
    pixels = colours.round().astype(np.uint8).repeat(factor, 0).repeat(factor, 1)
    return Image.fromarray(pixels)


def save_heat_map(record: Attention, path: str | Path, head: int | None = None, row: int = 0) -> None:
    """Write `heat_map` as PNG."""
    heat_map(record, head, row).save(path, "PNG")
