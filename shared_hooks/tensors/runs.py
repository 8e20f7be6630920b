"""Sets of storage elements as runs without a gap: two rows of numbers, where each run starts and stops.

For what boxes of one grid cannot say. Runs are sorted, disjoint, and do not touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Runs = NDArray[np.int64]

MOST = 1 << 18
"""More runs than that are not kept: a set of more is widened. At 16 bytes each, and some copies on the way."""


def one(start: int, stop: int) -> Runs:
    return np.array([[start], [stop]], dtype=np.int64)


NONE: Runs = np.zeros((2, 0), dtype=np.int64)


def of_view(shape: Sequence[int], stride: Sequence[int], offset: int) -> Runs | None:
    """The runs that a view touches; None if there may be more than `MOST`."""
    dims = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1 and step > 0)
    length = 1
    while dims and dims[0][0] <= length:
        # a dimension that continues where the one inside ends, or earlier
        step, size = dims.pop(0)
        length += step * (size - 1)
    many = 1
    for _, size in dims:
        many *= size
    if many > MOST:
        return None
    starts: Any = np.full(1, offset, dtype=np.int64)
    for step, size in dims:
        starts = (np.arange(size, dtype=np.int64)[:, None] * step + starts).reshape(-1)
    starts.sort()
    return _closed(np.stack([starts, starts + length]))


def union(*parts: Runs) -> Runs:
    """What is in any of them."""
    together = np.concatenate(parts, axis=1)
    return _closed(together[:, np.argsort(together[0], kind="stable")])


def _closed(runs: Runs) -> Runs:
    """Join runs, sorted by their starts, that touch or overlap."""
    if not runs.size:
        return runs
    reach = np.maximum.accumulate(runs[1])
    gaps = runs[0, 1:] > reach[:-1]
    first = np.concatenate([[True], gaps])
    last = np.concatenate([gaps, [True]])
    return np.stack([runs[0, first], reach[last]])


def difference(a: Runs, b: Runs) -> Runs:
    """What is in the first and not in the second."""
    at = np.concatenate([a[0], a[1], b[0], b[1]])
    order = np.argsort(at, kind="stable")
    steps = np.zeros((2, at.size), dtype=np.int64)
    mine, theirs = a.shape[1], b.shape[1]
    steps[0, :mine], steps[0, mine : 2 * mine] = 1, -1
    steps[1, 2 * mine : 2 * mine + theirs], steps[1, 2 * mine + theirs :] = 1, -1
    depth = np.cumsum(steps[:, order], axis=1)
    at = at[order]
    final = np.concatenate([at[1:] != at[:-1], [True]])  # at one address only the last step counts
    inside = (depth[0, final] > 0) & (depth[1, final] == 0)
    at = at[final]
    before = np.concatenate([[False], inside[:-1]])
    return np.stack([at[inside & ~before], at[~inside & before]])
