"""The codec "basis": what was learnt goes in few bytes, what is unlike that goes raw, strangers' books are data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_hooks import Crossing, EarlyOutput, Parcel, WrappedModel
from shared_hooks.codecs import Grain
from shared_hooks.codecs.basis import Basis, Book, learn, pack, unpack
from shared_hooks.errors import BadFrame, SpecError, TooLarge
from shared_hooks.models.digits.network import digits

MAPS = Grain.of((1, 6, 8, 8), (384, 64, 8, 1))
TOKENS = Grain.of((1, 20, 24), (480, 24, 1))


def mixed(grain: Grain, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Tensors whose channels are mixtures of two smooth sources: few numbers say all of it."""
    dice = torch.Generator().manual_seed(seed)
    ways = torch.randn(grain.channels, 2, generator=torch.Generator().manual_seed(7))
    found = []
    for _ in range(count):
        sources = torch.randn(grain.outer, 2, 1, generator=dice) * torch.linspace(1, 2, grain.inner)
        found.append((ways @ sources).reshape(-1))
    return found


def there_and_back(book: Book, tensor: torch.Tensor, grain: Grain) -> tuple[int, torch.Tensor]:
    codec = Basis(Book.from_json(json.loads(json.dumps(book.to_json()))))
    coded = codec.encode(tensor, grain)
    assert coded is not None
    codec.check(coded.params, tensor.dtype, tensor.numel(), len(coded.data))
    back = codec.decode(coded.data, coded.params, tensor.dtype, tensor.numel())
    assert isinstance(back, torch.Tensor) and back.dtype is tensor.dtype
    return len(coded.data), back


@pytest.mark.parametrize("grain", [MAPS, TOKENS], ids=["maps", "tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learnt_basis_is_small(grain: Grain, dtype: torch.dtype) -> None:
    book = learn(mixed(grain, 30), grain, 0.25)
    new = mixed(grain, 3, seed=1)[2].to(dtype)
    nbytes, back = there_and_back(book, new, grain)
    assert nbytes * 10 < new.numel() * new.itemsize
    assert float((back.float() - new.float()).square().mean().sqrt()) < 0.25 * float(new.float().std())


def test_a_smaller_step_loses_less() -> None:
    errors, sizes = [], []
    for step in (1.0, 0.25, 0.05):
        book = learn(mixed(TOKENS, 30), TOKENS, step)
        new = mixed(TOKENS, 1, seed=1)[0]
        nbytes, back = there_and_back(book, new, TOKENS)
        errors.append(float((back - new).square().mean()))
        sizes.append(nbytes)
    assert errors == sorted(errors, reverse=True) and sizes == sorted(sizes)


def test_a_batch_and_other_lengths_go_by_the_same_book() -> None:
    book = learn(mixed(TOKENS, 30), TOKENS, 0.25)
    longer = Grain.of((3, 50, 24), (1200, 24, 1))
    _, back = there_and_back(book, mixed(longer, 1)[0], longer)
    assert back.numel() == longer.elements


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.clone().index_fill_(0, torch.tensor([3]), float("nan")),
        lambda x: x.clone().index_fill_(0, torch.tensor([3]), float("inf")),
        lambda x: x + 5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)),  # outside of the basis
        lambda x: x * 1e30,
        lambda x: x.to(torch.int32),
        lambda x: x.double(),
    ],
    ids=["nan", "inf", "unlike", "huge", "integers", "double"],
)
def test_unlike_tensor_is_sent_raw(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    book = learn(mixed(TOKENS, 30), TOKENS, 0.25)
    assert Basis(book).encode(spoil(mixed(TOKENS, 1)[0]), TOKENS) is None
    assert Basis(book).encode(mixed(MAPS, 1)[0], MAPS) is None
    assert Basis().encode(mixed(TOKENS, 1)[0], TOKENS) is None


@pytest.mark.parametrize(
    ("tensors", "grain", "step"),
    [
        ([torch.zeros(480)], TOKENS, 1.0),
        ([torch.full((480,), float("nan"))], TOKENS, 1.0),
        (mixed(TOKENS, 2), TOKENS, 0.0),
        (mixed(TOKENS, 2), TOKENS, float("nan")),
        ([torch.randn(24)], Grain.of((1, 24), (24, 1)), 1.0),
        ([torch.randn(384)], Grain.of((1, 6, 8, 8), (384, 1, 48, 6)), 1.0),
    ],
    ids=["constant", "nan", "no step", "nan step", "one token", "channels last"],
)
def test_unlearnable_input_is_reported(tensors: list[torch.Tensor], grain: Grain, step: float) -> None:
    with pytest.raises(SpecError, match="learnt|step"):
        learn(tensors, grain, step)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(-40_000, 40_000) | st.integers(-2, 2), max_size=300), st.integers(0, 20))
