"""A recipe: all the tail must know to get past the prefix of one cut, and the form in which it travels.

Static for one plan and cut; sent once. It is data only: names, shapes and numbers, checked against limits when it is
read, and nothing in it is looked up by import.

* *slots*: one per storage that crosses; its pieces (disjoint views) are the payload.
* *inputs*: the structure of the model's (args, kwargs), each tensor a *source*.
* *values*: the forms of the Python values, read from data before the cut, that come with every request.
* *counts*: how often modules that are called again after the cut were called before it; for their names.
* *steps*: what the replay does at each module call or operation of the prefix that is not simply run again.

A *source* says where a tensor of the prefix comes from:

    ["slot", k, shape, stride, offset, dtype, flags]   a view of slot k
    ["hole", shape, stride, dtype]                     a placeholder
    ["arg", i]                                         the i-th tensor argument itself
    ["real", i, shape, stride, offset, dtype]          a view of the storage of the i-th tensor argument

A *step* is one of

    ["enter", path]                            a module call that is run by its own code
    ["skip", path, structure, sources]         a stub: the call is answered at once
    ["give", name, structure, sources, fills]  a replayed operation that writes to the storages of arguments i:
                                               fills: [[i, k], ...] slot k goes there now; k = -1: not yet, or never
    ["below", name, structure, sources, fills] the same for a kernel that no torch function stands for
    ["draw", name, structure, sources]         the same for an operation on no tensor of the prefix (random numbers)
    ["value", name]                            a Python value that was read from data: the next of the banked values
    ["run", name]                              an operation that needs the form of its arguments only
    ["end", path]                              the cut layer returns
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch

from shared_hooks.errors import BadFrame, TooLarge
from shared_hooks.trees import Structure, dtype_name, dtype_named
from shared_hooks.views import View

FORMAT = 1
MAX_RECIPE_BYTES = 32 << 20
MAX_STEPS = 200_000
MAX_SLOTS = 65_536
MAX_PIECES = 65_536
MAX_RANK = 32
MAX_NAME = 1_000
MAX_ELEMENTS = 1 << 40


@dataclass(frozen=True)
class Slot:
    """One storage that crosses: its size in elements of ``dtype``, the pieces that are sent, whether the tail
    writes it.
    """

    dtype: torch.dtype
    elements: int
    pieces: tuple[View, ...]
    written: bool

    @property
    def piece_bytes(self) -> int:
        return sum(piece.numel for piece in self.pieces) * self.dtype.itemsize

    @property
    def storage_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to resume after one cut. ``layer_id`` is -1 and ``layer_name`` "input" for the cut before the first layer."""

    signature: str
    plan_digest: str
    layer_id: int
    layer_name: str
    depth: int | None
    context: dict[str, Any]
    slots: tuple[Slot, ...]
    input_structure: Structure
    inputs: tuple[list[Any], ...]
    steps: tuple[list[Any], ...]
    values: tuple[Any, ...]
    counts: dict[str, int]
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def payload_bytes(self) -> int:
        """Raw bytes of the frontier."""
        return sum(slot.piece_bytes for slot in self.slots)

    @property
    def storage_bytes(self) -> int:
        """Bytes the tail allocates for the slots."""
        return sum(slot.storage_bytes for slot in self.slots)

    @cached_property
    def largest_view_bytes(self) -> int:
        """Bytes of the largest tensor over a slot: views with stride 0 are larger than what they are views of."""
        sources = [*self.inputs, *(source for step in self.steps if len(step) > 3 for source in step[3])]
        sizes = [
            View(tuple(source[2]), tuple(source[3]), 0).numel * dtype_named(source[5]).itemsize
            for source in sources
            if source[0] in ("slot", "real")
        ]
        return max(sizes, default=0)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of `to_bytes`."""
        return digest_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """UTF-8 JSON; the same recipe gives the same bytes."""
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        data = {
            "format": FORMAT,
            "signature": self.signature,
            "plan": self.plan_digest,
            "cut": [self.layer_id, self.layer_name],
            "depth": self.depth,
            "context": self.context,
            "slots": [
                [dtype_name(s.dtype), s.elements, s.written, [[p.shape, p.stride, p.offset] for p in s.pieces]]
                for s in self.slots
            ],
            "inputs": [self.input_structure, self.inputs],
            "steps": self.steps,
            "values": self.values,
            "counts": self.counts,
        }
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, max_bytes: int = 1 << 32) -> Recipe:
        """Read a recipe; `BadFrame` if malformed, `TooLarge` beyond the limits or if its storages exceed
        ``max_bytes``.
        """
        if len(data) > MAX_RECIPE_BYTES:
            raise TooLarge(f"a recipe of {len(data)} bytes; at most {MAX_RECIPE_BYTES} are taken")
        recipe = _parsed(bytes(data)) if len(data) <= _REMEMBERED_BYTES else _parse(bytes(data))
        if recipe.largest_view_bytes > max_bytes:
            raise TooLarge(f"a tensor of {recipe.largest_view_bytes} bytes; at most {max_bytes} are taken")
        if recipe.storage_bytes > max_bytes:
            raise TooLarge(f"the frontier needs {recipe.storage_bytes} bytes; at most {max_bytes} are taken")
        return recipe


def _parse(data: bytes) -> Recipe:
    try:
        recipe = _read(json.loads(data))
    except BadFrame:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError) as error:
        raise BadFrame(f"malformed recipe: {error!s:.100}") from error
    # not written again: these are the bytes it is named by
    recipe.__dict__["_bytes"] = data
    return recipe


# Requests of one cut bring the same recipe each time; with it are kept the placeholders made for it.
_REMEMBERED_BYTES = 1 << 20
_parsed = lru_cache(maxsize=256)(_parse)


def digest_of(data: bytes) -> str:
    """Digest by which both sides name a recipe."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _read(data: dict[str, Any]) -> Recipe:
    if data["format"] != FORMAT:
        raise BadFrame(f"recipe format {data['format']!r:.20}; this side reads {FORMAT}")
    slots_data, steps = _list(data["slots"], MAX_SLOTS), _list(data["steps"], MAX_STEPS)
    slots = tuple(_slot(entry) for entry in slots_data)
    structure, inputs = data["inputs"]
    for source in _list(inputs, MAX_SLOTS):
        _check_source(source, slots, among_args=False)
    for step in steps:
        _check_step(step, slots)
    layer_id, layer_name = data["cut"]
    depth, values = data["depth"], _list(data["values"], MAX_STEPS)
    context = data["context"]
    if not (depth is None or _is_count(depth)) or not isinstance(context, dict):
        raise BadFrame("malformed recipe: depth or context")
    counts = data["counts"]
    if not isinstance(counts, dict) or not all(_is_count(count) for count in counts.values()):
        raise BadFrame("malformed recipe: counts")
    if type(layer_id) is not int or layer_id < -1:
        raise BadFrame("malformed recipe: layer id")
    return Recipe(
        _name(data["signature"]),
        _name(data["plan"]),
        layer_id,
        _name(layer_name),
        depth,
        context,
        slots,
        structure,
        tuple(inputs),
        tuple(steps),
        tuple(values),
        counts,
    )


