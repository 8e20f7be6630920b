"""Forged bytes: every checksum is right, the content is hostile."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash

from shared_hooks import EarlyOutput, Recipe, WrappedModel
from shared_hooks.errors import BadFrame, IsthmusError, TooLarge
from tests.engine.cutting import case_of
from tests.engine.hostile import ALIGN, DATA, EARLY, FRONT, refused, sample
from tests.zoo.compare import same


def forged(
    recipe: Callable[[Any], Any] | None = None, header: Callable[[Any], Any] | None = None, payload: bytes | None = None
) -> bytes:
    """The sample's bytes with a changed recipe, header or payload, and new checksums."""
    recipe_size, header_size = int.from_bytes(DATA[8:12], "little"), int.from_bytes(DATA[12:16], "little")
    recipe_data = DATA[FRONT : FRONT + recipe_size]
    header_data = DATA[FRONT + recipe_size + 8 : FRONT + recipe_size + header_size]
    start = FRONT + recipe_size + header_size
    payload = DATA[start + -start % ALIGN :] if payload is None else payload

    def changed(data: bytes, change: Callable[[Any], Any] | None) -> bytes:
        if change is None:
            return data
        new = change(copy.deepcopy(json.loads(data)))
        return new if isinstance(new, bytes) else json.dumps(new, separators=(",", ":")).encode()

    recipe_data, header_data = changed(recipe_data, recipe), changed(header_data, header)
    header_data = xxhash.xxh3_64_intdigest(header_data).to_bytes(8, "little") + header_data
    front = b"ISTHMUS1" + len(recipe_data).to_bytes(4, "little") + len(header_data).to_bytes(4, "little")
    front += len(payload).to_bytes(8, "little")
    checksum = xxhash.xxh3_64_intdigest(front + recipe_data).to_bytes(8, "little")
    data = front + checksum + recipe_data + header_data
    return data + bytes(-len(data) % ALIGN) + payload


def test_forging_nothing_gives_the_sample() -> None:
    assert forged() == DATA


def put(*path: Any, value: Any) -> Callable[[Any], Any]:
    """A change: set one entry of nested lists and dictionaries."""

    def change(data: Any) -> Any:
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return data

    return change


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    1 << 40,
    1 << 63,
    1 << 200,
    1.5,
    float("nan"),
    "",
    "x" * 5000,
    [],
    [[]],
    {},
    [None],
]
JUNK += [[-1], [1 << 62, 1 << 62], [1] * 1000, {"a": 1}, "float32", "complex128", "object", "__class__", [0] * 70000]
DEEP = b"[" * 100_000 + b"]" * 100_000
HUGE_NUMBER = b"[" + b"9" * 10_000 + b"]"


