"""Records of what a forward measured: each layer call, and the forward as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from shared_hooks.showing import brief, duration, short, size, summary_of
from shared_hooks.tensors import tensors_in

# A number with its origin. Nothing is invented: what was not measured is estimated, or null.


Status = Literal["measured", "estimated", "unavailable"]
STATUSES: tuple[Status, ...] = ("measured", "estimated", "unavailable")


@dataclass(frozen=True, slots=True)
class Reading:
    """A measured value. ``value`` is in the unit of the field that holds it, and None exactly when ``unavailable``.

    ``note`` says how it was measured or estimated, or why it is unavailable.
    """

    value: float | None
    status: Status
    note: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status: one of {', '.join(STATUSES)}, not {self.status!r}")
        if (self.value is None) != (self.status == "unavailable"):
            raise ValueError(f"a reading that is {self.status} with the value {self.value}")

    @classmethod
    def measured(cls, value: float, by: str) -> Reading:
        return cls(value, "measured", by)

    @classmethod
    def estimated(cls, value: float, source: str) -> Reading:
        return cls(value, "estimated", source)

    @classmethod
    def unavailable(cls, why: str) -> Reading:
        return cls(None, "unavailable", why)

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "status": self.status, "note": self.note}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reading:
        """Read a reading. Raises ValueError, KeyError or TypeError for invalid data."""
        value = data["value"]
        return cls(None if value is None else float(value), data["status"], str(data.get("note", "")))


@short
@dataclass(frozen=True, slots=True)
class TensorShape:
    """Shape and dtype of one tensor; ``dtype`` without "torch."."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"


NOT_SAMPLED = Reading.unavailable("not sampled")


LAYER_READINGS = (
    "energy",
    "mean_power",
    "memory_allocated",
    "memory_peak",
    "cpu_utilisation",
    "gpu_utilisation",
    "memory_utilisation",
)
FORWARD_READINGS = ("energy", "mean_power", "memory_peak")


@dataclass(frozen=True)
class LayerMetrics:
    """Measurements of one layer call. Times in nanoseconds, sizes in bytes; a `Reading` says how it was obtained.

    ``inference_ns``: wall time of the layer's forward. ``cpu_ns``: processor time in that period, of the thread that
    runs the model where torch computes with one thread, else of the whole process, including this library's sampling
    and other requests. ``energy`` in joules, ``mean_power`` in watts, both of whole devices, so other work on them is
    included. ``memory_allocated``: bytes held at the end; ``memory_peak``: the maximum during the call. Utilisations in
    per cent: of all processors (``cpu``), of the GPU, of this machine's memory.
    """

    layer_id: int
    name: str
    layer_type: str
    inference_ns: int
    output_bytes: int
    outputs: tuple[TensorShape, ...] = ()
    cpu_ns: int | None = None
    energy: Reading = NOT_SAMPLED
    mean_power: Reading = NOT_SAMPLED
    memory_allocated: Reading = NOT_SAMPLED
    memory_peak: Reading = NOT_SAMPLED
    cpu_utilisation: Reading = NOT_SAMPLED
    gpu_utilisation: Reading = NOT_SAMPLED
    memory_utilisation: Reading = NOT_SAMPLED

    def __repr__(self) -> str:
        outputs = brief([str(one) for one in self.outputs[:1]]) if self.outputs else ""
        name = f"{self.layer_id} {self.name}"
        return summary_of(self, name, self.layer_type, duration(self.inference_ns), size(self.output_bytes), outputs)

    @property
    def inference_time(self) -> float:
        """Wall time in seconds."""
        return self.inference_ns / 1e9

    def as_dict(self) -> dict[str, Any]:
        return {
            "layer_id": self.layer_id,
            "name": self.name,
            "layer_type": self.layer_type,
            "inference_time": self.inference_time,
            "output_bytes": self.output_bytes,
            "outputs": [str(output) for output in self.outputs],
            "cpu_time": None if self.cpu_ns is None else self.cpu_ns / 1e9,
            **{name: getattr(self, name).as_dict() for name in LAYER_READINGS},
        }


