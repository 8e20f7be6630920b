"""What a profile holds. One is made on each side; a plan is made of two.

Times are nanoseconds, sizes bytes, energies joules (`Reading`), powers watts. `profile_file` writes and
reads it as JSON.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

from shared_hooks.config import kind_of
from shared_hooks.errors import SpecError
from shared_hooks.metrics import STATUSES, Reading, TensorShape
from shared_hooks.showing import Bar, bars, duration, html_table, panel, short, size, summary_of

# Median and quartiles of repeated measurements.


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Quartiles of ``n`` measurements, in their unit. ``middle``: the mean of the middle half, the median where it is
    not given.

    The middle is as robust as the median, and adds up: under a CPU quota a stage takes one of two times, and a sum of
    medians is not the median of the sum.
    """

    median: float
    q1: float
    q3: float
    n: int
    middle: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.middle):
            object.__setattr__(self, "middle", self.median)

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("no values to summarise")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3, len(values), statistics.fmean(middle_half(sorted(values))))

    def as_dict(self) -> dict[str, Any]:
        return {"median": self.median, "q1": self.q1, "q3": self.q3, "n": self.n, "middle": self.middle}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Quartiles:
        """Raises KeyError, TypeError or ValueError for what is none."""
        median = float(data["median"])
        return cls(median, float(data["q1"]), float(data["q3"]), int(data["n"]), float(data.get("middle", median)))


def middle_half(ordered: Sequence[Any]) -> Sequence[Any]:
    """Without a quarter at either end."""
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


# Reading JSON so that every mistake is named: the place, what was expected, and what was found.


Value = TypeVar("Value")
LARGEST = 1 << 63


