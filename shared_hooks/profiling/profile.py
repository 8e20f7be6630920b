"""Define a profile, and read and write it as JSON. Each side has one; a plan combines both.

Times are nanoseconds, sizes bytes, energies joules (`Reading`), powers watts. A file is read strictly, and compared
with the model and machine it is to be used for (docs/profiles.md).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeVar

from shared_hooks.config import kind_of
from shared_hooks.errors import Disagreement, SpecError
from shared_hooks.files import write_json
from shared_hooks.metrics import STATUSES, Reading, TensorShape
from shared_hooks.showing import Bar, bars, duration, html_table, panel, short, size, summary_of

# Median and quartiles of repeated measurements.


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Quartiles of ``n`` measurements, in their unit. ``middle``: the mean of the middle half, by default the median.

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
        """Compute quartiles. Raises ValueError for no values."""
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
        """Read quartiles. Raises KeyError, TypeError or ValueError for invalid data."""
        median = float(data["median"])
        return cls(median, float(data["q1"]), float(data["q3"]), int(data["n"]), float(data.get("middle", median)))


def middle_half(ordered: Sequence[Any]) -> Sequence[Any]:
    """Return the values without a quarter at either end."""
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


# Reads JSON so that every mistake is reported: the place, the expected, and the found value.


Value = TypeVar("Value")
LARGEST = 1 << 63


class Fields:
    """Reads one JSON object. ``place``: its location for messages, such as ``edge.json: layers[3]``."""

    def __init__(self, data: object, place: str) -> None:
        if not isinstance(data, dict):
            raise SpecError(f"{place}: expected an object, found {_kind(data)}")
        self.data: dict[str, Any] = data
        self.place = place

    def fail(self, key: str, message: str) -> NoReturn:
        raise SpecError(f"{self.place}.{key}: {message}")

    def need(self, key: str) -> Any:
        """Return the value of a required key."""
        if key not in self.data:
            self.fail(key, "missing")
        return self.data[key]

    def of(self, key: str, kind: type[Value], what: str) -> Value:
        """Return a value of exactly one type."""
        value = self.need(key)
        if type(value) is not kind:
            self.fail(key, f"expected {what}, found {_kind(value)}")
        return value

    def text(self, key: str) -> str:
        return self.of(key, str, "a string")

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        found = self.of(key, list, "a list of strings")
        if not all(type(one) is str for one in found):
            self.fail(key, "expected a list of strings")
        return tuple(found)

    def flag(self, key: str) -> bool:
        return self.of(key, bool, "true or false")

    def whole(self, key: str, least: int = 0) -> int:
        """Return a whole number."""
        value = self.of(key, int, f"a whole number of at least {least}")
        if not least <= value < LARGEST:
            self.fail(key, f"expected a whole number of at least {least}, found {value!r:.40}")
        return value

    def number(self, key: str, least: float = 0.0) -> float:
        """Return a finite number; negative only if ``least`` allows it."""
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
        """Return a nested object."""
        return Fields(self.need(key), f"{self.place}.{key}")

    def each(self, key: str) -> Iterator[Fields]:
        """Yield the objects of a list."""
        for number, item in enumerate(self.of(key, list, "a list")):
            yield Fields(item, f"{self.place}.{key}[{number}]")

    def has(self, key: str) -> bool:
        """Return whether the key has a value other than null."""
        return self.data.get(key) is not None

    def quartiles(self, key: str, least: float = 0.0) -> Quartiles:
        """Return {"median", "q1", "q3", "n"}, in order, and "middle"."""
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
        """Return {"value", "status", "note"}; the value is present exactly if it is not unavailable."""
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
    """Identifies the model of a profile; compared before use. Digests are hexadecimal, as in the handshake."""

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
    """What its time may depend on, for models fitted to profiles: input_elements, output_elements, parameters, macs."""


@dataclass(frozen=True)
class CodecProfile:
    """A cut's frontier with another codec than the stages'. ``ns``: to encode it on the edge, to decode it on the
    cloud; ``wire_bytes``: header and payload.
    """

    wire_bytes: int
    ns: Quartiles


@short
@dataclass(frozen=True)
class CutProfile:
    """One cut on this side. Stages of the edge: ``head``, ``encode``. Of the cloud: ``decode``, ``inject``,
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
    """How the stages were estimated; empty if this cut was measured."""
    cpu_ns: Quartiles | None = None
    """Processor time of all threads over the stages, which a CPU quota limits. None if not measured."""
    codecs: Mapping[str, CodecProfile] = field(default_factory=dict)
    """Other measured codecs by name; "basis" only with books for the cut."""