def test_symbols_come_back(numbers: list[int], more: int) -> None:
    import numpy as np

    clipped = np.clip(np.array(numbers, dtype=np.int32), -32_767, 32_767)
    wide = bool(len(clipped) and np.abs(clipped).max() > 127)
    data = memoryview(pack(clipped, wide))
    assert (unpack(data, len(clipped), wide) == clipped).all()
    if len(data):
        with pytest.raises(ValueError):
            unpack(memoryview(bytes(data) + b"x"), len(clipped), wide)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=80), st.integers(0, 100), st.booleans())
def test_junk_symbols_are_refused_or_as_many_as_there_are(junk: bytes, count: int, wide: bool) -> None:
    try:
        assert len(unpack(memoryview(junk), count, wide)) == count
    except ValueError:
        pass


def test_a_bomb_of_symbols_is_not_unpacked() -> None:
    import numpy as np

    bomb = pack(np.ones(50_000_000, dtype=np.int32), False)
    with pytest.raises(ValueError, match="more numbers"):
        unpack(memoryview(bomb), 1000, False)


# --- in the description of a cut


def cut_of_digits(step: float = 1.0) -> tuple[WrappedModel, torch.Tensor, EarlyOutput]:
    torch.manual_seed(0)
    wrapped = WrappedModel(digits().eval())
    images = torch.rand(12, 1, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    heads = [wrapped.forward(image, end="stage2.0") for image in images]
    crossing = heads[0].crossing
    books = tuple(
        learn([head.pieces[number] for head in heads], grain, step) for number, grain in enumerate(crossing.grains)
    )
    early = wrapped.forward(images[0], end="stage2.0")
    return wrapped, images[0], replace(early, crossing=crossing.with_books(books))


def test_both_sides_find_the_book_in_the_description() -> None:
    wrapped, image, early = cut_of_digits(0.1)
    parcel = early.pack("basis")
    assert set(parcel.codecs) == {"basis"} and parcel.nbytes * 4 < early.nbytes
    back = EarlyOutput.from_bytes(early.to_bytes("basis"))
    assert back.crossing.digest == early.crossing.digest
    assert torch.allclose(wrapped.forward(back, start=early.layer_id), wrapped.whole(image), atol=0.2)
    raw = EarlyOutput.from_bytes(early.to_bytes())  # the same description serves every codec
    assert torch.equal(wrapped.forward(raw, start=early.layer_id), wrapped.whole(image))


def test_without_books_it_goes_raw() -> None:
    wrapped, image, early = cut_of_digits()
    bare = wrapped.forward(image, end="stage2.0")
    assert set(bare.pack("basis").codecs) == {"raw"}
    parcel = early.pack("basis")
    with pytest.raises(BadFrame, match="no basis for it"):
        EarlyOutput.unpack(bare.crossing, parcel.header, b"".join(parcel.buffers))


def altered(early: EarlyOutput, change: Callable[[dict[str, Any]], Any]) -> bytes:
    data = json.loads(early.crossing.to_bytes())
    change(data["books"][0])
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda book: book.update(size=[1 << 20, 1 << 20, 1, 1]),
        lambda book: book.update(size=[32, 32, 1 << 40, 8]),
        lambda book: book.update(size=[32, 32, -8, 8]),
        lambda book: book.update(size=[32, 33, 8, 8]),
        lambda book: book.update(size=[32, 32, 1025, 1]),
        lambda book: book.update(size=[32, 32, 1024, 1024]),  # of places, not of text
        lambda book: book.update(size=[32, True, 8, 8]),
        lambda book: book.update(size="32"),
        lambda book: book.update(step=float("nan")),
        lambda book: book.update(step=0),
        lambda book: book.update(step=10**400),
        lambda book: book.update(most=-1),
        lambda book: book.update(rounding=7),
        lambda book: book.update(positive=1),
        lambda book: book.update(basis=book["basis"][:-4]),
        lambda book: book.update(basis="!" * len(book["basis"])),
        lambda book: book.update(basis=book["basis"].replace(book["basis"][:8], "AHwAfAB8")),  # infinities
        lambda book: book.update(groups="/" * len(book["groups"].rstrip("="))),
        lambda book: book.update(mean=None),
        lambda book: book.pop("mean"),
    ],
)
def test_a_strangers_book_is_refused_by_name(change: Callable[[dict[str, Any]], Any]) -> None:
    from shared_hooks.crossing import decode

    _, _, early = cut_of_digits()
    assert decode(early.crossing.to_bytes()).books  # as it is, it is one
    with pytest.raises((BadFrame, TooLarge)):
        decode(altered(early, change))


