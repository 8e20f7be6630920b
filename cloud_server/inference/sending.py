"""A request as an edge client would send it: a hello, a cut, a header, a payload.

The whole model is the tail behind the cut "input", whose description is that of the spec's example, with the request's
own shapes. The tensors of a cut of ``tails`` arrive by name, and become what a head would have sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from cloud_server.models import Identity
from protos import PROTOCOL_VERSION
from protos.isthmus.v1 import split_pb2
from shared_hooks import Crossing, Parcel
from shared_hooks.batching.sizes import for_shapes, sized_crossing
from shared_hooks.codecs import Coded
from shared_hooks.crossing import (
    INPUTS,
    Mark,
    NamedCrossing,
    Slot,
    TensorForm,
    decode,
    generators,
    named_crossing,
)
from shared_hooks.crossing.parcel import borrowed, parameters_of
from shared_hooks.errors import (
    MALFORMED,
    BadFrame,
    CutRefused,
    Disagreement,
    InputMismatch,
    TooLarge,
    UnknownModel,
    near,
)
from shared_hooks.planning import SizedCrossing
from shared_hooks.tensors import View, dtype_named

# The protocol's datatypes: names, and elements as bytes (little endian, row-major).


DTYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
    "BF16": torch.bfloat16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
NUMPY: dict[str, Any] = {
    "BOOL": np.bool_,
    **{f"{sign}INT{bits}": f"<{sign.lower() or 'i'}{bits // 8}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}

MOST = 1 << 40
"""Most elements of a shape, with sizes of 0 counted as 1."""
AT_ONCE = 4096
"""Elements converted to Python objects at a time; in between other threads run."""


def dtype_of(name: str, where: str) -> torch.dtype:
    """Return the torch type of a datatype. Raises InputMismatch for an unknown one."""
    if name not in DTYPES:
        raise InputMismatch(f"{where}: datatype {name[:40]!r}; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def count(shape: Sequence[int], where: str) -> int:
    """Return the number of elements of a client's shape. Raises BadFrame."""
    if len(shape) > 32 or any(size < 0 for size in shape):
        raise BadFrame(f"{where}: the shape {list(shape)[:32]} is none: up to 32 sizes that are not negative")
    if math.prod(max(size, 1) for size in shape) >= MOST:
        raise TooLarge(f"{where}: the shape {list(shape)} is of absurd size")
    return math.prod(shape)


def pack(values: Sequence[Any], datatype: str, where: str, *, finite: bool = False) -> memoryview:
    """Numbers or truth values as bytes. Raises InputMismatch for other values, and for numbers out of range.

    ``finite``: the source cannot express infinities, so one comes from a number that was too large.
    """
    kind = NUMPY.get(datatype)
    if kind is None:
        raise InputMismatch(f"{where}: elements of datatype {datatype[:40]!r} come as bytes only")
    wanted: tuple[type, ...] = (bool,) if datatype == "BOOL" else (int,) if "INT" in datatype else (int, float)
    if any(type(value) not in wanted for value in values):
        raise InputMismatch(f"{where}: an element is no {datatype}")
    too_large = InputMismatch(f"{where}: an element does not fit into {datatype}")
    if "INT" in datatype and values:
        most = np.iinfo(kind)
        if min(values) < most.min or max(values) > most.max:  # before numpy 2 it would be wrapped
            raise too_large
    try:
        with np.errstate(over="ignore"):
            found = np.array(values, dtype=kind)
    except (OverflowError, ValueError) as error:
        raise too_large from error
    if datatype.startswith("FP") and not np.isfinite(found).all() and (finite or np.isfinite(values).all()):
        raise too_large
    return memoryview(found.tobytes())


def unpack(data: memoryview, datatype: str) -> Iterator[list[Any]]:
    """Return the reverse of `pack`, `AT_ONCE` elements at a time. Raises KeyError for datatypes whose elements are
    always bytes.
    """
    found = np.frombuffer(data, dtype=NUMPY[datatype])
    return (found[at : at + AT_ONCE].tolist() for at in range(0, len(found), AT_ONCE))


