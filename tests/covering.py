"""Select some of the many cases of a claim for `make test`; ``ISTHMUS_EVERY_CUT=1`` selects all."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final, TypeVar

ALL: Final = bool(os.environ.get("ISTHMUS_EVERY_CUT"))
T = TypeVar("T")


def crossed(*parameters: Sequence[Any], where: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Return a few rows of the parameters' product, for `pytest.mark.parametrize`; each value occurs."""

    def given(row: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(values[at] for values, at in zip(parameters, row, strict=True))

    rows = [row for row in product(*(range(len(values)) for values in parameters)) if where(*given(row))]
    if not ALL:
        random.Random(len(rows)).shuffle(rows)
        missing, taken = {one for row in rows for one in enumerate(row)}, []
        while missing:
            taken.append(max(rows, key=lambda row: len(missing & {*enumerate(row)})))
            missing -= {*enumerate(taken[-1])}
        rows = sorted(taken)
    return [given(row) for row in rows]


def every(step: int, values: Sequence[T], first: int = 0) -> Sequence[T]:
    """Return each ``step``-th value from ``first``."""
    return values if ALL else values[first::step]


def examples(number: int) -> int:
    """Return the number of examples of a hypothesis property: a third of ``number``."""
    return number if ALL else number // 3
