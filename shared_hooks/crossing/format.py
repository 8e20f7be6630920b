"""Read a `Crossing` that a stranger sent: UTF-8 JSON in which every list, name and number has a bound.

``{"format": 2, "cut": [id, name], "depth", "context", "inputs": [structure, [form, ...]], "slots": [[dtype, elements,
written, [[shape, stride, offset], ...]], ...], "marks": [[place, leaf, slot, shape, stride, offset, dtype, flags],
...], "fills": [[place, argument, slot], ...], "given": [[place, name, structure, [form | argument, ...],
[argument, ...]], ...], "reads": [[place, name, form of value], ...], "layouts": [[place, leaf, stride], ...],
"path": digest, "plan": digest, "generators": [...], "leaves": [name, ...], "calls": [name, ...], "later": [place,
...]}`` (the last three may be missing), where a form is
``[shape, stride, dtype]`` and a place ``[path, number, index]``.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch

from shared_hooks.codecs.basis import MAX_COEFFICIENTS, Book
from shared_hooks.crossing.description import (
    FORMAT,
    Crossing,
    Fill,
    Given,
    Layout,
    Mark,
    Place,
    ReadForm,
    Slot,
    TensorForm,
    mixes_truth,
)
from shared_hooks.errors import MALFORMED, BadFrame, TooLarge
from shared_hooks.tensors import PLAIN, View, dtype_named

MAX_CROSSING_BYTES = 4 << 20
MAX_ENTRIES = 65_536
MAX_NODES = 262_144
"""Maximum entries, at all depths, of the forms of inputs, values and given results."""
MAX_RANK = 32
MAX_NAME = 1_000
MAX_ELEMENTS = 1 << 40
MAX_REPEATED = 16
"""Maximum repetition of elements sent for a tensor (stride 0), beyond `FREE_BYTES`."""
FREE_BYTES = 64 << 10
FREE_LISTS = 32_768
LIST_BYTES = 16
"""Minimum bytes of each of further lists: short ones take far more time and memory than their size suggests."""
GENERATORS = ("torch", "python", "numpy")
_REMEMBERED_BYTES = 256 << 10


def decode(data: bytes, max_bytes: int = 1 << 32, *, remember: bool = True) -> Crossing:
    """Decode a crossing. Raises `BadFrame` if malformed; `TooLarge` beyond the limits, or if its storages or its
    inputs, by their announced sizes, exceed ``max_bytes``. ``remember``: False for a caller that keeps none of them.
    """
    if len(data) > MAX_CROSSING_BYTES:
        raise TooLarge(f"a cut's description of {len(data)} bytes; at most {MAX_CROSSING_BYTES} are taken")
    known = remember and len(data) <= _REMEMBERED_BYTES
    crossing = _remembered(bytes(data)) if known else _parse(bytes(data))
    inputs = sum(form.nbytes for form in crossing.inputs)
    if inputs > max_bytes:
        raise TooLarge(f"inputs of {inputs} bytes; at most {max_bytes} are taken")
    if crossing.storage_bytes > max_bytes:
        raise TooLarge(f"the frontier needs {crossing.storage_bytes} bytes; at most {max_bytes} are taken")
    return crossing


def _parse(data: bytes) -> Crossing:
    lists = data.count(b"[") + data.count(b"{")
    if lists > FREE_LISTS + len(data) // LIST_BYTES:
        raise TooLarge(f"a cut's description with {lists} lists in {len(data)} bytes")
    try:
        crossing = _read(json.loads(data))
    except BadFrame:
        raise
    except MALFORMED as error:
        raise BadFrame(f"malformed description of a cut: {error!s:.100}") from error
    # not encoded again: the digest was computed from these bytes
    crossing.__dict__["_bytes"] = data
    return crossing


# Requests of one cut have the same bytes each time where both halves run in one process.
_remembered = lru_cache(maxsize=64)(_parse)


def _read(data: dict[str, Any]) -> Crossing:
    if data["format"] != FORMAT:
        raise BadFrame(f"a cut's description in format {data['format']!r:.20}; this side reads {FORMAT}")
    layer_id, layer_name = data["cut"]
    depth, context = data["depth"], data["context"]
    if not (depth is None or _is_count(depth)) or not isinstance(context, dict):
        raise _bad("depth or context")
    if type(layer_id) is not int or not -1 <= layer_id < MAX_ELEMENTS:
        raise _bad("the layer's id")
    structure, inputs = data["inputs"]
    slots = tuple(_slot(*entry) for entry in _list(data["slots"]))
    generators = tuple(_list(data["generators"]))
    if any(name not in GENERATORS for name in generators) or len(set(generators)) < len(generators):
        raise _bad("generators")
    marks = tuple(_mark(slots, *entry) for entry in _list(data["marks"]))
    if mixes_truth(slots, marks):
        raise _bad("a slot that is truth values and something else")
    for tree in (context, structure, data["given"], data["reads"]):
        _check_size(tree)
    return Crossing(
        layer_id,
        _name(layer_name),
        depth,
        context,
        structure,
        tuple(_form(form) for form in _list(inputs)),
        slots,
        marks,
        tuple(Fill(_place(place), _count(number), _slot_number(k, slots)) for place, number, k in _list(data["fills"])),
        tuple(_given(*entry) for entry in _list(data["given"])),
        tuple(ReadForm(_place(place), _name(name), form) for place, name, form in _list(data["reads"])),
        tuple(Layout(_place(place), _count(leaf), _numbers(stride)) for place, leaf, stride in _list(data["layouts"])),
        _name(data["path"]),
        _name(data["plan"]),
        generators,
        tuple(map(_name, _list(data.get("leaves", [])))),
        _books(data.get("books", []), slots),
        *_branch(data.get("calls", []), data.get("later", [])),
    )


def _branch(calls: Any, later: Any) -> tuple[tuple[str, ...], tuple[Place, ...]]:
    if bool(calls) != bool(later):
        raise _bad("a branch cut has calls that it is after, and operations that it leaves to the tail")
    return tuple(map(_name, _list(calls))), tuple(map(_place, _list(later)))


def _books(entries: Any, slots: tuple[Slot, ...]) -> tuple[Book | None, ...]:
    pieces = sum(len(slot.pieces) for slot in slots)
    if entries and len(_list(entries)) != pieces:
        raise _bad("bases of other pieces than cross")
    books = tuple(None if entry is None else Book.from_json(entry) for entry in _list(entries))
    if (count := sum(book.coefficients for book in books if book)) > MAX_COEFFICIENTS:
        raise TooLarge(f"bases of {count} coefficients; at most {MAX_COEFFICIENTS} are taken for one cut")
    return books


def _check_size(tree: Any) -> None:
    """Bound the entries of JSON that is kept as it is; the parser bounds its depth."""
    left, waiting = MAX_NODES, [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            node = [part for item in node.items() for part in item]
        if isinstance(node, list):
            left -= len(node)
            if left < 0:
                raise TooLarge(f"a cut's description with more than {MAX_NODES} entries in one part")
            waiting += node


def _bad(what: str) -> BadFrame:
    return BadFrame(f"malformed description of a cut: {what}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _bad("a list is expected")
    if len(value) > MAX_ENTRIES:
        raise TooLarge(f"a cut's description with a list of {len(value)} entries; at most {MAX_ENTRIES} are taken")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise _bad("a name is expected")
    if len(value) > MAX_NAME:
        raise TooLarge(f"a name of {len(value)} characters; at most {MAX_NAME} are taken")
    if not value.isprintable():  # it is written to logs and messages
        raise _bad("a name with control characters")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_ELEMENTS


def _count(value: Any) -> int:
    if not _is_count(value):
        raise _bad("sizes, strides and numbers of arguments are numbers that are not negative")
    return int(value)


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _bad("a shape or strides")
    if len(value) > MAX_RANK:
        raise TooLarge(f"a tensor of rank {len(value)}; at most {MAX_RANK} are taken")
    return tuple(_count(number) for number in value)


def _place(value: Any) -> Place:
    path, number, index = value
    if type(index) is not int or not -1 <= index < MAX_ELEMENTS:
        raise _bad("a place")
    return Place(_name(path), _count(number), index)


def _dtype(name: Any) -> torch.dtype:
    dtype = dtype_named(name)
    if dtype not in PLAIN:
        raise BadFrame(f"tensors of dtype {name!r:.40} do not travel")
    return dtype


def _view(shape: Any, stride: Any, offset: Any, elements: int) -> View:
    view = View(_numbers(shape), _numbers(stride), _count(offset))
    if len(view.shape) != len(view.stride):
        raise _bad("a shape and its strides")
    if view.numel >= MAX_ELEMENTS:
        raise TooLarge("a tensor of absurd size")
    if view.end > elements:
        raise _bad("a view reaches beyond its storage")
    return view


def _form(value: Any) -> TensorForm:
    shape, stride, dtype = value
    form = TensorForm(_numbers(shape), _numbers(stride), _dtype(dtype))
    if len(form.shape) != len(form.stride):
        raise _bad("a shape and its strides")
    if form.nbytes >= MAX_ELEMENTS:
        raise TooLarge("a tensor of absurd size")
    return form


def _slot(dtype: Any, elements: Any, written: Any, pieces: Any) -> Slot:
    kind = _dtype(dtype)
    if not isinstance(written, bool):
        raise _bad("a slot")
    size = _count(elements)
    views = tuple(_view(shape, stride, offset, size) for shape, stride, offset in _list(pieces))
    if sum(view.numel for view in views) > size:
        raise _bad("pieces larger than their storage")
    if any(step == 0 and length > 1 for view in views for length, step in zip(view.shape, view.stride, strict=True)):
        raise _bad("a piece that repeats elements")
    return Slot(kind, size, views, written)


def _slot_number(value: Any, slots: tuple[Slot, ...]) -> int:
    if not _is_count(value) or value >= len(slots):
        raise _bad("the number of a slot")
    return int(value)


def _mark(
    slots: tuple[Slot, ...],
    place: Any,
    leaf: Any,
    slot: Any,
    shape: Any,
    stride: Any,
    offset: Any,
    dtype: Any,
    flags: Any,
) -> Mark:
    number, kind = _slot_number(slot, slots), _dtype(dtype)
    own = slots[number]
    view = _view(shape, stride, offset, own.storage_bytes // kind.itemsize)
    if flags not in ("", "c", "n", "cn"):
        raise _bad("flags of a mark")
    if view.numel * kind.itemsize > MAX_REPEATED * own.storage_bytes + FREE_BYTES:
        raise TooLarge(f"a tensor that repeats {own.storage_bytes} bytes more than {MAX_REPEATED} times")
    return Mark(_place(place), _count(leaf), number, view, kind, flags)


def _given(place: Any, name: Any, structure: Any, leaves: Any, writes: Any) -> Given:
    found = tuple(_form(leaf) if isinstance(leaf, list) else _count(leaf) for leaf in _list(leaves))
    return Given(_place(place), _name(name), structure, found, tuple(_count(number) for number in _list(writes)))


_OBJECTS = {b"[": 72, b"{": 64, b":": 48, b",": 32, b'"': 32}
"""Bytes of objects of CPython 3.11 per character of JSON, as measured, rounded up."""


def decoded_bytes(data: bytes) -> int:
    """Return the maximum memory of a description once read, from its bytes alone: an empty list of two bytes becomes an
    object of 56, and a reference.
    """
    wide = 1 if data.isascii() and b"\\u" not in data else 4  # one character makes a text four times as wide
    books = 2 * len(data) if b'"books"' in data else 0  # the arrays beside their text
    return books + wide * len(data) + sum(size * data.count(sign) for sign, size in _OBJECTS.items())
