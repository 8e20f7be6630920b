"""Every codec on every form of tensor: the very bits, or numbers within what the codec promises, or raw and said so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared_hooks import Parcel
from shared_hooks.codecs import CODECS, Grain

BOUND = ("basis", "frames")  # need more than the tensor
LOSSY = [codec for codec in CODECS.values() if not codec.lossless and codec.name not in BOUND]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1e-310, 3.4e38, -65504.0, 1e300]
VALUES = ["relu", "normal", "zeros", "constant", "special", "wide"]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], values: str, seed: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=dice, dtype=torch.float64)
    if values == "relu":
        found = found.relu()
    elif values == "zeros":
        found = torch.zeros(shape, dtype=torch.float64)
    elif values == "constant":
        found = torch.full(shape, -0.7, dtype=torch.float64)
    elif values == "wide":
        found = found * 10.0 ** torch.randint(-30, 30, shape, generator=dice)
    elif values == "special" and found.numel():
        found.view(-1)[seed % found.numel()] = SPECIAL[seed % len(SPECIAL)]
    return (found if dtype.is_floating_point or dtype.is_complex else found.nan_to_num(0, 0, 0) * 40).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def carried(tensor: torch.Tensor, codec: str) -> tuple[torch.Tensor, str]:
    parcel = Parcel.of_tensors(None, [tensor], codec)
    _, [found] = Parcel.tensors(parcel.header, b"".join(parcel.buffers))
    assert found.dtype is tensor.dtype and found.shape == tensor.shape
    return found, parcel.codecs[0]


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.sampled_from(list(CODECS)),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (0,), (3, 0, 2), (1, 64, 8, 8), (2, 5, 48)]) | st.lists(st.integers(1, 12), max_size=5),
    st.sampled_from(VALUES),
    st.integers(0, 1000),
)  # fmt: skip
def test_round_trip(codec: str, dtype: torch.dtype, shape: list[int], values: str, seed: int) -> None:
    tensor = tensor_of(dtype, tuple(shape), values, seed)
    found, used = carried(tensor, codec)
    if CODECS[used].lossless:
        assert bits(found) == bits(tensor)
        return
    assert used == codec and tensor.is_floating_point()
    given, got = tensor.double(), found.double()
    if used in ("bf16", "fp16"):
        expected = tensor.to({"bf16": torch.bfloat16, "fp16": torch.float16}[used]).to(dtype)
        assert torch.equal(expected.isnan(), found.isnan()) and torch.equal(expected.nan_to_num(), found.nan_to_num())
        return
    assert torch.isfinite(found).all()
    largest = float(given.abs().max())
    allowed = {"int8": 1 / 127, "int6": 1 / 31}.get(used, 1.0)  # fewer bits clip
    assert float((got - given).abs().max()) <= largest * allowed


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "int1"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_uncodable_tensor_is_sent_raw_and_marked(name: str, value: float) -> None:
    tensor = torch.randn(1, 16, 16, 16)
    tensor[0, 3, 4, 5] = value
    found, used = carried(tensor, name)
    assert used == ("bf16" if name == "bf16" else "raw")
    assert found.isnan().sum() == tensor.isnan().sum() and found.isinf().sum() == tensor.isinf().sum()


def test_a_number_too_large_for_16_bits_is_sent_raw() -> None:
    tensor = torch.ones(1000)
    assert carried(tensor, "fp16")[1] == "fp16"
    tensor[7] = 1e6
    assert carried(tensor, "fp16")[1] == "raw"


@pytest.mark.parametrize("shape", [(2, 24, 16, 16), (3, 20, 96)])
@pytest.mark.parametrize("name", ["sparse", "int8", "int4", "int1"])
def test_the_order_in_memory_arrives_too(name: str, shape: tuple[int, ...]) -> None:
    plain = torch.randn(shape).relu()
    other = plain.transpose(1, -1).contiguous().transpose(1, -1)
    found, used = carried(other, name)
    assert used == name and found.stride() == other.stride()
    error, usual = (found - plain).norm(), (carried(plain, name)[0] - plain).norm()
    assert error == 0 if name == "sparse" else error <= 1.5 * usual


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_the_same_tensor_gives_the_same_bytes_and_the_same_bits(codec: object) -> None:
    tensor = torch.randn(40, 100, generator=torch.Generator().manual_seed(3))
    name = codec.name  # type: ignore[attr-defined]
    one, other = (Parcel.of_tensors(None, [tensor], name) for _ in range(2))
    assert one.header == other.header
    moved = bytearray(b"".join(one.buffers))
    first, second = (Parcel.tensors(one.header, data)[1][0] for data in (moved, bytes(moved)))
    assert bits(first) == bits(second)


def test_many_elements_are_worked_on_in_parts() -> None:
    """More than are worked on at a time, in each form: all of it as if it were done at once."""
    for shape in ((1, 3, 300, 300), (70, 4, 40, 40), (3000, 128), (300_000,)):
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        found, _ = carried(tensor, "int8")
        assert float((found - tensor).abs().max()) < 6 / 127
        assert torch.equal(carried(tensor.relu(), "sparse")[0], tensor.relu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "int3", "int2", "int1", "sparse"])
def test_gpu_tensor_is_coded_on_the_gpu(name: str) -> None:
    tensor = torch.randn(2, 32, 24, 24, generator=torch.Generator().manual_seed(1)).relu()
    flat = tensor.view(-1)
    grain = Grain.of(tuple(tensor.shape), tuple(tensor.stride()))
    here, there = CODECS[name].encode(flat, grain), CODECS[name].encode(flat.cuda(), grain)
    assert here is not None and there is not None
    one, other = (CODECS[name].decode(coded.data, coded.params, flat.dtype, len(flat)) for coded in (here, there))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # sums come in another order there, so that a step may be the next one
        assert float((one - other).norm() / one.norm()) < 0.1
    else:
        assert bytes(one) == bytes(other)  # type: ignore[arg-type]