def test_the_books_of_one_cut_have_a_bound_together_and_count_for_their_places() -> None:
    from shared_hooks.crossing import decode

    one = learn(mixed(MAPS, 30), MAPS, 0.25).to_json()
    one["size"][2:] = 1024, 1024  # a text of a few hundred bytes
    form = [[1], [1], 0]
    described = json.loads(cut_of_digits()[2].crossing.to_bytes())
    described.update(marks=[], slots=[["float32", 1, False, [form]]] * 9)

    def read(number: int) -> Crossing:
        return decode(json.dumps({**described, "books": [one] * number + [None] * (9 - number)}).encode())

    rank = one["size"][1]
    assert rank <= 2
    assert read(4).working_bytes == 4 * 8 * rank << 20
    with pytest.raises(TooLarge, match="coefficients"):
        read(9)


def test_oversized_basis_is_neither_sent_nor_accepted() -> None:
    book = learn(mixed(TOKENS, 30), TOKENS, 0.25)
    many = torch.zeros(1).expand(1 << 36)  # no memory; 24 channels
    codec = Basis(book)
    assert not codec.takes(many, TOKENS) and codec.takes(many[: 24 << 10], TOKENS)
    with pytest.raises(ValueError, match="multiplications"):
        codec.check((0, 0), torch.float32, 24 << 33, 0)


@pytest.mark.parametrize("codec", ["basis", "frames", "lz4", "zstd", "shuffle-zstd", "sparse", "bf16", "int8"])
def test_a_tensor_without_elements_comes_raw_or_not_at_all(codec: str) -> None:
    """There is nothing to decode, and a codec may take memory by its parameters alone."""
    body = json.dumps({"v": 1, "meta": None, "sections": [[codec, "float32", [0, 4], [4, 1], 0, 0, [0, 0]]]}).encode()
    header = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body
    with pytest.raises(BadFrame, match="without elements|unknown codec"):
        Parcel.tensors(header, b"")


@pytest.mark.parametrize("params", [[], [0], [2, 4], [0, -1], [0, 1, 2], [0, 10**9], [0, 1.0], ["0", "1"], [0] * 9])
def test_a_strangers_parameters_are_refused(params: list[Any]) -> None:
    _, _, early = cut_of_digits()
    codec = early.crossing.bound[0]["basis"]
    piece = early.pieces[0]
    with pytest.raises(ValueError):
        codec.check(tuple(params), piece.dtype, piece.numel(), 4)
    with pytest.raises(ValueError):
        codec.check((0, 4), piece.dtype, piece.numel() + 1, 4)
    codec.check((0, 4), piece.dtype, piece.numel(), 4)