def _list(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list):
        raise BadFrame("malformed recipe: a list is expected")
    if len(value) > limit:
        raise TooLarge(f"a recipe with a list of {len(value)} entries; at most {limit} are taken")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise BadFrame("malformed recipe: a name is expected")
    if len(value) > MAX_NAME:
        raise TooLarge(f"a name of {len(value)} characters; at most {MAX_NAME} are taken")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_ELEMENTS


def _view(form: list[Any], elements: int | None) -> View:
    shape, stride, offset = form
    if not isinstance(shape, list) or not isinstance(stride, list) or len(shape) != len(stride):
        raise BadFrame("malformed recipe: a shape and its strides")
    if len(shape) > MAX_RANK:
        raise TooLarge(f"a tensor of rank {len(shape)}; at most {MAX_RANK} are taken")
    if not all(_is_count(number) for number in (*shape, *stride, offset)):
        raise BadFrame("malformed recipe: sizes and strides must be numbers that are not negative")
    view = View(tuple(shape), tuple(stride), offset)
    if view.numel >= MAX_ELEMENTS:
        raise TooLarge("a tensor of absurd size")
    if elements is not None and view.end > elements:
        raise BadFrame("malformed recipe: a view reaches beyond its storage")
    return view


def _slot(entry: Any) -> Slot:
    dtype, elements, written, pieces = entry
    if not _is_count(elements) or not isinstance(written, bool):
        raise BadFrame("malformed recipe: a slot")
    views = tuple(_view(piece, elements) for piece in _list(pieces, MAX_PIECES))
    if sum(view.numel for view in views) > elements:
        raise BadFrame("malformed recipe: pieces larger than their storage")
    return Slot(dtype_named(dtype), elements, views, written)


def _check_source(source: Any, slots: tuple[Slot, ...], *, among_args: bool = True) -> None:
    kind = source[0] if isinstance(source, list) and source else None
    if kind == "slot" and len(source) == 7 and _is_count(source[1]) and source[1] < len(slots):
        slot, dtype = slots[source[1]], dtype_named(source[5])
        elements = slot.elements * slot.dtype.itemsize // dtype.itemsize
        _view(source[2:5], elements)
        if source[6] not in ("", "c", "n", "cn"):
            raise BadFrame("malformed recipe: flags of a source")
    elif kind == "hole" and len(source) == 4:
        _view([source[1], source[2], 0], None)
        dtype_named(source[3])
    elif kind == "arg" and among_args and len(source) == 2 and _is_count(source[1]):
        pass
    elif kind == "real" and among_args and len(source) == 6 and _is_count(source[1]):
        _view(source[2:5], None)
        dtype_named(source[5])
    else:
        raise BadFrame(f"malformed recipe: source {source!r:.60}")


def _check_step(step: Any, slots: tuple[Slot, ...]) -> None:
    kind = step[0] if isinstance(step, list) and step else None
    if kind in ("enter", "end", "value", "run") and len(step) == 2:
        _name(step[1])
    elif kind in ("skip", "draw", "give", "below") and len(step) == (5 if kind in ("give", "below") else 4):
        _name(step[1])
        for source in _list(step[3], MAX_SLOTS):
            _check_source(source, slots)
        for fill in _list(step[4], MAX_SLOTS) if len(step) == 5 else ():
            argument, slot = fill
            if not _is_count(argument) or type(slot) is not int or not -1 <= slot < len(slots):
                raise BadFrame("malformed recipe: a fill")
    else:
        raise BadFrame(f"malformed recipe: step {step!r:.60}")
