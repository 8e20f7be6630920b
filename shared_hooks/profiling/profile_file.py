"""Profiles as JSON: written, read strictly, and compared with what they are to be used for. docs/profiles.md."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from shared_hooks.errors import Disagreement, SpecError
from shared_hooks.files import write_json
from shared_hooks.metrics import Reading, TensorShape
from shared_hooks.profiling.profile import (
    CodecProfile,
    CutProfile,
    Fields,
    FileInput,
    LayerProfile,
    ModelIdentity,
    Profile,
    Quartiles,
    Side,
)

FORMAT: Final = "isthmus-profile"
VERSION: Final = 1
SIDES: tuple[Side, ...] = ("edge", "cloud")
STAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "edge": ("head", "encode"),
    "cloud": ("decode", "inject", "compute", "encode"),
}
MAX_BYTES: Final = 256 << 20
DEEPEST: Final = 32
"""Objects and lists inside one another, in what is kept as it is."""

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
"""What changes times, in a machine's description, though the machine is the same; in words."""


def to_json(profile: Profile) -> dict[str, Any]:
    """JSON-able, all numbers finite."""
    return {"format": FORMAT, "version": VERSION, **_plain(profile)}


def from_json(data: object, side: Side | None = None, origin: str = "profile") -> Profile:
    """The reverse, strictly. ``data``: one profile, or {"edge": ..., "cloud": ...}, of which ``side`` is read.

    Raises SpecError that names the place and what is wrong there; keys that this version does not know are left alone.
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
    """A profile from a file. Raises SpecError."""
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
    """As a file. Raises SpecError where it cannot be written."""
    write_json(path, to_json(profile))


def check(profile: Profile, identity: ModelIdentity, machine: Mapping[str, Any] | str | None = None) -> list[str]:
    """Whether a profile may be used for this model, here.

    Raises Disagreement for another model, weights, structure, plan or depth. Returns warnings, to be printed: it was
    made on another machine, with other threads, another CPU quota, other versions. ``machine``: `machine.describe` of
    the one it is to be used for, or only its id; None: not compared.
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
    """Codecs of a file, also those that this side does not know: they are left alone."""
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
    """Values that are kept as they are; no NaN and no infinity among them."""
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
    """Dataclasses, and what they hold, as JSON has them. NaN is refused when written."""
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
