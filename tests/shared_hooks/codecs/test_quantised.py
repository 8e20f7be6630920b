"""What few bits keep: each channel's and each token's own scale, zeros, and what lies far outside."""

from __future__ import annotations

import hashlib

import pytest
import torch

from shared_hooks import Parcel
from shared_hooks.codecs import CODECS, codec
from shared_hooks.codecs.quantised import Levels, restored, rounded

DICE = torch.Generator().manual_seed(5)
MAP = torch.distributions.Laplace(0.0, 1.0).sample((2, 16, 20, 20)).relu()
TOKENS = torch.randn(1, 60, 256, generator=DICE)
WRITTEN = ["0x1.4bfdae0000000p+1", "0x1.e45b3a0000000p+2", "0x1.4bfdae0000000p-1", "0x1.974b220000000p-1"]
DIGEST = "95dd19796df7c289"
BITS = (8, 6, 5, 4, 3, 2, 1)


def there_and_back(tensor: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
    parcel = Parcel.of_tensors(None, [tensor], f"int{bits}")
    assert parcel.codecs == (f"int{bits}",)
    return Parcel.tensors(parcel.header, b"".join(parcel.buffers))[1][0], parcel.nbytes


def error(tensor: torch.Tensor, found: torch.Tensor) -> float:
    return float((found - tensor).norm() / tensor.norm())


@pytest.mark.parametrize("tensor", [MAP, TOKENS], ids=["map", "tokens"])
def test_more_bits_lose_less_and_take_more(tensor: torch.Tensor) -> None:
    carried = [there_and_back(tensor, bits) for bits in BITS]
    errors, sizes = [error(tensor, found) for found, _ in carried], [size for _, size in carried]
    assert errors == sorted(errors) and sizes == sorted(sizes, reverse=True)
    assert errors[0] < 0.015 and errors[3] < 0.14 and errors[-1] < 0.65
    assert all(size * 8 <= tensor.numel() * (bits + 0.3) for size, bits in zip(sizes, BITS, strict=True))


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_zeros_of_relu_stay_zero_without_a_sign_bit(bits: int) -> None:
    found, _ = there_and_back(MAP, bits)
    assert float(found.min()) == 0.0 and bool((found[MAP == 0] == 0).all())
    signed = MAP - 1e-6
    assert error(MAP, found) < 0.8 * error(signed, there_and_back(signed, bits)[0])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("tensor", [MAP, TOKENS], ids=["channels", "tokens"])
def test_a_small_channel_or_token_beside_a_large_one_loses_no_more(tensor: torch.Tensor, bits: int) -> None:
    sizes = torch.logspace(-4, 4, tensor.shape[1]).view(-1, *(1,) * (tensor.dim() - 2))
    found, _ = there_and_back(tensor * sizes, bits)
    usual, _ = there_and_back(tensor, bits)
    for number in range(tensor.shape[1]):
        part = tensor.select(1, number)
        assert error(part, (found / sizes).select(1, number)) < 1.15 * error(part, usual.select(1, number))


@pytest.mark.parametrize("bits", [8, 6, 4, 3])
def test_outliers_are_exact_and_leave_neighbours_precise(bits: int) -> None:
    far = TOKENS.clone()
    far[:, 3::20, 7] = 1000.25
    far[:, 5, 100] = -512.5
    found, size = there_and_back(far, bits)
    outside = far.abs() > 100
    assert torch.equal(found[outside], far[outside])
    plain, plain_size = there_and_back(TOKENS, bits)
    assert error(far[~outside], found[~outside]) < 1.1 * error(TOKENS, plain)
    assert size < plain_size + 64 + 16 * int(outside.sum())


def test_where_many_lie_far_outside_none_is_kept_apart() -> None:
    tensor = torch.zeros(1, 1, 100, 100)
    tensor.view(-1)[::100] = 50.0
    tensor.view(-1)[1::100] = 1e-3
    found, size = there_and_back(tensor, 8)
    assert error(tensor, found) < 0.01 and size < 2000


@pytest.mark.parametrize(("kind", "column"), [("laplace", 0), ("normal", 1)])
@pytest.mark.parametrize("levels", codec.STEPS)
def test_no_other_step_has_a_smaller_error(levels: int, kind: str, column: int) -> None:
    """Each constant is where the squared error, integrated over the distribution's quantiles, is least."""
    at = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    values = -torch.log1p(-at) if kind == "laplace" else torch.erfinv(at) * 2**0.5
    values /= values.mean()

    def loss(step: float) -> float:
        return float(((values / step).round().clamp(0, levels) * step - values).square().mean())

    best = codec.STEPS[levels][column]
    assert loss(best) < min(loss(best * 0.97), loss(best * 1.03))
    one = torch.ones(1)
    square = torch.tensor([float(values.square().mean())])
    found = codec.best_step(one, square, one * 1e9, levels)
    assert float(found) == pytest.approx(best, rel=0.01)


def test_steps_are_the_next_larger_eighth_of_an_octave() -> None:
    wanted = torch.tensor([1.0, 0.3, 0.0, 1e-3, 7.0])
    chosen = codec.chosen(wanted)
    assert chosen is not None
    sized = torch.from_numpy(codec.sized(*chosen))
    assert bool((sized >= wanted).all()) and bool((sized[[0, 1, 3, 4]] < wanted[[0, 1, 3, 4]] * 1.0906).all())
    assert codec.chosen(torch.tensor([1e-35])) is None and codec.chosen(torch.tensor([1e35])) is None
    assert codec.chosen(torch.zeros(3)) is not None


def test_a_rounded_number_is_the_nearest_level() -> None:
    values = torch.linspace(-5, 5, 4001).view(1, 1, -1)
    step = torch.full((1, 1, 1), 0.25)
    for levels in (Levels.of(4, True), Levels.of(8, True), Levels.of(3, False), Levels.of(1, True)):
        symbols = rounded(values, step, levels)
        found = restored(symbols.to(torch.float32).view(1, 1, -1), step, levels)
        low, high = -levels.zero * 0.25, (levels.top - levels.zero) * 0.25
        inside = values.clamp(low, high)
        assert float((found - inside).abs().max()) <= 0.125 + 1e-6
        assert float(found.min()) == max(low, float(found.min())) and float(found.max()) <= high


def test_stored_bytes_decode_to_the_stored_numbers() -> None:
    """On every machine: four channels of 16 elements with four bits each, three of them with odd steps."""
    symbols = bytes(range(1, 33))
    payload = memoryview(bytes([8, 0, 5, 16, 31, 0, 0, 64]) + symbols)
    params = (1, 4, 16, 0, 3, 0)
    codec = CODECS["int4"]
    codec.check(params, torch.float32, 64, len(payload))
    found = codec.decode(payload, params, torch.float32, 64)
    assert isinstance(found, torch.Tensor)
    digest = hashlib.sha256(found.numpy().astype("<f4").tobytes()).hexdigest()
    assert [float(one).hex() for one in found[[2, 16, 34, 48]]] == WRITTEN and digest.startswith(DIGEST)