class Fields:
    """One JSON object. ``place``: where it is, for messages, such as ``edge.json: layers[3]``."""

    def __init__(self, data: object, place: str) -> None:
        if not isinstance(data, dict):
            raise SpecError(f"{place}: expected an object, found {_kind(data)}")
        self.data: dict[str, Any] = data
        self.place = place

    def fail(self, key: str, message: str) -> NoReturn:
        raise SpecError(f"{self.place}.{key}: {message}")

    def need(self, key: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.data:
            self.fail(key, "missing")
        return self.data[key]

    def of(self, key: str, kind: type[Value], what: str) -> Value:
        """A value of exactly one type."""
        value = self.need(key)
        if type(value) is not kind:
            self.fail(key, f"expected {what}, found {_kind(value)}")
        return value

    def text(self, key: str) -> str:
        return self.of(key, str, "a string")

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        found = self.of(key, list, "a list of strings")
        if not all(type(one) is str for one in found):
            self.fail(key, "expected a list of strings")
        return tuple(found)

    def flag(self, key: str) -> bool:
        return self.of(key, bool, "true or false")

    def whole(self, key: str, least: int = 0) -> int:
        """A whole number."""
        value = self.of(key, int, f"a whole number of at least {least}")
        if not least <= value < LARGEST:
            self.fail(key, f"expected a whole number of at least {least}, found {value!r:.40}")
        return value

    def number(self, key: str, least: float = 0.0) -> float:
        """A finite number; negative ones only where ``least`` allows."""
        value = self.need(key)
        if type(value) not in (int, float) or not least <= value <= LARGEST:  # rejects NaN, too
            allowed = "a finite number" if least < 0 else f"a number of at least {least:g}"
            self.fail(key, f"expected {allowed}, found {_kind(value)}")
        return float(value)

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in known:
            self.fail(key, f'expected {" or ".join(known)}, found "{value:.40}"')
        return value

    def inner(self, key: str) -> Fields:
        """An object in this one."""
        return Fields(self.need(key), f"{self.place}.{key}")

    def each(self, key: str) -> Iterator[Fields]:
        """The objects of a list."""
        for number, item in enumerate(self.of(key, list, "a list")):
            yield Fields(item, f"{self.place}.{key}[{number}]")

    def has(self, key: str) -> bool:
        """Whether there is a value, and it is not null."""
        return self.data.get(key) is not None

    def quartiles(self, key: str, least: float = 0.0) -> Quartiles:
        """{"median", "q1", "q3", "n"}: in order; and "middle"."""
        inner = self.inner(key)
        found = Quartiles(
            inner.number("median", least),
            inner.number("q1", least),
            inner.number("q3", least),
            inner.whole("n"),
            inner.number("middle", least),
        )
        slack = 1e-9 * max(abs(found.q1), abs(found.q3))
        if not found.q1 - slack <= found.median <= found.q3 + slack:
            raise SpecError(f"{inner.place}: expected q1 <= median <= q3")
        return found

    def reading(self, key: str) -> Reading:
        """{"value", "status", "note"}; a value exactly where it is not unavailable."""
        inner = self.inner(key)
        status = inner.choice("status", STATUSES)
        value = inner.number("value") if inner.has("value") else None
        try:
            return Reading(value, status, inner.text("note"))  # type: ignore[arg-type]
        except ValueError as error:
            raise SpecError(f"{inner.place}: {error}") from error


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return kind_of(value).replace("a table", "an object").replace("an array", "a list")


Side = Literal["edge", "cloud"]
INPUT_CUT = -1
"""`CutProfile.layer_id` of the cut before the first layer, whose name is "input"."""


@dataclass(frozen=True)
class ModelIdentity:
    """What a profile is of; compared before it is used. Digests are hexadecimal, as in the handshake."""

    model_id: str
    weights_hash: str
    structure_digest: str
    plan_digest: str
    depth: int | None = None


@short
@dataclass(frozen=True)
class LayerProfile:
    """One layer call in whole forwards."""

    layer_id: int
    name: str
    layer_type: str
    outputs: tuple[TensorShape, ...]
    output_bytes: int
    frontier_bytes: int | None
    can_split: bool
    reason: str
    inference_ns: Quartiles
    cpu_ns: Quartiles | None
    energy: Reading
    mean_power: Reading
    memory_allocated: Reading
    memory_peak: Reading
    features: Mapping[str, float] = field(default_factory=dict)
    """What its time may depend on, for models fitted on profiles: input_elements, output_elements, parameters, macs."""


@dataclass(frozen=True)
class CodecProfile:
    """A cut's frontier with another codec than the stages are of. ``ns``: on the edge to encode it, on the cloud to
    decode it; ``wire_bytes``: header and payload.
    """

    wire_bytes: int
    ns: Quartiles


@short
@dataclass(frozen=True)
class CutProfile:
    """One cut as this side sees it. The edge's stages: ``head``, ``encode``. The cloud's: ``decode``, ``inject``,
    ``compute``, ``encode``.
    """

    layer_id: int
    name: str
    frontier_bytes: int
    wire_bytes: int
    """Header and payload of the request, encoded."""
    stages: Mapping[str, Quartiles]
    energy: Reading
    """Joules of the edge's head and encoding, or the cloud's tail."""
    memory_peak: Reading
    estimated: str = ""
    """How the stages were estimated; empty when this cut itself was measured."""
    cpu_ns: Quartiles | None = None
    """Processor time of all threads over the stages: what a CPU quota is charged with. None when not measured."""
    codecs: Mapping[str, CodecProfile] = field(default_factory=dict)
    """By name, those that were measured beside the one of the stages; "basis" only where there are books for the cut.
    """


@dataclass(frozen=True)
class FileInput:
    """A real input file as it came (PNG, JPEG, ...), for the candidate that sends it unread."""

    name: str
    suffix: str
    nbytes: int
    prepare_ns: Quartiles
    """Reading and preprocessing it on this side."""


@dataclass(frozen=True)
class Profile:
    """One side of one model on one machine."""

    side: Side
    model: ModelIdentity
    machine: Mapping[str, Any]
    """See `machine.describe`: its ``id`` names the machine, and ``name`` is for people."""
    created: str
    """ISO 8601, UTC."""
    settings: Mapping[str, Any]
    """device, threads, warmup, repetitions, seconds, codec, pause, metrics (whether cuts ran with layer metrics),
    codecs (measured beside).
    """
    whole_ns: Quartiles
    outside_ns: Quartiles
    """The part of the whole forward that no layer accounts for."""
    layers: tuple[LayerProfile, ...]
    cuts: tuple[CutProfile, ...]
    """Every cut that the plan allows, "input" (-1) first."""
    whole_energy: Reading
    idle_power: Reading
    whole_memory_peak: Reading
    weights_bytes: int
    answer_bytes: int
    """Header and payload of the answer."""
    files: tuple[FileInput, ...] = ()
    bare_ns: Quartiles | None = None
    """A whole forward as a request runs it: without layer metrics unless ``settings`` say so. None: as `whole_ns`."""
    finish_ns: Quartiles | None = None
    """The edge's: an answer's bytes to tensors."""
    warnings: tuple[str, ...] = ()
    """For people: what makes the times unlike those of a machine at rest."""

    def __repr__(self) -> str:
        whole = f"whole forward {duration(self.whole_ns.middle)}"
        where = f"on {self.machine.get('name')}"
        counts = f"{len(self.layers)} layers", f"{len(self.cuts)} cuts"
        return summary_of(
            self, self.side, self.model.model_id, where, *counts, whole, f"weights {size(self.weights_bytes)}"
        )

    def _repr_html_(self) -> str:
        rows = [
            (str(one.layer_id), one.name, one.layer_type, duration(one.inference_ns.middle), size(one.output_bytes))
            for one in self.layers
        ]
        drawn = [
            Bar(one.inference_ns.middle, f"{one.layer_id} {one.name}: {duration(one.inference_ns.middle)}")
            for one in self.layers
        ]
        title = f"{self.model.model_id} on the {self.side}, {self.machine.get('name')}"
        title += f": a whole forward takes {duration(self.whole_ns.middle)}"
        label = f"time of each layer, at most {duration(max((bar.value for bar in drawn), default=0.0))}"
        return panel(title, bars(drawn, label), html_table(("id", "name", "type", "time", "output"), rows, (0, 3, 4)))

    @property
    def alone_ns(self) -> Quartiles:
        """The whole model on this side alone, as a request runs it."""
        return self.bare_ns or self.whole_ns

    def cut(self, name: str) -> CutProfile | None:
        """The cut of this name; None where the plan allows none."""
        return next((cut for cut in self.cuts if cut.name == name), None)
