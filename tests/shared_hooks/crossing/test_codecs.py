"""Every codec of the list: what is encoded comes back, and strangers' bytes take no more memory than is asked for."""

from __future__ import annotations

import json
import os
import random
import tracemalloc

import pytest
import torch
import xxhash

from shared_hooks import Parcel, WrappedModel
from shared_hooks.codecs import CODECS, RAW, Codec, Grain, Param, check
from shared_hooks.errors import BadFrame, SpecError
from tests.shared_hooks.cutting import case_of

LOSSLESS = [codec for codec in CODECS.values() if codec.lossless]
SMALLER = [codec for codec in LOSSLESS if codec is not RAW]
DATA = [b"\0" * 100_000, bytes(range(256)) * 300, random.Random(1).randbytes(5000), b"x"]
BYTE = torch.uint8


def flat(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=BYTE)


def encoded(codec: Codec, data: bytes) -> tuple[bytes, tuple[Param, ...]]:
    coded = codec.encode(flat(data), Grain(1, len(data), 1, False))
    assert coded is not None
    return bytes(coded.data), coded.params


def decoded(codec: Codec, data: bytes, params: tuple[Param, ...], nbytes: int) -> memoryview:
    codec.check(params, BYTE, nbytes, len(data))
    found = codec.decode(memoryview(data), params, BYTE, nbytes)
    return memoryview(found.numpy()) if isinstance(found, torch.Tensor) else found  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", LOSSLESS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("data", DATA, ids=len)
def test_there_and_back(codec: Codec, data: bytes) -> None:
    small, params = encoded(codec, data)
    assert bytes(decoded(codec, small, params, len(data))) == data


@pytest.mark.parametrize("codec", SMALLER, ids=lambda codec: codec.name)
def test_decoded_tensor_is_writable(codec: Codec) -> None:
    assert not decoded(codec, *encoded(codec, DATA[0]), len(DATA[0])).readonly


@pytest.mark.parametrize("codec", SMALLER, ids=lambda codec: codec.name)
def test_a_bomb_takes_no_more_than_it_announces(codec: Codec) -> None:
    bomb, params = encoded(codec, b"\0" * (32 << 20))
    for nbytes in (0, 1, 1000, 1 << 16):
        tracemalloc.start()
        with pytest.raises(ValueError):
            decoded(codec, bomb, params, nbytes)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * nbytes + (256 << 10), nbytes


@pytest.mark.parametrize("codec", SMALLER, ids=lambda codec: codec.name)
def test_junk_is_refused_or_has_the_size_it_announces(codec: Codec) -> None:
    dice = random.Random(2)
    honest, params = encoded(codec, DATA[1])
    junk = [
        b"",
        b"\0",
        *(dice.randbytes(size) for size in range(1, 200)),
        *(honest[:size] for size in range(0, 200, 7)),
    ]
    junk += [honest[:at] + os.urandom(3) + honest[at + 3 :] for at in range(0, len(honest) - 3, 11)]
    for data in junk:
        for nbytes in (0, 1, 50, len(DATA[1])):
            try:
                found = decoded(codec, data, params, nbytes)
            except ValueError:
                continue
            assert len(found) <= nbytes


@pytest.mark.parametrize(
    "params", [[0], ["x" * 65], [None], [[1]], [True], list(range(17)), "text", {"a": 1}, [1 << 63], [float("inf")]]
)
def test_parameters_that_no_codec_has_are_refused(params: object) -> None:
    parcel = Parcel.of_tensors(None, [torch.zeros(1000)], "lz4")
    body = json.loads(parcel.header[8:])
    body["sections"][0].append(params)
    with pytest.raises(BadFrame):
        Parcel.tensors(_signed(json.dumps(body).encode()), b"".join(parcel.buffers))


def test_crossing_tensor_names_its_channel_dimension() -> None:
    assert Grain.of((2, 8, 4, 4), (128, 16, 4, 1)) == Grain(2, 8, 16, True, 4)
    assert Grain.of((2, 8, 4, 4), (128, 1, 32, 8)) == Grain(32, 8, 1, True)
    assert Grain.of((2, 5, 7), (35, 7, 1)) == Grain(10, 7, 1, False)
    assert Grain.of((), ()).elements == 1 and Grain.of((0, 3), (3, 1)).elements == 0
    case = case_of("residual")
    args, kwargs = case.inputs()
    wrapped = WrappedModel(case.build())
    wrapped.plan(*args, **kwargs)
    for cut in range(3):
        early = wrapped.forward(*args, end=cut, **kwargs)
        assert [grain.elements for grain in early.crossing.grains] == [piece.numel() for piece in early.pieces]


def test_incompressible_tensor_is_sent_raw() -> None:
    noise = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for codec in CODECS:
        parcel = Parcel.of_tensors(None, [noise, torch.empty(0)], codec)
        assert parcel.header.count(b'"raw"') == 2
        assert torch.equal(Parcel.tensors(parcel.header, b"".join(parcel.buffers))[1][0], noise)


def test_an_empty_tensor_by_any_codec() -> None:
    """A section of one byte for a tensor without elements: refused, or an empty tensor, by no other error."""
    for name in CODECS:
        parcel = Parcel.of_tensors(None, [torch.zeros(1, dtype=torch.uint8)])
        body = parcel.header[8:].replace(b'"raw","uint8",[1]', f'"{name}","uint8",[0]'.encode())
        header = _signed(body)
        try:
            _, [tensor] = Parcel.tensors(header, b"".join(parcel.buffers))
        except BadFrame:
            continue
        assert tensor.numel() == 0


def _signed(body: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body


def test_an_unknown_one_is_reported_with_those_there_are() -> None:
    with pytest.raises(SpecError, match=f'codec="zip": must be one of {", ".join(CODECS)}'):
        check("zip")
