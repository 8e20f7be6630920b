"""Attention, transformers, positions, experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Call, Draw, add, call, sequence, zoo
from tests.zoo.settings import slow_attention


@zoo(sequence, listed=True, reference_setting=slow_attention)
class MultiheadAttention(nn.Module):
    """nn.MultiheadAttention, with and without weights, between norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first, self.second = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        x = x + self.first(h, h, h, need_weights=False)[0]
        h, weights = self.second(x, x, x)
        return self.out(x + h), weights


def encoder() -> nn.Module:
    """Two layers whose fast path is on in eval mode when nobody looks."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


add("transformer_encoder", encoder, sequence, listed=True, reference_setting=slow_attention)
add(
    "transformer_encoder_padded",
    encoder,
    lambda draw: call(draw.randn(2, 5, 8), src_key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2])),
    listed=True,
    reference_setting=slow_attention,
    notes="with a padding mask the fast path would use nested tensors",
)
add(
    "transformer_encoder_pre_norm_causal",
    lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, activation="gelu"), 2, enable_nested_tensor=False
    ),
    lambda draw: call(draw.randn(5, 2, 8), mask=nn.Transformer.generate_square_subsequent_mask(5)),
    reference_setting=slow_attention,
)
add(
    "transformer_decoder",
    lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2, nn.LayerNorm(8)),
    lambda draw: call(draw.randn(2, 3, 8), draw.randn(2, 5, 8)),
    reference_setting=slow_attention,
)
add(
    "full_transformer",
    lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    lambda draw: call(draw.randn(2, 5, 8), draw.randn(2, 3, 8)),
    reference_setting=slow_attention,
)


@zoo(lambda draw: call(draw.ints(13, 2, 6)))
class PositionsFromShapes(nn.Module):
    """Position ids and a causal mask made of the shape: recomputed, never sent."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(13, 8), nn.Embedding(10, 8)
        self.mix, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 13)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        hidden = self.words(ids) + self.places(torch.arange(length, device=ids.device))
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        scores = self.mix(hidden) @ hidden.mT / 8**0.5 + mask
        return self.out(self.norm(scores.softmax(-1) @ hidden))


@zoo(sequence)
class RotaryEmbeddings(nn.Module):
    """cos and sin from a buffer, halves rotated, in two layers."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

        @staticmethod
        def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
            return x * cos + torch.cat((-b, a), -1) * sin

        def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
            q, k, v = (layer(x).view(*x.shape[:2], 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(self.turn(q, *positions), self.turn(k, *positions), v, is_causal=True)
            return self.o(y.transpose(1, 2).reshape(x.shape)) + x

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))
        self.register_buffer("speeds", 1.0 / 100 ** (torch.arange(0, 4, 2) / 4), persistent=False)
        self.speeds: Tensor

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]).float(), self.speeds)
        angles = torch.cat((angles, angles), -1)
        positions = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, positions)
        return x


@zoo(sequence, branches=True)
class MixtureOfExperts(nn.Module):
    """Top-2 routing; each expert sees the tokens sent to it; index_add joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.gate = nn.Linear(8, 8), nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inp(x).flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            result.index_add_(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return self.out(result.view(x.shape))


@zoo(sequence)
class DenseMixtureOfExperts(nn.Module):
    """All experts run; soft weights by gather and scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        values, chosen = logits.topk(2, -1)
        weights = torch.zeros_like(logits).scatter(-1, chosen, values.softmax(-1))
        return torch.einsum("bte,ebtd->btd", weights, torch.stack([expert(x) for expert in self.experts]))


@zoo(lambda draw: call(draw.randn(2, 5, 8), draw.bools(2, 5)))
class PaddingMask(nn.Module):
    """A boolean mask, turned to an additive one early, used in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        bias = torch.zeros(keep.shape).masked_fill(~keep, -1e9)[:, None, :]
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            x = x + (q @ k.mT + bias).softmax(-1) @ v
        return x * keep.unsqueeze(-1)


@zoo(sequence)
class LinearAttention(nn.Module):
    """Running sums instead of a softmax; ALiBi-like decay from shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(8, 24), nn.GroupNorm(2, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.elu(part) + 1 for part in self.qkv(x).chunk(3, -1))
        decay = 0.9 ** torch.arange(x.shape[1], dtype=x.dtype)
        state = torch.cumsum(torch.einsum("btd,bte,t->btde", k, v, decay), 1)
        y = torch.einsum("btd,btde->bte", q, state) / torch.cumsum(k, 1).mul(q).sum(-1, keepdim=True)
        return self.out(self.norm(y.mT).mT) + x


def late_context(draw: Draw) -> Call:
    return call(draw.randn(2, 5, 8), context=draw.randn(2, 3, 8))


@zoo(late_context, reference_setting=slow_attention)
class CrossAttention(nn.Module):
    """Latents from a parameter attend to the input, then to a context that is read late."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, 8))
        self.read, self.late = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        z = self.latents.expand(x.shape[0], -1, -1)
        z = z + self.read(z, x, x)[0]
        z = z + self.mlp(z)
        return z + self.late(z, context, context)[0]
