"""Requests and answers over HTTP: JSON, followed by the elements of tensors that are sent as bytes.

A tensor's elements are in ``data``, flat or nested like its shape, or, with the parameter ``binary_data_size``, after
the JSON, whose own length is then in the header Inference-Header-Content-Length (the binary tensor data extension).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

from cloud_server.inference import (
    MAX_VALUES,
    NUMPY,
    VALUE_BYTES,
    InferenceResult,
    NamedElements,
    Query,
    Value,
    check_parameters,
    pack,
    unpack,
)
from shared_hooks.errors import BadFrame, InputMismatch, TooLarge

FREE_LISTS: Final = 32_768
LIST_BYTES: Final = 16
"""Longer lists must take so many bytes, because short elements take far more memory than their text."""
MAX_OBJECTS: Final = 8192
"""Most objects, about four for each input and output; they take the most memory."""
MEMORY: Final = 32
"""A byte of JSON becomes at most so many bytes of CPython objects, within these limits."""
MAX_ENTRIES: Final = 1024
MEND: Final = 'ask for bytes ("parameters": {"binary_data": true} of an output)'


class WantedOutputs:
    """Which outputs are requested as bytes."""

    def __init__(self, always: bool, named: Mapping[str, bool]) -> None:
        self._always, self._named = always, named

    def binary(self, name: str) -> bool:
        return self._named.get(name, self._always)


def read(model: str, version: str, body: memoryview, json_bytes: int | None) -> tuple[Query, WantedOutputs]:
    """Parse a request. ``json_bytes``: of the body; None: all. Raises BadFrame, TooLarge and InputMismatch."""
    size = body.nbytes if json_bytes is None else json_bytes
    if not 0 <= size <= body.nbytes:
        raise BadFrame(f"Inference-Header-Content-Length says {size}, and {body.nbytes} bytes came")
    message = _object(_parsed(bytes(body[:size])), "the request")
    rest, inputs = body[size:], []
    for number, one in enumerate(_objects(message, "inputs")):
        name, datatype = _text(one, "name", f"input {number}"), _text(one, "datatype", f"input {number}")
        where = f'input "{name[:80]}"'
        shape = one.get("shape")
        if not isinstance(shape, list) or any(type(n) is not int or abs(n) >= 1 << 63 for n in shape):
            raise BadFrame(f"{where}: shape is a list of numbers")
        nbytes = _parameters(one, where).get("binary_data_size")
        if nbytes is None:
            data = pack(_flat(one.get("data"), where), datatype, where, finite=True)
        elif "data" in one:
            raise BadFrame(f"{where}: data and binary_data_size exclude each other")
        elif type(nbytes) is not int or not 0 <= nbytes <= rest.nbytes:
            raise BadFrame(f"{where}: binary_data_size is {nbytes!r:.40}, and {rest.nbytes} bytes are left")
        else:
            data, rest = rest[:nbytes], rest[nbytes:]
        inputs.append(NamedElements(name, datatype, tuple(shape), data))
    if rest.nbytes:
        raise BadFrame(f"{rest.nbytes} bytes came that belong to no input")
    parameters = _parameters(message, "the request")
    names, binary = [], {}
    for number, one in enumerate(_objects(message, "outputs")):
        name = _text(one, "name", f"output {number}")
        names.append(name)
        own = _parameters(one, f"output {number}")
        if "binary_data" in own:
            binary[name] = own["binary_data"] is True
    wanted = WantedOutputs(parameters.get("binary_data_output") is True, binary)
    id = message.get("id", "")
    if not isinstance(id, str):
        raise BadFrame("id is a text")
    return Query(model, tuple(inputs), version, id, tuple(names), parameters), wanted


def read_change(body: memoryview) -> None:
    """Check the body of a load or unload request. Raises BadFrame, and InputMismatch for parameters that are not
    supported.
    """
    check_parameters(_parameters(_object(_parsed(bytes(body)), "the body"), "the body") if body.nbytes else {})


def answer_bytes(result: InferenceResult, wanted: WantedOutputs) -> int:
    """Return the bytes of memory that `answer` takes, including the model's result. Raises TooLarge for too
    much JSON.
    """
    values = sum(one.count for one in result.outputs if not wanted.binary(one.name))
    if values > MAX_VALUES:
        raise TooLarge(f"the outputs have more than {MAX_VALUES} elements together to write in JSON: {MEND}")
    return result.nbytes + VALUE_BYTES * values


def answer(result: InferenceResult, wanted: WantedOutputs) -> tuple[list[bytes], list[memoryview]]:
    """Return the JSON in pieces, and the bytes after it. Raises InputMismatch for elements that JSON cannot
    represent.
    """
    behind: list[memoryview] = []
    message: dict[str, Any] = {"model_name": result.model, "model_version": result.version}
    if result.id:
        message["id"] = result.id
    if result.parameters:
        message["parameters"] = {name: _finite_or_text(value) for name, value in result.parameters.items()}
    pieces = [text(message)[:-1], b',"outputs":[']
    for number, one in enumerate(result.outputs):
        entry: dict[str, Any] = {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
        if number:
            pieces.append(b",")
        if wanted.binary(one.name):
            pieces.append(text({**entry, "parameters": {"binary_data_size": one.data.nbytes}}))
            behind.append(one.data)
        else:
            pieces += [text(entry)[:-1], b',"data":[', *_values(one), b"]}"]
    return [*pieces, b"]}"], behind


def text(message: object) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


def _finite_or_text(value: Value) -> Value:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _values(one: NamedElements) -> Iterator[bytes]:
    """Yield the elements with commas between them, a few at a time, because one call for all would block every
    thread.
    """
    if one.datatype not in NUMPY:
        raise InputMismatch(f'the output "{one.name}" is {one.datatype}, whose elements JSON cannot say: {MEND}')
    comma = b""
    for some in unpack(one.data, one.datatype):
        try:
            yield comma + text(some)[1:-1]
        except ValueError:
            raise InputMismatch(
                f'the output "{one.name}" has elements that JSON cannot say (NaN, infinite): {MEND}'
            ) from None
        comma = b","


def _parsed(data: bytes) -> Any:
    lists, objects = data.count(b"["), data.count(b"{")
    if lists > FREE_LISTS + len(data) // LIST_BYTES or objects > MAX_OBJECTS:
        raise TooLarge(f"JSON with {lists} lists and {objects} objects in {len(data)} bytes")
    try:
        return json.loads(data, parse_constant=_constant)
    except BadFrame:
        raise
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError among them
        raise BadFrame(f"the body is not JSON: {error!s:.100}") from None


def _constant(name: str) -> NoReturn:
    raise BadFrame(f"the body is not JSON, which has no {name}: such elements come as bytes")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadFrame(f"{where} is an object")
    return value


def _objects(message: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = message.get(key, [])
    if not isinstance(found, list) or len(found) > MAX_ENTRIES:
        raise BadFrame(f"{key} is a list of at most {MAX_ENTRIES} objects")
    return [_object(one, f"{key}: each") for one in found]


def _text(one: dict[str, Any], key: str, where: str) -> str:
    found = one.get(key)
    if not isinstance(found, str):
        raise BadFrame(f"{where}: {key} is a text")
    return found


def _parameters(one: dict[str, Any], where: str) -> dict[str, Value]:
    found = _object(one.get("parameters", {}), f"{where}: parameters")
    for name, value in found.items():
        if not isinstance(value, (bool, int, float, str)):
            raise BadFrame(f"{where}: the parameter {name[:80]!r} is a truth value, a number or a text")
        if name.startswith("shared_memory_") or name == "classification":
            raise InputMismatch(f"{where}: the parameter {name} is not served: tensors come and go in messages")
    return found


def _flat(data: Any, where: str) -> list[Any]:
    """Return the elements, however nested; their number is compared with the shape later."""
    if not isinstance(data, list):
        raise BadFrame(f"{where}: data is a list (or comes as bytes, with the parameter binary_data_size)")
    elements: list[Any] = data
    while any(isinstance(part, list) for part in elements):
        if not all(isinstance(part, list) for part in elements):
            raise BadFrame(f"{where}: data mixes elements and lists")
        elements = [element for part in elements for element in part]
    return elements
