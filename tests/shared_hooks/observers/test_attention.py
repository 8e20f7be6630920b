"""Attention weights against direct computation: eager, fast kernels, and PyTorch's own module."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.errors import InputMismatch, UnknownLayer
from shared_hooks.observers import Attention, AttentionCapture, heat_map, save_heat_map
from shared_hooks.observers.kinds.attention import weights_of
from tests.shared_hooks.observers.left import hooks_left
from tests.shared_hooks.observers.small import Functional, Residual, bert, gpt2

IDS = torch.arange(14).reshape(2, 7)
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> AttentionCapture:
    with torch.no_grad():
        expected = model(*args, **kwargs)
        with AttentionCapture().attach(model) as attention:
            found = model(*args, **kwargs)
    assert torch.equal(_first(found), _first(expected)) and not attention.failures, attention.last_failure
    assert not hooks_left(model)
    return attention


def _first(output: Any) -> torch.Tensor:
    value = output if isinstance(output, torch.Tensor) else output[0]
    assert isinstance(value, torch.Tensor)
    return value


@pytest.mark.parametrize("make", [bert, gpt2])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_the_weights_of_transformers_models_are_those_they_give_when_asked(make: Any, kernel: str) -> None:
    eager = make(attn_implementation="eager")
    with torch.no_grad():
        expected = eager(IDS, attention_mask=MASK, output_attentions=True).attentions
    attention = captured(make(attn_implementation=kernel), IDS, attention_mask=MASK)
    assert len(attention.records) == len(expected) == 2
    for record, weights in zip(attention.records, expected, strict=True):
        assert record.weights is not None and record.shape == tuple(weights.shape) == (2, 2, 7, 7)
        torch.testing.assert_close(record.weights, weights, rtol=1e-4, atol=1e-5)
        _check_summary(record)
    assert ("computed again" in " ".join(attention.notes)) == (kernel == "sdpa")


def _check_summary(record: Attention) -> None:
    assert record.weights is not None
    weights = record.weights.double()
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1).mean((0, 2))
    assert record.entropy == pytest.approx(entropy.tolist(), rel=1e-3, abs=1e-5)
    assert record.maximum == pytest.approx(weights.amax((0, 2, 3)).tolist())
    top = weights.mean((0, 1, 2)).topk(len(record.positions))
    assert [mean for _, mean in record.positions] == pytest.approx(top.values.tolist())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_the_weights_of_a_multihead_attention(batch_first: bool, need_weights: bool) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first).eval()
    x = torch.randn(3, 3, 8)
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
    kwargs = {"need_weights": need_weights, "attn_mask": mask}
    attention = captured(module, x, x, x, **kwargs)
    with torch.no_grad():
        expected = module(x, x, x, need_weights=True, average_attn_weights=False, attn_mask=mask)[1]
    (record,) = attention.records
    assert record.name == "(model)" and record.shape == (3, 2, 3, 3)
    torch.testing.assert_close(record.weights, expected)


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_fused_kernel_of_an_encoder_layer_is_seen_through(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first).eval()
    x = torch.randn(2, 5, 8)
    attention = captured(layer, x)
    y = layer.norm1(x) if norm_first else x
    expected = layer.self_attn(y, y, y, average_attn_weights=False)[1]
    (record,) = attention.records
    assert record.name == "self_attn"
    torch.testing.assert_close(record.weights, expected.detach())
    assert any("fused kernel" in note for note in attention.notes)
    # inside Isthmus the fused kernel is off, and the attention is called
    with WrappedModel(layer) as wrapped, AttentionCapture().attach(wrapped) as again:
        wrapped.forward(x)
    (same,) = again.records
    torch.testing.assert_close(same.weights, record.weights)


def test_padding_in_a_fused_encoder_is_seen_through() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nested tensors are a prototype
        attention = captured(model, x, src_key_padding_mask=padding)
    with WrappedModel(model) as wrapped, AttentionCapture().attach(wrapped) as slow:
        wrapped.forward(x, src_key_padding_mask=padding)
    assert [record.name for record in attention.records] == ["layers.0.self_attn", "layers.1.self_attn"]
    for fast, record in zip(attention.records, slow.records, strict=True):
        assert fast.weights is not None and record.weights is not None
        for row, length in enumerate((5, 3)):  # rows of what is padding mean nothing
            torch.testing.assert_close(fast.weights[row, :, :length], record.weights[row, :, :length])


def test_functional_attention_is_seen_in_the_module_that_is_named() -> None:
    model = Functional()
    with pytest.raises(UnknownLayer, match="no module of this model is called attention"):
        AttentionCapture().attach(Residual())
    with AttentionCapture("(model)", keep_weights=False, top=2).attach(model) as attention:
        model(torch.randn(2, 6, 8))
    (record,) = attention.records
    assert record.shape == (2, 2, 6, 6) and record.weights is None and len(record.positions) == 2
    # causal: the first query looks at the first key alone
    assert record.maximum == (1.0, 1.0) and record.positions[0][0] == 0
    with pytest.raises(InputMismatch, match="were not kept"):
        heat_map(record)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
@pytest.mark.parametrize("gqa", [True, False])
def test_weights_are_what_the_kernel_multiplies_with(mask: str, gqa: bool) -> None:
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2 if gqa else 4, 5, 8)
    value = torch.randn_like(key)
    allowed = torch.rand(5, 5) > 0.3
    allowed[:, 0] = True
    kwargs: dict[str, Any] = {"enable_gqa": gqa}
    if mask in ("bool", "float"):
        kwargs["attn_mask"] = allowed if mask == "bool" else torch.zeros(5, 5).masked_fill(~allowed, -math.inf)
    kwargs["is_causal"] = mask == "causal"
    weights = weights_of(query, key, value, **kwargs)
    values = value.repeat_interleave(2, 1) if gqa else value
    torch.testing.assert_close(weights @ values, F.scaled_dot_product_attention(query, key, value, **kwargs))


class Flash(nn.Module):
    """A model whose kernel is out of sight, and which can be asked for another."""

    class Config:
        _attn_implementation = "flash_attention_2"

    def __init__(self) -> None:
        super().__init__()
        self.config = Flash.Config()
        self.attention = nn.MultiheadAttention(8, 2)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)[0]


def test_a_kernel_out_of_sight_is_replaced_while_observed() -> None:
    model = Flash()
    attention = AttentionCapture()
    with attention.attach(model):
        assert model.config._attn_implementation == "eager"
        with attention.attach(model):
            pass
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "flash_attention_2"
    assert "runs eager attention while observed" in attention.notes[0]
    with WrappedModel(model) as wrapped, AttentionCapture().attach(wrapped) as other:
        # a plan holds for one kernel
        assert model.config._attn_implementation == "flash_attention_2" and "wrap the model" in other.notes[0]


def test_a_heat_map_shows_the_weights(tmp_path: Any) -> None:
    weights = torch.zeros(1, 2, 2, 3)
    weights[0, 0, 0, 1] = weights[0, 0, 1, 2] = 1.0
    weights[0, 1] = torch.tensor([[1.0, 0, 0], [1.0, 0, 0]])
    record = Attention("a", 0, 0, (1, 2, 2, 3), (0.0, 0.0), (1.0, 1.0), (), weights, "")
    pixels = np.asarray(heat_map(record, head=0)).astype(int).sum(-1)
    side = pixels.shape[1] // 3
    assert pixels.shape == (2 * side, 3 * side) and side > 50
    assert (pixels[::side, ::side] > 0).tolist() == [[False, True, False], [False, False, True]]
    save_heat_map(record, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    for wrong in ({"head": 2}, {"row": 1}, {"head": -1}):
        with pytest.raises(InputMismatch):
            heat_map(record, **wrong)
