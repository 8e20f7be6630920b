"""What a stranger may send as a codec's parameters and bytes: refused by ValueError, before memory is taken."""

from __future__ import annotations

import random
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

from shared_hooks.codecs import CODECS, Codec, Param
from shared_hooks.codecs import codec as lossless
from shared_hooks.codecs.codec import GROWS, LARGEST, SMALLEST, compressed, decompressed
from tests.shared_hooks.codecs.bound import ALL, GRAIN, MAP

FLOAT = torch.float32
QUANTISED = [codec for codec in ALL if codec.name.startswith("int")]
N = MAP.numel()


def honest(codec: Codec) -> tuple[bytes, tuple[Param, ...]]:
    coded = codec.encode(MAP.view(-1), GRAIN)
    assert coded is not None
    return bytes(coded.data), coded.params


def tried(codec: Codec, data: bytes, params: tuple[Param, ...], dtype: torch.dtype = FLOAT, elements: int = N) -> bool:
    """Whether it was taken, and then gave as many elements as were announced."""
    try:
        codec.check(params, dtype, elements, len(data))
        found = codec.decode(memoryview(data), params, dtype, elements)
    except ValueError:
        return False
    if isinstance(found, torch.Tensor):
        assert found.dtype is dtype and found.shape == (elements,)
    else:
        assert len(found) <= max(elements * dtype.itemsize, len(data))
    return True


def by_name(codec: Codec) -> str:
    return codec.name


@pytest.mark.parametrize("codec", ALL, ids=by_name)
def test_every_truncation_and_extension_of_bytes_is_refused(codec: Codec) -> None:
    data, params = honest(codec)
    assert tried(codec, data, params)
    for size in [*range(min(len(data), 300)), *range(300, len(data), 97), len(data) - 1]:
        assert not tried(codec, data[:size], params)
    if codec.name not in ("lz4", "shuffle-lz4"):  # the block format has no end, but its size was announced
        assert not tried(codec, data + b"\0", params)


@pytest.mark.parametrize("codec", ALL, ids=by_name)
def test_altered_bytes_give_what_was_announced_or_are_refused(codec: Codec) -> None:
    data, params = honest(codec)
    dice = random.Random(4)
    for _ in range(400):
        altered = bytearray(data)
        for _ in range(dice.choice([1, 1, 2, 20])):
            altered[min(int(dice.expovariate(0.01)), len(data) - 1)] = dice.randrange(256)
        tried(codec, bytes(altered), params)
    for size in range(1, 200):
        tried(codec, dice.randbytes(size), params)


_NUMBERS: list[Param] = [-1, 0, 1, 2, 3, 255, N, N + 1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), 0.5, "1"]


@pytest.mark.parametrize("codec", ALL, ids=by_name)
def test_other_parameters_give_what_was_announced_or_are_refused(codec: Codec) -> None:
    data, params = honest(codec)
    for other in ((), params[:-1], (*params, 0), (0,) * 16, ("",) * 6):
        assert other == params or not tried(codec, data, other)
    for at in range(len(params)):
        for number in _NUMBERS:
            tried(codec, data, (*params[:at], number, *params[at + 1 :]))
            assert type(number) is int or not tried(codec, data, (*params[:at], number, *params[at + 1 :]))


@pytest.mark.parametrize("codec", ALL, ids=by_name)
def test_so_few_bytes_never_announce_so_much(codec: Codec) -> None:
    """100 bytes cannot make the other side take a gigabyte, whatever parameters come with them."""
    _, params = honest(codec)
    for elements in (1 << 28, 1 << 36, 1 << 47):
        for other in (
            params,
            (0, 1, elements, 0, 0, 0),
            (2, 1, elements, 0, 0, 0),
            (1, elements, 1, 0, 0, 0),
            (elements,),
        ):
            with pytest.raises(ValueError):
                codec.check(other, FLOAT, elements, 100)


@pytest.mark.parametrize("codec", [codec for codec in ALL if not codec.lossless], ids=by_name)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_numbers_that_are_no_floats_are_never_coded_with_a_loss(codec: Codec, dtype: torch.dtype) -> None:
    data, params = honest(codec)
    assert not tried(codec, data, params, dtype)


@pytest.mark.parametrize("codec", QUANTISED, ids=by_name)
def test_steps_that_are_no_numbers_cannot_be_named(codec: Codec) -> None:
    data, params = honest(codec)
    for top in (SMALLEST - 1, LARGEST + 1, 1 << 40, 1e300):
        assert not tried(codec, data, (*params[:4], top, *params[5:]))
    for top in (SMALLEST, LARGEST):
        found = codec.decode(memoryview(data), (*params[:4], top, *params[5:]), FLOAT, N)
        assert isinstance(found, torch.Tensor) and bool(torch.isfinite(found).all())


