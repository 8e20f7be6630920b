"""Forged bytes: every checksum and digest is right, the content is hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.crossing.format import MAX_CROSSING_BYTES, decode
from shared_hooks.errors import BadFrame, IsthmusError, TooLarge
from tests.shared_hooks.cutting import case_of
from tests.shared_hooks.hostile import DATA, EARLY, forged, paths_of, put, refused, sample, target
from tests.zoo.compare import same


def test_forging_nothing_gives_the_sample() -> None:
    assert forged() == DATA
    assert forged(crossing=lambda data: data) == DATA


JUNK: list[Any] = [None, True, -1, 0, 3, 1 << 40, 1 << 63, 1 << 200, 1.5, float("nan"), "", [], [[]], {}, [None]]
JUNK += [[-1], [1 << 62, 1 << 62], {"a": 1}, "float32", "complex128", "object", "__class__"]
JUNK += [["t", -1], ["t", 0], ["list", [["t", 0]]], ["data", "torch.nn.modules.module:Module", []]]
NESTED: list[Any] = []
for _ in range(400):
    NESTED = [NESTED]
LARGE: list[Any] = [["v", NESTED], "x" * 5000, [1] * 1000, [0] * 70000]
"""Slow to read: for one sample only."""
DEEP = b"[" * 100_000 + b"]" * 100_000
HUGE_NUMBER = b"[" + b"9" * 10_000 + b"]"

# Between them they use every field: reads; fills; given and fills; layouts; generators; pieces; complex; given results
SAMPLES = [
    ("branch_on_item", 1),
    ("preallocated_output", 3),
    ("mixture_of_experts", 4),
    ("multihead_attention", 2),
    ("monte_carlo_dropout", 0),
]
FIELDS = "cut depth context inputs slots marks fills given reads layouts path generators".split()


def test_the_samples_use_every_field() -> None:
    used = {field for one in SAMPLES for field in FIELDS if target(*one).json[field]}
    # depth is null, down to the leaves; layouts are described where a device lays tensors out in its own way
    assert used | {"depth", "layouts"} == set(FIELDS)


@pytest.mark.parametrize("place", paths_of(target(*SAMPLES[0]).header), ids=lambda place: ".".join(map(str, place)))
def test_junk_anywhere_in_the_header(place: tuple[Any, ...]) -> None:
    victim = target(*SAMPLES[0])
    for junk in JUNK + LARGE:
        victim.suffers(forged(header=put(*place, value=junk), data=victim.honest))
    victim.serves()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", SAMPLES, ids=lambda one: one[0])
def test_junk_anywhere_in_the_description_of_a_cut(name: tuple[str, int], field: str) -> None:
    victim = target(*name)
    for number, place in enumerate([(field,), *((field, *rest) for rest in paths_of(victim.json[field]))]):
        # all of it everywhere in one sample; in the others each place has another sixth
        for junk in JUNK + LARGE if name == SAMPLES[0] else JUNK[number % 6 :: 6]:
            victim.suffers(forged(crossing=put(*place, value=junk), data=victim.honest))
    victim.serves()


@pytest.mark.parametrize("name", SAMPLES, ids=lambda one: one[0])
def test_entries_that_are_missing(name: tuple[str, int]) -> None:
    victim = target(*name)
    for place in paths_of(victim.json):

        def without(data: Any, place: tuple[Any, ...] = place) -> Any:
            inner = data
            for key in place[:-1]:
                inner = inner[key]
            del inner[place[-1]]
            return data

        victim.suffers(forged(crossing=without, data=victim.honest))
    victim.serves()


@pytest.mark.parametrize(
    "junk", [DEEP, HUGE_NUMBER, b"", b"\xff\xfe", b"nul\0", b"null", b"[]", b"{}", b"{" * 500, b'"x"']
)
def test_json_bombs(junk: bytes) -> None:
    data = forged()
    refused(forged(header=lambda _: junk))
    with pytest.raises(BadFrame):
        decode(junk)
    size = len(EARLY.crossing.to_bytes())
    assert data[32 : 32 + size] == EARLY.crossing.to_bytes()


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
        ("header", put("meta", value=EARLY.crossing.digest), BadFrame),  # the values that it needs are missing
        ("header", put("meta", 0, value="0" * 32), BadFrame),
        ("header", put("meta", 1, value=[["v", True]]), BadFrame),
        ("header", put("meta", 1, 0, value=["t", 0]), BadFrame),
        ("header", put("meta", 1, value=[["v", 1.0]] * 2), BadFrame),
        ("header", put("meta", 2, value=[64]), BadFrame),
        ("header", put("meta", 2, value=[2]), BadFrame),
        ("header", put("meta", 2, value=[-4]), BadFrame),
        ("header", put("meta", 2, value=[0] * 9), BadFrame),
        ("crossing", put("slots", 0, value=["float32", BIG, False, [[[BIG], [1], 0]]]), TooLarge),
        ("crossing", put("slots", value=[["float32", 1, False, []]] * 70_000), TooLarge),
        ("crossing", put("slots", 0, 3, value=[[[16], [1], 8]]), BadFrame),
        ("crossing", put("slots", 0, 3, value=[[[16] * 40, [1] * 40, 0]]), TooLarge),
        ("crossing", put("slots", 0, 0, value="quint8"), BadFrame),
        ("crossing", put("slots", 0, 0, value="bits8"), BadFrame),
        ("crossing", put("inputs", 1, value=[[[BIG], [1], "float32"]]), TooLarge),
        ("crossing", put("inputs", 1, value=[[[1 << 20] * 30, [0] * 30, "float32"]]), TooLarge),
        ("crossing", put("inputs", 1, value=[[[4], [1, 1], "float32"]]), BadFrame),
        ("crossing", put("inputs", 1, 0, 2, value="qint32"), BadFrame),
        ("crossing", put("marks", 0, 2, value=99), BadFrame),
        ("crossing", put("marks", 0, 5, value=99), BadFrame),
        ("crossing", put("marks", 0, 7, value="x"), BadFrame),
        (
            "crossing",
            put("marks", 0, value=[["", 0, -1], 0, 0, [1 << 20, 1 << 20], [0, 0], 0, "float32", ""]),
            TooLarge,
        ),
        ("crossing", put("fills", value=[[["", 1, 0], 0, 99]]), BadFrame),
        ("crossing", put("reads", value=[[["", 1, 0], "item", ["v", "int"]]] * 70_000), TooLarge),
        ("crossing", put("given", value=[[["", 1, 0], "add", ["t", 0], [], []]] * 70_000), TooLarge),
        ("crossing", put("layouts", value=[[["", 1, -2], 0, []]]), BadFrame),
        ("crossing", put("generators", value=["torch", "cuda"]), BadFrame),
        ("crossing", put("cut", value=[1, "n" * 2000]), TooLarge),
        ("crossing", put("cut", value=[-7, "a"]), BadFrame),
        ("crossing", put("path", value="n" * 2000), TooLarge),
        ("crossing", put("format", value=1), BadFrame),
        ("crossing", put("format", value=99), BadFrame),
        ("crossing", put("reads", value=17), BadFrame),
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


def test_payload_of_another_cut_is_refused() -> None:
    other = sample("branch_on_hidden_item", 1)
    parcel = other.pack()
    with pytest.raises(BadFrame):
        EarlyOutput.unpack(EARLY.crossing, parcel.header, bytearray(b"".join(parcel.buffers)))


def test_descriptions_of_cuts_travel_alone_too() -> None:
    crossing = decode(EARLY.crossing.to_bytes())
    assert crossing.digest == EARLY.crossing.digest
    assert crossing.to_bytes() == EARLY.crossing.to_bytes()
    parcel = EARLY.pack()
    back = EarlyOutput.unpack(crossing, parcel.header, bytearray(b"".join(parcel.buffers)))
    assert same(list(back.pieces), list(EARLY.pieces))
    with pytest.raises(BadFrame):
        decode(b"[1, 2]")
    with pytest.raises(TooLarge):
        decode(b" " * (MAX_CROSSING_BYTES + 1))


def test_the_same_cut_gives_the_same_description() -> None:
    for name, cut in SAMPLES:
        data = target(name, cut).early.crossing.to_bytes()
        assert sample(name, cut).crossing.to_bytes() == data
        assert json.dumps(json.loads(data), separators=(",", ":")).encode() == data


def test_short_lists_are_counted_before_they_are_read() -> None:
    reported = json.loads(EARLY.crossing.to_bytes())
    lists = json.dumps({**reported, "context": {"more": [[]] * 200_000}}, separators=(",", ":")).encode()
    with pytest.raises(TooLarge, match="lists"):
        decode(lists)
