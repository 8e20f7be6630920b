"""The networks that are measured, in real sizes and with random weights.

Written here because the zoo's are too small for tails to matter. Structure as published: ResNet-18 (He 2015), AlexNet
(Krizhevsky 2014), VGG-11 with batch norm (Simonyan 2014) at half its width, a ViT (Dosovitskiy 2020) of width 384 with
six blocks; 224 x 224 images.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Two 3x3 convolutions and a skip connection."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += skip
        result: Tensor = self.relu(out)
        return result


class ResNet18(nn.Module):
    """(1, 3, 224, 224) -> (1, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        widths = (64, 64, 128, 256, 512)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Residual(before, width, 1 if number == 0 else 2), Residual(width, width, 1))
                for number, (before, width) in enumerate(itertools.pairwise(widths))
            )
        )
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(torch.flatten(self.pool(self.stages(self.stem(x))), 1))
        return result


class AlexNet(nn.Module):
    """(1, 3, 224, 224) -> (1, 1000); 21 layers, 61 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.pool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(inplace=True),
            nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(torch.flatten(self.pool(self.features(x)), 1))
        return result


class Thin(nn.Sequential):
    """(1, 3, 16, 16) -> (1, 16, 4, 4): 20 layers that do next to nothing."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3, 4, 1), *(nn.Conv2d(16, 16, 3, 1, 1) for _ in range(19)))


class VGG11(nn.Module):
    """(1, 3, 224, 224) -> (1, 1000), at half width."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width in (32, 0, 64, 0, 128, 128, 0, 256, 256, 0, 256, 256, 0):  # 0: halve the image
            if width:
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                before = width
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(256 * 49, 2048), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(2048, 2048), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(2048, 1000),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(torch.flatten(self.features(x), 1))
        return result


class Block(nn.Module):
    """Pre-norm attention and MLP; the attention between ``qkv`` and ``proj`` is functional."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.proj(mixed)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class ViT(nn.Module):
    """(1, 3, 224, 224) -> (1, 1000)."""

    def __init__(self, width: int = 384, heads: int = 6, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 197, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.places
        result: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return result


class Bare(nn.Module):
    """Hardly any work before and after a frontier as large as the input: what is measured is everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.before: nn.Module = nn.Identity()
        self.after = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(self.before(x)).amax(-1)
        return result


class BareBack(Bare):
    """The same, with an answer as large as the frontier."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(self.before(x))
        return result


class Spread(Bare):
    """The same, with a first layer that makes something new of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ReLU()


class UNet(nn.Module):
    """(1, 3, 256, 256) -> (1, 8, 256, 256): four levels of 32 to 256 channels (Ronneberger 2015, at half width)."""

    WIDTHS = (32, 64, 128, 256)

    def __init__(self) -> None:
        super().__init__()
        down, up = (3, *self.WIDTHS[:-1]), self.WIDTHS[:-1]
        self.downs = nn.ModuleList(self._twice(a, b) for a, b in zip(down, self.WIDTHS, strict=True))
        self.ups = nn.ModuleList(self._twice(a + 2 * a, a) for a in reversed(up))
        self.pool, self.wider = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.last = nn.Conv2d(self.WIDTHS[0], 8, 1)

    @staticmethod
    def _twice(before: int, width: int) -> nn.Sequential:
        convolutions = nn.Conv2d(before, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        return nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1], nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for number, down in enumerate(self.downs):
            x = down(x if number == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for up in self.ups:
            x = up(torch.cat((self.wider(x), skips.pop()), 1))
        result: Tensor = self.last(x)
        return result


CLASSICS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": ResNet18,
    "AlexNet": AlexNet,
    "VGG-11 (half width)": VGG11,
    "ViT (384 x 6)": ViT,
}


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """In eval mode, the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def image() -> Tensor:
    return torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
