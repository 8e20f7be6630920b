"""A request and its answer in the protocol's terms, as either transport brings them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

Value = bool | int | float | str
"""A parameter's value."""
MAX_VALUES = 1 << 20
"""Elements of one answer, all outputs together, that are written one by one; more go as bytes only."""
VALUE_BYTES = 32
"""Memory that such an element takes on its way into JSON or protobuf."""


@dataclass(frozen=True)
class Named:
    """A tensor by name. ``data``: its elements, little endian, row-major, without gaps."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Query:
    """``outputs``: those that are wanted; none = all."""

    model: str
    inputs: tuple[Named, ...]
    version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """``parameters``: what the model gives besides tensors, by name."""

    model: str
    version: str
    id: str
    outputs: tuple[Named, ...]
    parameters: Mapping[str, Value]

    @property
    def nbytes(self) -> int:
        return sum(one.data.nbytes for one in self.outputs)
