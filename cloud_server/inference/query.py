"""A request and its answer in the protocol's terms, as either transport brings them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = bool | int | float | str
"""Of a parameter."""


@dataclass(frozen=True)
class Named:
    """A tensor by name. ``data``: its elements, little endian, row-major, without gaps."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


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