def test_a_symbol_beyond_its_range_is_refused() -> None:
    """Four bits with sign have 15 levels, 0 to 14."""

    def whole(byte: int) -> bytes:
        return bytes(lossless.joined([_bytes(b"\0"), _bytes(b""), _bytes(b""), _bytes(bytes([byte]) * 64)]))

    params = (0, 1, 128, 1, 0, 0)
    assert tried(CODECS["int4"], whole(0xEE), params, elements=128)
    assert not tried(CODECS["int4"], whole(0xEF), params, elements=128)
    assert tried(CODECS["int8"], whole(254), (0, 1, 64, 1, 0, 0), elements=64)
    assert not tried(CODECS["int8"], whole(255), (0, 1, 64, 1, 0, 0), elements=64)


@pytest.mark.parametrize(
    ("where", "numbers"),
    [([512], [1.0]), ([5, 5], [1.0, 2.0]), ([7, 3], [1.0, 2.0]), ([1], [float("nan")]), ([1], [float("inf")])],
)
def test_outliers_have_unique_places_and_finite_values(where: list[int], numbers: list[float]) -> None:
    def whole(where: list[int], numbers: list[float]) -> bytes:
        places = torch.tensor(where, dtype=torch.int32).numpy().tobytes()
        values = torch.tensor(numbers).numpy().tobytes()
        return bytes(lossless.joined([_bytes(b"\0"), _bytes(places), _bytes(values), _bytes(bytes(512))]))

    assert tried(CODECS["int8"], whole([3, 5], [1.0, 2.0]), (0, 1, 512, 0, 0, 2), elements=512)
    assert not tried(CODECS["int8"], whole(where, numbers), (0, 1, 512, 0, 0, len(where)), elements=512)


@pytest.mark.parametrize(
    "params", [(1, 1 << 16, 1, 0, 0, 0), (2, 1, 1, 0, 0, 0), (2, 8, 1, 0, 0, 0), (0, 1, 1, 0, 0, (1 << 8) + 1)]
)
def test_steps_and_elements_kept_apart_are_few(params: tuple[int, ...]) -> None:
    """They take some twenty bytes each while they are read, compressed a thousandth of one."""
    for codec in QUANTISED:
        with pytest.raises(ValueError, match="never sent"):
            codec.check(params, torch.float16, 1 << 16, 1 << 16)


def test_a_mask_has_as_many_places_as_elements_that_are_not_zero() -> None:
    data, (kept,) = honest(CODECS["sparse"])
    assert isinstance(kept, int)
    for other in (kept - 1, kept + 1, 0, N):
        assert not tried(CODECS["sparse"], data, (other,))
    assert not tried(CODECS["sparse"], data, (kept,), elements=N + 8)


@pytest.mark.parametrize("size", [b"\xff" * 20, b"\x80" * 8 + b"\1", b"\xff\xff\xff\xff\xff\xff\x7f", b""])
def test_sizes_of_sections_that_are_no_sizes_are_refused(size: bytes) -> None:
    with pytest.raises(ValueError):
        lossless.parted(memoryview(size + b"data"), [4])


def _frame(content: int, window_log: int, body: bytes) -> bytes:
    """A frame that names its content's size and a window of its own."""
    return b"\x28\xb5\x2f\xfd\x80" + bytes([window_log - 10 << 3]) + content.to_bytes(4, "little") + body


def test_a_window_of_gigabytes_is_not_made() -> None:
    """In a process of its own, whose memory is looked at from outside."""
    repeated = (1 | 1 << 1 | 1000 << 3).to_bytes(3, "little") + b"x"
    frames = [_frame(1000, log, body) for log in (20, 27, 30, 31, 37, 41) for body in (repeated, b"\1\0\0", b"")]
    code = (
        "import resource, sys\n"
        "from shared_hooks.codecs.codec import decompressed\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"for frame in {frames!r}:\n"
        "    try:\n"
        "        decompressed(memoryview(frame), 1000)\n"
        "    except ValueError:\n"
        "        pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 4 << (0 if sys.platform == "linux" else 10) << 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def test_a_frame_that_says_another_size_is_refused() -> None:
    frame = compressed(memoryview(bytes(5000)))
    assert bytes(decompressed(frame, 5000)) == bytes(5000)
    for size in (1, 4999, 5001, 1 << 40):
        with pytest.raises(ValueError):
            decompressed(frame, size)


def test_nothing_of_ours_grows_more_than_it_may() -> None:
    for size in (1 << 20, 1 << 24):
        assert len(compressed(memoryview(bytes(size)))) * GROWS >= size


def _bytes(data: bytes) -> lossless.Bytes:
    return np.frombuffer(data, dtype=np.uint8)
