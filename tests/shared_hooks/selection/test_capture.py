"""What is captured equals direct computation, everywhere and in boxes; the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared_hooks.errors import CutRefused, InputMismatch, SpecError
from shared_hooks.models import load_spec
from shared_hooks.selection import Sample, capture
from shared_hooks.selection.capture import Box, place_of
from tests.shared_hooks.selection.networks import (
    Chain,
    ChannelsLast,
    Residual,
    Sequence1d,
    Tokens,
    image,
    samples,
    seeded,
)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_numbers_are_those_of_the_activations() -> None:
    model = seeded(Chain())
    captured = capture(model, "norm", samples())
    with torch.inference_mode():
        made = model.norm(model.first(torch.cat([image(seed) for seed in range(8)]))).double()  # type: ignore[operator]
    torch.testing.assert_close(captured.mean, made.mean((0, 2, 3)))
    torch.testing.assert_close(captured.fill, made.mean((0, 2, 3)))
    torch.testing.assert_close(captured.magnitude, made.abs().mean((0, 2, 3)))
    torch.testing.assert_close(captured.variance, made.var((0, 2, 3), correction=0))
    torch.testing.assert_close(captured.rows, made.mean((2, 3)))
    assert captured.labels == ("0", "1") * 4 and captured.channels == 8 and hooks(model) == 0


def test_a_batch_counts_as_its_rows() -> None:
    model = seeded(Chain())
    one = capture(model, "second", samples())
    batch = Sample((torch.cat([image(seed) for seed in range(8)]),), {}, [str(seed % 2) for seed in range(8)])
    many = capture(model, "second", [batch])
    torch.testing.assert_close(one.rows, many.rows, atol=1e-6, rtol=1e-6)
    assert one.labels == many.labels


def test_boxes_are_looked_into_and_the_fill_stays_everywhere() -> None:
    model = seeded(Chain())
    inputs = [
        Sample((image(seed),), boxes=[Box(4, 0, 8, 6, "a"), Box(0, 0, 16, 16, "b")][: seed % 3]) for seed in range(4)
    ]
    captured = capture(model, "first", inputs)
    with torch.inference_mode():
        made = [model.first(image(seed)).double()[0] for seed in range(4)]  # type: ignore[operator]
    places = [made[1][:, 0:6, 4:8], made[2][:, 0:6, 4:8], made[2]]
    torch.testing.assert_close(captured.rows, torch.stack([place.mean((1, 2)) for place in places]))
    assert captured.labels == ("a", "a", "b")
    torch.testing.assert_close(captured.magnitude, torch.cat([p.flatten(1) for p in places], 1).abs().mean(1))
    torch.testing.assert_close(captured.fill, torch.stack(made).mean((0, 2, 3)))


def test_channels_come_last_in_tokens() -> None:
    model = seeded(Tokens())
    x = torch.randn(2, 5, 6)
    captured = capture(model, "embed", [Sample((x,), {}, ("a", "b"))])
    torch.testing.assert_close(captured.mean, model.embed(x).detach().double().mean((0, 1)))  # type: ignore[operator]
    assert captured.dim == -1 and captured.channels == 8


@pytest.mark.parametrize(
    ("model", "layer", "shape", "dim", "channels"),
    [
        (Sequence1d, "relu", (2, 3, 20), 1, 8),
        (ChannelsLast, "gelu", (1, 3, 8, 8), -1, 24),
        (ChannelsLast, "norm", (1, 3, 8, 8), -1, 8),
        (ChannelsLast, "after", (1, 3, 8, 8), 1, 8),
        (ChannelsLast, "after", (1, 3, 6, 7), 1, 8),
        (Tokens, "embed", (2, 8, 6), -1, 8),
    ],
)
def test_channels_are_where_the_layers_before_have_them(
    model: type[nn.Module], layer: str, shape: tuple[int, ...], dim: int, channels: int
) -> None:
    captured = capture(seeded(model()), layer, [Sample((torch.randn(shape),))])
    assert (captured.dim, captured.channels) == (dim, channels)


def test_a_call_that_ends_a_block_stands_for_the_block() -> None:
    spec = load_spec("digits")
    example = spec.example()
    assert example is not None
    sample = Sample(*example)
    model = spec.load_model()
    assert place_of(model, "stage2.0.relu#2", sample) == ("stage2.0", 1)
    assert place_of(model, "stage2.0.conv1", sample) == ("stage2.0.conv1", 1)
    with pytest.raises(CutRefused, match="runs 2 times"):
        place_of(model, "stage2.0.relu", sample)
    assert hooks(model) == 0


def test_uncapturable_code_is_named() -> None:
    model = seeded(Residual())
    with pytest.raises(SpecError, match="nothing: it did not run"):
        capture(model, "nothing", samples(1))
    with pytest.raises(SpecError, match="did not run"):
        capture(model, "relu#3", samples(1))
    with pytest.raises(InputMismatch, match="no calibration inputs"):
        capture(model, "stem", [])
    with pytest.raises(InputMismatch, match="has a box"):
        capture(model, "stem", [Sample((image(),), boxes=[])])
    with pytest.raises(InputMismatch, match="2 labels for a batch of 1"):
        capture(model, "stem", [Sample((image(),), {}, ("a", "b"))])
    with pytest.raises(InputMismatch, match="NaN or Inf in channels"):
        capture(model, "stem", [Sample((image() * torch.inf,))])
    with pytest.raises(InputMismatch, match="boxes need an image"):
        capture(seeded(Tokens()), "embed", [Sample((torch.zeros(1, 5, 6),), boxes=[Box(0, 0, 1, 1, "a")])])
    with pytest.raises(RuntimeError):
        capture(model, "stem", [Sample((torch.zeros(1, 4, 2, 2),))])
    assert hooks(model) == 0
