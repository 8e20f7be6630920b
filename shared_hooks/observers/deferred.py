"""Numbers that wait on a device until the forward is over, and are then read together, in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Deferred:
    """``values``: a flat tensor; ``make`` turns its copy on the CPU into a record, or into None: nothing to tell."""

    values: torch.Tensor
    make: Callable[[torch.Tensor], Any]


def read(waiting: Iterable[Deferred]) -> Callable[[Deferred], torch.Tensor]:
    """Copies all values to the CPU, one transfer for each device and dtype, and gives the look-up.

    The same tensor in several places is moved once.
    """
    moved: dict[int, torch.Tensor] = {}
    rows: dict[Any, dict[int, torch.Tensor]] = {}
    for one in waiting:
        values = one.values
        if values.device.type == "cpu":
            moved[id(values)] = values
        else:
            rows.setdefault((values.device, values.dtype), {})[id(values)] = values
    for row in rows.values():
        together = torch.cat(list(row.values())).cpu()
        moved.update(zip(row, together.split([len(values) for values in row.values()]), strict=True))
    return lambda one: moved[id(one.values)]