@dataclass(frozen=True)
class FileInput:
    """A real input file as it came (PNG, JPEG, ...), for the candidate that sends it unread."""

    name: str
    suffix: str
    nbytes: int
    prepare_ns: Quartiles
    """Time to read and preprocess it on this side."""


@dataclass(frozen=True)
class Profile:
    """One side of one model on one machine."""

    side: Side
    model: ModelIdentity
    machine: Mapping[str, Any]
    """See `machine.describe`: its ``id`` identifies the machine, and ``name`` is for people."""
    created: str
    """ISO 8601, UTC."""
    settings: Mapping[str, Any]
    """device, threads, warmup, repetitions, seconds, codec, pause, metrics (whether cuts ran with layer metrics),
    codecs (measured beside).
    """
    whole_ns: Quartiles
    outside_ns: Quartiles
    """The part of the whole forward outside of layers."""
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
    """On the edge, the time from an answer's bytes to tensors."""
    warnings: tuple[str, ...] = ()
    """For people: why the times may differ from those of a machine at rest."""

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
        """Return the cut of this name; None if the plan allows none."""
        return next((cut for cut in self.cuts if cut.name == name), None)


FORMAT: Final = "isthmus-profile"
VERSION: Final = 1
SIDES: tuple[Side, ...] = ("edge", "cloud")
STAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "edge": ("head", "encode"),
    "cloud": ("decode", "inject", "compute", "encode"),
}
MAX_BYTES: Final = 256 << 20
DEEPEST: Final = 32
"""Maximum nesting of objects and lists in what is kept as it is."""

COMPARED: Final[Mapping[str, str]] = {
    "device": "device",
    "threads": "number of threads",
    "cpu_quota": "CPU quota",
    "cores_usable": "number of usable cores",
    "cpu_mhz": "frequency limits",
    "power_mode": "power mode",
    "torch": "torch",
    "python": "Python",
    "isthmus": "Isthmus",
}
"""Entries of a machine's description that change times on the same machine, in words."""


def to_json(profile: Profile) -> dict[str, Any]:
    """Return JSON data; all numbers are finite."""
    return {"format": FORMAT, "version": VERSION, **_plain(profile)}


def from_json(data: object, side: Side | None = None, origin: str = "profile") -> Profile:
    """Read `to_json`, strictly. ``data``: one profile, or {"edge": ..., "cloud": ...}, of which ``side`` is read.

    Raises SpecError that names the place and what is wrong there. Unknown keys are ignored.
    """
    top = Fields(data, origin)
    if "format" not in top.data and any(name in top.data for name in SIDES):
        found = [name for name in SIDES if top.has(name)]
        chosen = side or (found[0] if len(found) == 1 else None)
        if chosen is None:
            raise SpecError(f"{origin}: expected one profile, found those of both sides")
        if chosen not in found:
            raise SpecError(f"{origin}: holds no profile of the {chosen}, only of the {' and the '.join(found)}")
        top = top.inner(chosen)
    if top.data.get("format") != FORMAT:
        raise SpecError(f'{top.place}: not a profile: "format" is not "{FORMAT}"')
    if type(top.data.get("version")) is not int or top.data["version"] != VERSION:
        raise SpecError(f"{top.place}.version: this Isthmus reads {VERSION}, found {top.data.get('version')!r:.40}")
    here: Literal["edge", "cloud"] = "edge" if top.choice("side", SIDES) == "edge" else "cloud"
    if side is not None and here != side:
        raise SpecError(f"{top.place}: expected a profile of the {side}, found one of the {here}")
    return _profile(top, here)