# A request and its answer in the protocol's terms, as either transport brings them.


Value = bool | int | float | str
"""A parameter's value."""
MAX_VALUES = 1 << 20
"""Most elements of one answer that are written one by one; more can only be sent as bytes."""
VALUE_BYTES = 32
"""The memory that such an element takes on its way into JSON or protobuf."""


@dataclass(frozen=True)
class NamedElements:
    """A tensor by name. ``data``: its elements, little endian, row-major, without gaps."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Query:
    """A request. ``outputs``: those requested; empty: all."""

    model: str
    inputs: tuple[NamedElements, ...]
    version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class InferenceResult:
    """An answer. ``parameters``: what the model returns besides tensors, by name."""

    model: str
    version: str
    id: str
    outputs: tuple[NamedElements, ...]
    parameters: Mapping[str, Value]

    @property
    def nbytes(self) -> int:
        return sum(one.data.nbytes for one in self.outputs)


WEIGHTS = "isthmus_weights"
"""The parameter with the digest of the head's weights, which must match."""


CODECS = "isthmus_codecs"
"""The parameter that lists the encoded inputs of a tail: JSON, name of the input -> [codec, its parameters]."""
MAX_CODECS = 1 << 16
"""Its maximum length in characters."""
SHAPES = "isthmus_shapes"
"""The parameter with the shapes of the head's inputs: JSON, name of the model's input -> shape."""


@dataclass(frozen=True)
class Sending:
    """What an edge client sends. ``cut``: the description's bytes. ``buffers``: the payload, in order."""

    hello: split_pb2.Hello
    cut: bytes
    cut_digest: str
    header: bytes
    buffers: tuple[memoryview, ...]
    nbytes: int


def sending(query: Query, identity: Identity, max_bytes: int, cut: str | None = None) -> Sending:
    """Return what to send for a request to the model of ``identity``; ``cut``: to the tail behind it, with what crosses
    by name.

    Raises an IsthmusError that names the input.
    """
    weights = query.parameters.get(WEIGHTS)
    if weights is not None and weights != identity.weights_hash:
        raise Disagreement(
            f"the head has other weights than the server's model: {str(weights)[:80]}, not {identity.weights_hash}"
        )
    if cut is not None:
        return _named_tail(query, identity, cut, max_bytes)
    return _whole(query, identity, max_bytes)


def _whole(query: Query, identity: Identity, max_bytes: int) -> Sending:
    form = described(identity)
    if CODECS in query.parameters:
        raise InputMismatch(f"{CODECS}: codecs are for tails; a whole model takes its inputs as they are")
    tensors = list(_tensors(query, form["inputs"], max_bytes).values())
    forms = [TensorForm(tuple(one.shape), _contiguous(one.shape), one.dtype) for one in tensors]
    crossing = _crossing(form["cut"], tuple(forms))
    parcel = Parcel.of_tensors(crossing.digest, [*tensors, *generators.fresh(crossing.generators)])
    return _as_if_from(identity, crossing, parcel)


def _named_tail(query: Query, identity: Identity, cut: str, max_bytes: int) -> Sending:
    form = described(identity, cut)
    coded = _coded(query)
    tensors = _tensors(query, form["inputs"], max_bytes, coded)
    sent = {one.name: one.shape for one in query.inputs}
    for name, _, shape in form["inputs"]:
        if any(wanted not in (-1, size) for size, wanted in zip(sent[name], shape, strict=True)):
            raise InputMismatch(f'input "{name}": the shape {list(sent[name])} came; this tail takes {shape}')
    inputs = tuple(name for name, _, _ in identity.form["inputs"])
    shapes = tuple(sent[name] for name, _, _ in form["inputs"])
    crossing, named = _cut_described(form["cut"], inputs)
    if tuple(one.shape for one in named) != shapes:
        sizes = [sized_crossing(identity.form["sizes"][number], own) for number, own in form["sized"]]
        others = (_cut_sized(one, inputs, shapes) for one in sizes)
        fitting = next((one for one in others if one is not None), None)
        if fitting is None:
            most = " or ".join(f"{one.largest}" for one in sizes if one.largest)
            bound = f" up to {most}" if most else ""
            came = [list(one) for one in shapes]
            raise InputMismatch(f"the shapes {came} do not belong together: no size{bound} has them")
        crossing, named = fitting
    _check_input_shapes(query, inputs, crossing)
    return _as_if_from(identity, crossing, named.parcel(crossing, tensors, coded))