LayerReadings = tuple[Reading, Reading, Reading, Reading, Reading, Reading, Reading]
"""The readings of one layer, in the order of `LAYER_READINGS`."""


@short
@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """What forwards of one plan have in common, by layer in the order of execution."""

    ids: tuple[int, ...]
    names: tuple[str, ...]
    types: tuple[str, ...]
    outputs: tuple[tuple[TensorShape, ...], ...]
    nbytes: tuple[int, ...]
    """Sizes of the outputs in bytes."""


NO_LAYERS = LayerTable((), (), (), (), ())
CACHED_LAYERS = 2048
"""Longer tables are made again each time: inputs may decide how many layers run, and caches would hold them all."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LayerColumns(Sequence[LayerMetrics]):
    """The layers of one forward as columns; a `LayerMetrics` is made when it is read.

    ``inference_ns``, ``cpu_ns`` and ``readings`` have one element for each layer of ``table``; ``cpu_ns`` is None where
    it was not measured.
    """

    table: LayerTable = NO_LAYERS
    inference_ns: Sequence[int] = ()
    cpu_ns: Sequence[int] | None = None
    readings: Sequence[LayerReadings] = ()

    def __len__(self) -> int:
        return len(self.table.ids)

    @overload
    def __getitem__(self, at: int) -> LayerMetrics: ...
    @overload
    def __getitem__(self, at: slice) -> list[LayerMetrics]: ...
    def __getitem__(self, at: int | slice) -> LayerMetrics | list[LayerMetrics]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        table = self.table
        return LayerMetrics(
            table.ids[at],
            table.names[at],
            table.types[at],
            self.inference_ns[at],
            table.nbytes[at],
            table.outputs[at],
            None if self.cpu_ns is None else self.cpu_ns[at],
            *self.readings[at],
        )

    def __iter__(self) -> Iterator[LayerMetrics]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, tuple, LayerColumns)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        names = " to ".join(dict.fromkeys((*self.table.names[:1], *self.table.names[-1:])))
        return summary_of(self, f"{len(self)} layers", brief(names), duration(sum(self.inference_ns)))


@short
@dataclass(frozen=True)
class ForwardMetrics:
    """Measurements of a forward as a whole: its layers and what lies outside of them. ``layers + outside == total``.

    It covers the whole model, with the lookup of its plan; or a head, with making its frontier; or a tail: placing the
    frontier, replaying the prefix, and the layers after the cut. ``cpu_ns`` and the readings are as in `LayerMetrics`.
    """

    total_ns: int
    layers_ns: int
    cpu_ns: int | None = None
    energy: Reading = NOT_SAMPLED
    mean_power: Reading = NOT_SAMPLED
    memory_peak: Reading = NOT_SAMPLED

    @property
    def outside_ns(self) -> int:
        """Nanoseconds outside of layers: functional code, Python between the layers, replay and banking at a cut."""
        return self.total_ns - self.layers_ns

    def as_dict(self) -> dict[str, Any]:
        """Return the record with times in seconds."""
        return {
            "total_time": self.total_ns / 1e9,
            "layers_time": self.layers_ns / 1e9,
            "outside_time": self.outside_ns / 1e9,
            "cpu_time": None if self.cpu_ns is None else self.cpu_ns / 1e9,
            **{name: getattr(self, name).as_dict() for name in FORWARD_READINGS},
        }


def output_bytes(output: Any) -> int:
    """Return the size in bytes of all tensors of an output."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in outputs_of(output))


def outputs_of(output: Any) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Return shape and dtype of every tensor of an output. Runs in the forward, so it does as little as possible."""
    if isinstance(output, torch.Tensor):
        return ((output.shape, output.dtype),)
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(output))
