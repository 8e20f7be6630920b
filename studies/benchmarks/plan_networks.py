"""The networks that `plan_cost` plans, with random weights, and an input for each.

ResNet-50 (He 2015), ViT-B/16 (Dosovitskiy 2020) and a Llama-like decoder of 24 blocks are as published but for the
decoder's width; the other two are made of very many small operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from studies.benchmarks.networks import ViT


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a skip connection."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or width_in != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        out += skip
        result: Tensor = self.relu(out)
        return result


class ResNet50(nn.Module):
    """(1, 3, 224, 224) -> (1, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        before = 64
        for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for number in range(depth):
                blocks.append(Bottleneck(before, width, 2 if number == 0 and width > 64 else 1))
                before = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))
        return result


class ViTB(ViT):
    """(1, 3, 224, 224) -> (1, 1000)."""

    def __init__(self) -> None:
        super().__init__(768, 12, 12)


class DecoderBlock(nn.Module):
    """Rotary attention and a gated MLP, both pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        query, key, value = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key = (part * cos + _turned(part) * sin for part in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


def _turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


class Decoder(nn.Module):
    """(1, n) token ids -> (1, n, 1000)."""

    def __init__(self, width: int = 384, heads: int = 6, depth: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 1000, bias=False)
        self.size = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])[:, None]
        angles = places / 10_000 ** (torch.arange(0, self.size, 2) / self.size)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        result: Tensor = self.head(self.norm(x))
        return result


class Tiled(nn.Module):
    """(1, 3, 2048, 2048) -> (1, 1, 2048, 2048), tile by tile into one result: 441 tiles."""

    def __init__(self, size: int = 2048, tile: int = 98) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 3, padding=1)
        self.size, self.tile = size, tile

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(1, 1, self.size, self.size)
        for top in range(0, self.size, self.tile):
            for left in range(0, self.size, self.tile):
                rows, columns = slice(top, top + self.tile), slice(left, left + self.tile)
                out[:, :, rows, columns] = self.conv(x[:, :, rows, columns])
        return out


class Loop(nn.Module):
    """(32, 600, 128) -> (32, 600, 16): a cell called in a Python loop."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(width, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], x.shape[2])
        states = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        result: Tensor = self.out(torch.stack(states, 1))
        return result


def _randn(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(1))


PLANNED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "ResNet-50": (ResNet50, _randn(1, 3, 224, 224)),
    "ViT-B": (ViTB, _randn(1, 3, 224, 224)),
    "decoder of 24": (Decoder, lambda: torch.arange(96)[None]),
    "tiled convolution": (Tiled, _randn(1, 3, 2048, 2048)),
    "loop of 600": (Loop, _randn(32, 600, 128)),
}