def paths_of(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested lists and dictionaries."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in ((*prefix, key), *paths_of(value, (*prefix, key)))]


RECIPE = json.loads(EARLY.recipe.to_bytes())
HEADER = json.loads(EARLY.pack().header[8:])


def read_or_refuse(data: bytes) -> None:
    """Nothing but errors of the tree; a recipe that is read can be run, and then also fails in the tree only."""
    case = case_of("branch_on_item")
    try:
        early = EarlyOutput.from_bytes(data, max_bytes=1 << 20)
    except IsthmusError:
        return
    try:
        WrappedModel(case.build()).forward(early, start=early.layer_id)
    except IsthmusError:
        pass


@pytest.mark.parametrize("place", paths_of(HEADER), ids=lambda place: ".".join(map(str, place)))
def test_junk_anywhere_in_the_header(place: tuple[Any, ...]) -> None:
    for junk in JUNK:
        read_or_refuse(forged(header=put(*place, value=junk)))


@pytest.mark.parametrize("place", paths_of(RECIPE), ids=lambda place: ".".join(map(str, place)))
def test_junk_anywhere_in_the_recipe(place: tuple[Any, ...]) -> None:
    for junk in JUNK:
        read_or_refuse(forged(recipe=put(*place, value=junk)))


@pytest.mark.parametrize(
    "junk", [DEEP, HUGE_NUMBER, b"", b"\xff\xfe", b"nul\0", b"null", b"[]", b"{}", b"{" * 500, b'"x"']
)
def test_json_bombs(junk: bytes) -> None:
    refused(forged(recipe=lambda _: junk))
    refused(forged(header=lambda _: junk))


BIG = 1 << 38


@pytest.mark.parametrize(
    ("where", "change", "error"),
    [
        ("header", put("sections", 0, value=["raw", "float32", [BIG], [1], 4 * BIG, 0]), TooLarge),
        ("header", put("sections", 0, value=["raw", "float32", [1 << 20] * 3, [1, 1, 1], 64, 0]), BadFrame),
        ("header", put("sections", 0, value=["lz4", "float32", [BIG], [1], 64, 0]), BadFrame),
        ("header", put("sections", 0, value=["raw", "float32", [1] * 33, [1] * 33, 4, 0]), TooLarge),
        ("header", put("sections", value=[["raw", "uint8", [0], [1], 0, 0]] * 70_000), TooLarge),
        ("header", put("sections", 0, 0, value="pickle"), BadFrame),
        ("header", put("sections", 0, 1, value="object"), BadFrame),
        ("header", put("sections", 0, 3, value=[-1, -1]), BadFrame),
        ("header", put("v", value=2), BadFrame),
        ("recipe", put("slots", 0, value=["float32", BIG, False, [[[BIG], [1], 0]]]), TooLarge),
        ("recipe", put("slots", value=[["float32", 1, False, []]] * 70_000), TooLarge),
        ("recipe", put("slots", 0, 3, value=[[[16], [1], 8]]), BadFrame),
        ("recipe", put("slots", 0, 3, value=[[[16] * 40, [1] * 40, 0]]), TooLarge),
        ("recipe", put("steps", value=[["value", "item"]] * 300_000), TooLarge),
        ("recipe", put("cut", value=[1, "n" * 2000]), TooLarge),
        ("recipe", put("cut", value=[-7, "a"]), BadFrame),
        ("recipe", put("format", value=99), BadFrame),
        ("recipe", put("values", value=17), BadFrame),
    ],
)
def test_absurd_announcements(where: str, change: Callable[[Any], Any], error: type[IsthmusError]) -> None:
    data = forged(**{where: change})
    refused(data, error)


def test_absurd_sizes_at_the_front() -> None:
    for start, size in ((8, 4), (12, 4), (16, 8)):
        for number in (0, 1, (1 << 31) - 1, (1 << 8 * size) - 1):
            data = DATA[:start] + number.to_bytes(size, "little") + DATA[start + size :]
            refused(data)


def test_an_lz4_bomb_is_bounded_by_the_limit() -> None:
    """A megabyte of zeros compresses 200-fold; the limit is on what it becomes."""
    case = case_of("unused_input")
    zeros = WrappedModel(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Tanh())).forward(torch.zeros(1 << 18), end=0)
    data = zeros.to_bytes("lz4")
    assert len(data) < 20_000
    refused(data, TooLarge, limit=1 << 19, room=1 << 19)
    assert EarlyOutput.from_bytes(data, max_bytes=1 << 20).nbytes == 1 << 20
    assert case.listed is False


def test_payload_of_another_recipe_is_refused() -> None:
    other = sample("branch_on_hidden_item", 1)
    parcel = other.pack()
    with pytest.raises(BadFrame):
        EarlyOutput.unpack(EARLY.recipe, parcel.header, bytearray(b"".join(parcel.buffers)))


def test_recipes_travel_alone_too() -> None:
    recipe = Recipe.from_bytes(EARLY.recipe.to_bytes())
    assert recipe.digest == EARLY.recipe.digest
    parcel = EARLY.pack()
    back = EarlyOutput.unpack(recipe, parcel.header, bytearray(b"".join(parcel.buffers)))
    assert same(list(back.pieces), list(EARLY.pieces))
    with pytest.raises(BadFrame):
        Recipe.from_bytes(b"[1, 2]")