def _check_input_shapes(query: Query, inputs: Sequence[str], crossing: Crossing) -> None:
    """Raise InputMismatch if the head's inputs had other shapes than the ones that this tail was prepared for.

    The shapes of what crosses do not always tell, and the tail may use the inputs' shapes. BadFrame for a malformed
    parameter.
    """
    text = query.parameters.get(SHAPES)
    if text is None:
        return
    try:
        came = {str(name): [int(size) for size in shape] for name, shape in json.loads(str(text)[:MAX_CODECS]).items()}
    except MALFORMED as error:
        raise BadFrame(f"the parameter {SHAPES} is an object: name of the model's input -> shape") from error
    for name, one in zip(inputs, crossing.inputs, strict=True):
        known = [*one.shape, 2] if one.dtype.is_complex else [*one.shape]  # in its form on the wire
        if came.get(name) != known:
            raise InputMismatch(
                f'the head\'s "{name[:80]}" had the shape {came.get(name)}; this tail computes for {known}'
            )


def _coded(query: Query) -> dict[str, tuple[str, Coded]]:
    """Return the encoded inputs by name: the codec, and its output. Raises BadFrame, InputMismatch."""
    text = str(query.parameters.get(CODECS, "{}"))
    inputs = {one.name: one for one in query.inputs}
    found = {}
    try:
        for name, (codec, params) in json.loads(text[:MAX_CODECS]).items():
            if name not in inputs:
                raise InputMismatch(f'{CODECS} names "{name[:80]}", which is no input')
            found[name] = (str(codec), Coded(inputs[name].data, parameters_of(params)))
    except MALFORMED as error:
        raise BadFrame(f"the parameter {CODECS} is an object: name of an input -> [codec, parameters]") from error
    return found


def _as_if_from(identity: Identity, crossing: Crossing, parcel: Parcel) -> Sending:
    """Return what an edge client with this model would send."""
    hello = split_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        model_id=identity.model_id,
        weights_hash=identity.weights_hash,
        structure_digest=identity.structure_digest,
        plan_digest=identity.plan_digest,
        environment=identity.environment,
        about=identity.about,
    )
    return Sending(hello, crossing.to_bytes(), crossing.digest, parcel.header, parcel.buffers, parcel.nbytes)


