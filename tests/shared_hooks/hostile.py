"""Good bytes to start from, ways to forge them, and the checks that nothing bad comes of it."""

from __future__ import annotations

import copy
import dataclasses
import json
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import EarlyOutput, RehearsalLimits, WrappedModel
from shared_hooks.crossing.description import digest_of
from shared_hooks.crossing.early import MAGIC
from shared_hooks.crossing.format import decode
from shared_hooks.errors import BadFrame, IsthmusError
from shared_hooks.tail.recipe import guarded
from tests.shared_hooks.cutting import case_of
from tests.shared_hooks.truth import memory_of
from tests.zoo import Case
from tests.zoo.compare import same

FRONT = 32  # magic 8, size of the cut's description 4, header size 4, payload size 8, checksum 8
ALIGN = 64  # the payload starts at a multiple of it, after zeros
LIMIT = 1 << 20
ENGINE = (
    "slots.py",
    "placing.py",
    "placeholder.py",
    "early.py",
    "rehearsal.py",
    "meta_runner.py",
    "trees.py",
    "parcel.py",
)
Change = Callable[[Any], Any]


def sample(name: str = "branch_on_item", cut: int | str = 1) -> EarlyOutput:
    case = case_of(name)
    args, kwargs = case.inputs()
    early = WrappedModel(case.build()).forward(*args, end=cut, **kwargs)
    assert isinstance(early, EarlyOutput)
    return early


EARLY = sample()
DATA = EARLY.to_bytes()


def forged(
    crossing: Change | None = None,
    header: Change | None = None,
    payload: bytes | None = None,
    data: bytes = DATA,
) -> bytes:
    """The sample's bytes with a changed description of the cut, header or payload, and new checksums.

    The header names the forged description, as a liar's would. ``data``: another sample.
    """
    cut_size, header_size = int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")
    cut_data = data[FRONT : FRONT + cut_size]
    header_data = data[FRONT + cut_size + 8 : FRONT + cut_size + header_size]
    start = FRONT + cut_size + header_size
    payload = data[start + -start % ALIGN :] if payload is None else payload
    if crossing is not None:
        cut_data = _changed(cut_data, crossing)
        header_data = _changed(header_data, lambda header: _naming(header, digest_of(cut_data)))
    if header is not None:
        header_data = _changed(header_data, header)
    header_data = xxhash.xxh3_64_intdigest(header_data).to_bytes(8, "little") + header_data
    front = MAGIC + len(cut_data).to_bytes(4, "little") + len(header_data).to_bytes(4, "little")
    front += len(payload).to_bytes(8, "little")
    checksum = xxhash.xxh3_64_intdigest(front + cut_data).to_bytes(8, "little")
    made = front + checksum + cut_data + header_data
    return made + bytes(-len(made) % ALIGN) + payload


def _changed(data: bytes, change: Change) -> bytes:
    new = change(json.loads(data))
    return new if isinstance(new, bytes) else json.dumps(new, separators=(",", ":")).encode()


def _naming(header: Any, digest: str) -> Any:
    meta = header["meta"]
    header["meta"] = [digest, *meta[1:]] if isinstance(meta, list) else digest
    return header


def put(*path: Any, value: Any) -> Change:
    """A change: set one entry of nested lists and dictionaries."""

    def change(data: Any) -> Any:
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = copy.deepcopy(value)
        return data

    return change


def at(data: Any, path: tuple[Any, ...]) -> Any:
    """What lies at a place in nested lists and dictionaries."""
    for key in path:
        data = data[key]
    return data