def read(path: str | Path, side: Side | None = None) -> Profile:
    """Read a profile from a file. Raises SpecError."""
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: larger than any profile ({MAX_BYTES} bytes)")
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not JSON: it is not UTF-8 text") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    return from_json(data, side, str(path))


def write(profile: Profile, path: str | Path) -> None:
    """Write a file. Raises SpecError if that fails."""
    write_json(path, to_json(profile))


def check(profile: Profile, identity: ModelIdentity, machine: Mapping[str, Any] | str | None = None) -> list[str]:
    """Check whether a profile may be used for this model, here.

    Raises Disagreement for another model, weights, structure, plan or depth. Returns warnings, to be printed: it was
    made on another machine, with other threads, another CPU quota, other versions. ``machine``: `machine.describe` of
    the machine to use it for, or only its id; None: not compared.
    """
    kind = f"the {profile.side}'s profile"
    for name, what in (
        ("model_id", "model"),
        ("depth", "depth"),
        ("structure_digest", "structure"),
        ("weights_hash", "weights"),
        ("plan_digest", "plan"),
    ):
        theirs, ours = getattr(profile.model, name), getattr(identity, name)
        if theirs != ours:
            raise Disagreement(
                f"{kind} is of another {what}: {_short(theirs)} in the profile, {_short(ours)} here; make a new one"
            )
    if machine is None:
        return []
    here = {"id": machine} if isinstance(machine, str) else machine
    made = profile.machine
    if made.get("id") != here.get("id"):
        name = f" ({made['name']})" if made.get("name") else ""
        return [f"{kind} was made on another machine{name}: its times are that machine's"]
    return [
        f"{kind} was made with another {what}: {_short(made.get(key))} then, {_short(here[key])} now"
        for key, what in COMPARED.items()
        if key in here and made.get(key) != here[key]
    ]


def _profile(top: Fields, side: Side) -> Profile:
    model = top.inner("model")
    layers = tuple(_layer(item, number) for number, item in enumerate(top.each("layers")))
    cuts = tuple(_cut(item, side, layers) for item in top.each("cuts"))
    ids = [cut.layer_id for cut in cuts]
    if ids != sorted(ids) or len({cut.name for cut in cuts}) < len(cuts):
        raise SpecError(f"{top.place}.cuts: expected every cut once, in the order of the layers")
    machine, settings = top.inner("machine"), top.inner("settings")
    machine.text("id")
    machine.text("name")
    return Profile(
        side=side,
        model=ModelIdentity(
            model_id=model.text("model_id"),
            weights_hash=_digest(model, "weights_hash"),
            structure_digest=_digest(model, "structure_digest"),
            plan_digest=_digest(model, "plan_digest"),
            depth=model.whole("depth") if model.has("depth") else None,
        ),
        machine=_finite(machine.data, machine.place),
        created=top.text("created"),
        settings=_finite(settings.data, settings.place),
        whole_ns=top.quartiles("whole_ns"),
        outside_ns=top.quartiles("outside_ns", least=-1e18),
        layers=layers,
        cuts=cuts,
        whole_energy=top.reading("whole_energy"),
        idle_power=top.reading("idle_power"),
        whole_memory_peak=top.reading("whole_memory_peak"),
        weights_bytes=top.whole("weights_bytes"),
        answer_bytes=top.whole("answer_bytes"),
        files=tuple(_file(item) for item in top.each("files")),
        bare_ns=top.quartiles("bare_ns") if top.has("bare_ns") else None,
        finish_ns=top.quartiles("finish_ns") if top.has("finish_ns") else None,
        warnings=top.texts("warnings") if top.has("warnings") else (),
    )