def _tensors(
    query: Query, inputs: list[list[Any]], max_bytes: int, coded: Container[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the inputs of a request by name, in the order of ``inputs`` ([name, dtype, shape] of each; sizes may
    differ).

    Those that are ``coded`` are checked, and left out.
    """
    tensors = {}
    given = _by_name(query, [name for name, _, _ in inputs])
    total = 0
    for name, dtype, shape in inputs:
        one, where = given[name], f'input "{name}"'
        kind, wanted = dtype_of(one.datatype, where), dtype_named(dtype)
        if kind is not wanted:
            raise InputMismatch(f"{where}: {one.datatype} came; the model takes {NAMES.get(wanted, dtype)}")
        if len(one.shape) != len(shape):
            raise InputMismatch(f"{where}: {len(one.shape)} sizes came; the model takes {len(shape)}, {shape}")
        nbytes = count(one.shape, where) * kind.itemsize
        total += nbytes
        if total > max_bytes:
            raise TooLarge(f"{where}: {total} bytes of inputs; at most {max_bytes} are taken (max_request_bytes)")
        if name in coded:
            continue
        if nbytes != one.data.nbytes:
            raise BadFrame(
                f"{where}: {one.data.nbytes} bytes came; {one.datatype} of shape {list(one.shape)} has {nbytes}"
            )
        tensor = _tensor(one, kind)
        if kind is torch.bool and nbytes and int(tensor.view(torch.uint8).max()) > 1:
            raise BadFrame(f"{where}: bytes other than 0 and 1 in truth values")
        tensors[name] = tensor
    return tensors


def described(identity: Identity, cut: str | None = None) -> Mapping[str, Any]:
    """Return the names of a model's inputs and outputs, or of those of the tail behind a cut.

    Raises CutRefused, with the reason, if there are none, and UnknownModel for a tail that is not served.
    """
    why = identity.form.get("refused", "its spec has no example input, so its inputs have no names")
    if "inputs" not in identity.form:
        raise CutRefused(f'model "{identity.model_id}" cannot be asked as a whole: {why}')
    if cut is None:
        return identity.form
    tails: Mapping[str, Any] = identity.form.get("tails", {})
    if cut not in tails:
        there = "" if tails else ": none is (`tails` in its entry of the server's file, or --tails)"
        raise UnknownModel(f'no tail behind "{cut[:128]}" of "{identity.name}" is served here{there}{near(cut, tails)}')
    if "refused" in tails[cut]:
        raise CutRefused(tails[cut]["refused"])
    return {**tails[cut], "outputs": identity.form["outputs"]}


def fits(query: Query, identity: Identity) -> bool:
    """Return whether the shapes are among those that the model was seen to accept."""
    shapes = {name: shape for name, _, shape in identity.form.get("inputs", ())}
    return all(
        len(one.shape) == len(shapes.get(one.name, ()))
        and all(wanted in (-1, size) for size, wanted in zip(one.shape, shapes[one.name], strict=True))
        for one in query.inputs
    )


def _by_name(query: Query, wanted: list[str]) -> dict[str, NamedElements]:
    given = {one.name: one for one in query.inputs}
    unknown = sorted(given.keys() - set(wanted))
    missing = [name for name in wanted if name not in given]
    if unknown or missing:
        what = f'no input "{unknown[0][:80]}"' if unknown else f'the input "{missing[0]}" is missing'
        raise InputMismatch(f"{what}; the model takes {', '.join(wanted)}")
    return given


def _tensor(one: NamedElements, dtype: torch.dtype) -> torch.Tensor:
    """Return a read-only tensor on the elements in place."""
    if not one.data.nbytes:
        return torch.empty(one.shape, dtype=dtype)
    return borrowed(one.data).view(dtype).reshape(one.shape)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of row-major order, in elements."""
    return tuple(math.prod(max(size, 1) for size in shape[at + 1 :]) for at in range(len(shape)))


@lru_cache(256)
def _crossing(example: str, forms: tuple[TensorForm, ...]) -> Crossing:
    """Return the description of the example's cut "input", for inputs of these forms, which all cross completely."""
    known = decode(example.encode())
    views = [View(form.shape, form.stride, 0) for form in forms]
    pairs = list(enumerate(zip(forms, views, strict=True)))
    made = replace(
        known,
        inputs=forms,
        slots=tuple(Slot(form.dtype, view.numel, (view,), True) for _, (form, view) in pairs),
        marks=tuple(Mark(INPUTS, number, number, view, form.dtype) for number, (form, view) in pairs),
        plan_digest="",
        cache={},
    )
    # for inputs of other shapes no plan was made here
    return replace(made, plan_digest=known.plan_digest, cache={}) if made.signature == known.signature else made


@lru_cache(256)
def _cut_sized(
    sized: SizedCrossing, inputs: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
) -> tuple[Crossing, NamedCrossing] | None:
    return for_shapes(sized, inputs, shapes)


@lru_cache(256)
def _cut_described(description: str, inputs: tuple[str, ...]) -> tuple[Crossing, NamedCrossing]:
    crossing = decode(description.encode())
    return crossing, named_crossing(crossing, inputs)