def paths_of(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested lists and dictionaries."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in ((*prefix, key), *paths_of(value, (*prefix, key)))]


def refused(data: bytes, error: type[IsthmusError] = BadFrame, limit: int = 1 << 20, room: int = 1 << 20) -> None:
    """``data`` must be refused with ``error``, without allocating more than ``room`` bytes beyond its own size."""
    tracemalloc.start()
    try:
        with Allocated() as allocated, pytest.raises(error):
            EarlyOutput.from_bytes(data, max_bytes=limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # parsing JSON that did arrive costs up to some 20 times its size; what is only announced costs nothing
    assert peak < room + 20 * len(data), f"{peak} bytes were allocated"
    assert allocated.total <= room


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that are made."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if isinstance(out, torch.Tensor) and name.startswith(("aten::empty", "aten::zeros", "aten::full")):
            self.total += 0 if out.device.type == "meta" else out.untyped_storage().nbytes()
        return out


class Target:
    """A server that holds one model, and what an honest client sends it and is answered."""

    def __init__(self, case: Case, cut: int | str) -> None:
        args, kwargs = case.inputs()
        self.model = case.build()
        edge = WrappedModel(case.build())
        with case.setting():
            self.early = edge.forward(*args, end=cut, **kwargs)
            self.plan = edge.plan(*case.inputs()[0], **case.inputs()[1])
        self.case = case
        self.json = json.loads(self.early.crossing.to_bytes())
        self.header = json.loads(self.early.pack().header[8:])
        limits = RehearsalLimits(seconds_a_minute=1e6, seconds=20, native_bytes=1 << 26, elements=1 << 30)
        self.server = WrappedModel(self.model, rehearsals=limits)
        self.memory = memory_of(self.model)
        self.honest = self.early.to_bytes()
        self.expected = self.answer(self.honest)

    def answer(self, data: bytes) -> Any:
        """What the server answers to these bytes. Slots lie between guard pages."""
        with self.case.setting(), guarded():
            return self.server.tail(EarlyOutput.from_bytes(data, max_bytes=LIMIT))

    def reported(self, crossing: Any) -> bytes | None:
        """The bytes of a liar whose header and payload fit the description ``crossing``: the honest data where a
        slot is the honest one, else some. None for a description that is refused when it is read.
        """
        data = json.dumps(crossing, separators=(",", ":")).encode()
        try:
            found = decode(data, LIMIT)
        except IsthmusError:
            return None
        own = iter(self.early.pieces)
        honest = [[next(own) for _ in slot.pieces] for slot in self.early.crossing.slots]
        pieces: list[torch.Tensor] = []
        for number, (one, slot) in enumerate(zip(crossing["slots"], found.slots, strict=True)):
            known = [number, *range(len(honest))] if number < len(honest) else range(len(honest))
            like = next((honest[k] for k in known if self.json["slots"][k] == one), None)
            pieces += [some(piece.shape, slot.dtype) for piece in slot.pieces] if like is None else like
        values = tuple(_value_of(read.form) for read in found.reads)
        forms = [read.form for read in self.early.crossing.reads]
        if [read.form for read in found.reads] == forms:
            values = self.early.values
        states = self.early.generators
        if found.generators != self.early.crossing.generators:
            states = tuple(torch.zeros(16, dtype=torch.uint8) for _ in found.generators)
        starts = self.early.starts if crossing["slots"] == self.json["slots"] else ()
        return dataclasses.replace(
            self.early, crossing=found, pieces=tuple(pieces), values=values, generators=states, starts=starts
        ).to_bytes()

    def suffers(self, data: bytes) -> str:
        """What becomes of these bytes: an error of the tree, or an answer made of what was sent, twice the same one.
        The model is as it was.
        """
        try:
            answer = self.answer(data)
        except IsthmusError as error:
            outcome = type(error).__name__
        except Exception as error:
            if not _of_the_model(error):
                raise
            outcome = "ModelFailed"  # as a server says it: what was sent is no data for this model
        else:
            assert same(self.answer(data), answer), "an answer that holds memory nobody sent"
            outcome = "right" if same(answer, self.expected) else "other"
        assert memory_of(self.model) == self.memory, "the model's weights were changed"
        return outcome

    def serves(self) -> None:
        """An honest client gets the right answer."""
        assert same(self.answer(self.honest), self.expected)
        assert memory_of(self.model) == self.memory

    def places(self) -> Iterator[tuple[list[Any], str]]:
        """Where the operations before the cut lie, with their names."""
        for call, number, item in self.plan.trace.placed:
            name = getattr(item, "name", None)
            if name is not None and hasattr(item, "args_tainted"):
                yield [call.path, call.number, number], name


def _of_the_model(error: Exception) -> bool:
    """Whether the error comes out of the model's own code, and not out of the engine."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "forward" and "shared_hooks" not in frame.filename for frame in frames) and not any(
        frame.filename.endswith(ENGINE) for frame in frames[-1:]
    )


def some(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this form with some content, truth values among it."""
    count = 1
    for size in shape:
        count *= size
    data = (torch.arange(count * dtype.itemsize) % 2).to(torch.uint8)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def _value_of(form: Any) -> Any:
    if isinstance(form, list):
        if len(form) == 2 and form[0] == "v":
            return ["v", {"int": 1, "bool": True, "float": 0.5, "str": "a"}.get(str(form[1]))]
        return [_value_of(part) for part in form]
    return form


@cache
def target(name: str, cut: int | str) -> Target:
    """A case of the zoo to attack."""
    return Target(case_of(name), cut)
