"""What the core needs of a model: who it is, what it accepts, and its tail. `ServedModel` is the one of this process;
another implementation may hand the work to other processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shared_hooks import LayerMetrics, Recipe


@dataclass(frozen=True)
class Identity:
    """What both sides must agree on: hexadecimal digests, and the settings that change kernels."""

    model_id: str
    weights_hash: str
    structure_digest: str
    plan_digest: str = ""
    """Empty when the model has no example input to plan on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    """Versions and device, for messages only."""
    layers: int = 0
    """Layer calls of the plan; 0 without one."""


@dataclass(frozen=True)
class Computed:
    """The output of one tail, packed (`shared_hooks.Parcel`), and what it cost in nanoseconds."""

    header: bytes
    buffers: tuple[memoryview, ...]
    nbytes: int
    decode_ns: int = 0
    inject_ns: int = 0
    compute_ns: int = 0
    encode_ns: int = 0
    layers: tuple[LayerMetrics, ...] = ()


class Engine(Protocol):
    """The tail of one model. Methods are called by several threads."""

    @property
    def identity(self) -> Identity: ...

    def admit(self, recipe: Recipe, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """Checks what a request announces, before anything is allocated for it; raises an IsthmusError otherwise."""

    def compute(self, recipe: Recipe, header: bytes, payload: memoryview, want_metrics: bool) -> Computed:
        """Runs the tail on a complete payload, which it may keep and write to. Raises an IsthmusError."""