def _layer(item: Fields, number: int) -> LayerProfile:
    if item.whole("layer_id") != number:
        item.fail("layer_id", f"expected {number}: layers are in order and complete")
    features = item.inner("features")
    return LayerProfile(
        layer_id=number,
        name=item.text("name"),
        layer_type=item.text("layer_type"),
        outputs=tuple(_shape(shape) for shape in item.each("outputs")),
        output_bytes=item.whole("output_bytes"),
        frontier_bytes=item.whole("frontier_bytes") if item.has("frontier_bytes") else None,
        can_split=item.flag("can_split"),
        reason=item.text("reason"),
        inference_ns=item.quartiles("inference_ns"),
        cpu_ns=item.quartiles("cpu_ns") if item.has("cpu_ns") else None,
        energy=item.reading("energy"),
        mean_power=item.reading("mean_power"),
        memory_allocated=item.reading("memory_allocated"),
        memory_peak=item.reading("memory_peak"),
        features={key: features.number(key) for key in features.data},
    )


def _cut(item: Fields, side: Side, layers: tuple[LayerProfile, ...]) -> CutProfile:
    layer_id, name = item.whole("layer_id", least=-1), item.text("name")
    if layer_id >= len(layers):
        item.fail("layer_id", f"no layer {layer_id}: this profile has {len(layers)} layers")
    last = "input" if layer_id < 0 else layers[layer_id].name
    if name != last and not last.startswith(f"{name.partition('#')[0]}."):  # a block has the id of its last layer
        item.fail("name", f'layer {layer_id} has another name than "{name:.60}"')
    stages = item.inner("stages")
    unknown = set(stages.data) - set(STAGES[side])
    if unknown:
        raise SpecError(f"{stages.place}: unknown stage {min(unknown)!r:.40}; the {side} has {', '.join(STAGES[side])}")
    return CutProfile(
        layer_id=layer_id,
        name=name,
        frontier_bytes=item.whole("frontier_bytes"),
        wire_bytes=item.whole("wire_bytes"),
        stages={stage: stages.quartiles(stage) for stage in STAGES[side]},
        energy=item.reading("energy"),
        memory_peak=item.reading("memory_peak"),
        estimated=item.text("estimated"),
        cpu_ns=item.quartiles("cpu_ns") if item.has("cpu_ns") else None,
        codecs=_codecs(item.inner("codecs")) if item.has("codecs") else {},
    )


def _codecs(item: Fields) -> dict[str, CodecProfile]:
    """Return the codecs of a file; those unknown to this side are kept, too."""
    found = {name: item.inner(name) for name in item.data}
    return {name: CodecProfile(one.whole("wire_bytes"), one.quartiles("ns")) for name, one in found.items()}


def _file(item: Fields) -> FileInput:
    return FileInput(item.text("name"), item.text("suffix"), item.whole("nbytes"), item.quartiles("prepare_ns"))


def _shape(item: Fields) -> TensorShape:
    sizes = item.of("shape", list, "a list of sizes")
    if not all(type(size) is int and size >= 0 for size in sizes):
        item.fail("shape", "expected sizes that are whole numbers of at least 0")
    return TensorShape(item.text("dtype"), tuple(sizes))


def _digest(item: Fields, key: str) -> str:
    text = item.text(key)
    if not re.fullmatch(r"[0-9a-f]*", text):
        item.fail(key, f'expected hexadecimal digits, found "{text:.40}"')
    return text


def _finite(value: Any, place: str, deep: int = DEEPEST) -> Any:
    """Check values that are kept as they are: no NaN and no infinity among them."""
    if not deep:
        raise SpecError(f"{place:.60}...: more than {DEEPEST} objects and lists inside one another")
    if isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f"{place}: {value} is not a usable number")
    if isinstance(value, dict):
        return {key: _finite(item, f"{place}.{key}", deep - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item, f"{place}[{number}]", deep - 1) for number, item in enumerate(value)]
    return value


def _plain(value: Any) -> Any:
    """Convert dataclasses and their contents to JSON data. NaN is refused when written."""
    if isinstance(value, (Quartiles, Reading)):
        return value.as_dict()
    if isinstance(value, (Profile, LayerProfile, CutProfile, CodecProfile, FileInput, ModelIdentity, TensorShape)):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _short(value: object) -> str:
    if value is None:
        return "none"
    text = str(value)
    return f"{text[:12]}..." if re.fullmatch(r"[0-9a-f]{16,}", text) else text[:60]
