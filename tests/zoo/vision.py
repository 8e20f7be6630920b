"""The classic vision networks in small: same structure, few channels."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Call, Draw, add, call, zoo


def photo(draw: Draw) -> Call:
    """One (1, 3, 32, 32) image."""
    return call(draw.randn(1, 3, 32, 32))


@zoo(photo)
class AlexNetLike(nn.Module):
    """features, avgpool, classifier, as in the library's."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(12, 8, 3, padding=1),
            nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def vgg_like() -> nn.Module:
    """Blocks of conv, norm, relu and a pool."""
    layers: list[nn.Module] = []
    width = 3
    for channels in (4, 8, 8):
        for _ in range(2):
            layers += [nn.Conv2d(width, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            width = channels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 10))


add("vgg_like", vgg_like, photo)


class Basic(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inp: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inp, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or inp != width:
            self.downsample = nn.Sequential(nn.Conv2d(inp, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1."""

    expansion = 2

    def __init__(self, inp: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1, self.bn1 = nn.Conv2d(inp, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(inp, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        return self.relu(out)


class ResNetLike(nn.Module):
    """Stem and four stages of one or two blocks."""

    def __init__(self, block: type[Basic] | type[Bottleneck], depth: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        width, stages = 4, []
        for i, channels in enumerate((4, 6, 8, 8)):
            blocks = []
            for j in range(depth):
                blocks.append(block(width, channels, 2 if i and not j else 1))
                width = channels * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


add("resnet18_like", lambda: ResNetLike(Basic, 2), photo)
add("resnet50_bottleneck_like", lambda: ResNetLike(Bottleneck, 1), photo)


@zoo(photo)
class DenseNetLike(nn.Module):
    """Dense blocks that pass a list of features, transitions between."""

    class Layer(nn.Module):
        def __init__(self, inp: int) -> None:
            super().__init__()
            self.norm, self.relu, self.conv = nn.BatchNorm2d(inp), nn.ReLU(inplace=True), nn.Conv2d(inp, 3, 3, 1, 1)

        def forward(self, features: list[Tensor]) -> Tensor:
            return self.conv(self.relu(self.norm(torch.cat(features, 1))))

    class Block(nn.ModuleDict):
        def __init__(self, inp: int) -> None:
            super().__init__({f"layer{i}": DenseNetLike.Layer(inp + 3 * i) for i in range(3)})

        def forward(self, x: Tensor) -> Tensor:
            features = [x]
            for _, layer in self.items():
                features.append(layer(features))
            return torch.cat(features, 1)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block1 = nn.Conv2d(3, 4, 3, 2, 1), self.Block(4)
        self.transition = nn.Sequential(nn.BatchNorm2d(13), nn.ReLU(True), nn.Conv2d(13, 6, 1), nn.AvgPool2d(2))
        self.block2, self.fc = self.Block(6), nn.Linear(15, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.transition(self.block1(self.stem(x))))
        return self.fc(F.adaptive_avg_pool2d(F.relu(x, inplace=True), 1).flatten(1))


@zoo(photo)
class InceptionLike(nn.Module):
    """Blocks of four branches with an auxiliary head that eval mode ignores."""

    class Block(nn.Module):
        def __init__(self, inp: int) -> None:
            super().__init__()
            self.one = nn.Conv2d(inp, 3, 1)
            self.three = nn.Sequential(nn.Conv2d(inp, 2, 1), nn.ReLU(True), nn.Conv2d(2, 3, 3, padding=1))
            self.five = nn.Sequential(nn.Conv2d(inp, 2, 1), nn.ReLU(True), nn.Conv2d(2, 3, 5, padding=2))
            self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(inp, 3, 1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2)
        self.one, self.two, self.aux = self.Block(6), self.Block(12), nn.Linear(12, 10)
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.one(F.relu(self.stem(x)))
        middle = x
        x = self.fc(self.two(x).mean((2, 3)))
        return (x, self.aux(middle.mean((2, 3)))) if self.training else x


@zoo(photo)
class EfficientNetLike(nn.Module):
    """Inverted residuals with squeeze-excitation and SiLU."""

    class Block(nn.Module):
        def __init__(self, inp: int, out: int, stride: int) -> None:
            super().__init__()
            mid = inp * 2
            self.skip = stride == 1 and inp == out
            self.expand = nn.Sequential(nn.Conv2d(inp, mid, 1, bias=False), nn.BatchNorm2d(mid), nn.SiLU(True))
            self.depthwise = nn.Sequential(
                nn.Conv2d(mid, mid, 3, stride, 1, groups=mid, bias=False), nn.BatchNorm2d(mid), nn.SiLU(True)
            )
            self.squeeze = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(mid, 2, 1), nn.SiLU(True), nn.Conv2d(2, mid, 1), nn.Sigmoid()
            )
            self.project = nn.Sequential(nn.Conv2d(mid, out, 1, bias=False), nn.BatchNorm2d(out))

        def forward(self, x: Tensor) -> Tensor:
            y = self.depthwise(self.expand(x))
            y = self.project(y * self.squeeze(y))
            return y + x if self.skip else y

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1), self.Block(4, 4, 1), self.Block(4, 6, 2), self.Block(6, 6, 1)
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


@zoo(photo)
class UNet(nn.Module):
    """Three levels, double convolutions, transposed convolutions, crops by padding."""

    @staticmethod
    def double(inp: int, out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inp, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
        )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 4, 6, 8)
        self.down = nn.ModuleList(self.double(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in ((6, 8), (4, 6)))
        self.join = nn.ModuleList(self.double(2 * a, a) for a in (6, 4))
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x, skip = up(x), skips.pop()
            x = F.pad(x, (0, skip.shape[-1] - x.shape[-1], 0, skip.shape[-2] - x.shape[-2]))
            x = join(torch.cat([skip, x], 1))
        return self.out(x)


@zoo(photo, listed=False)
class VitLike(nn.Module):
    """Patches, class token, positions, pre-norm blocks with functional attention."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            b, n, d = x.shape
            q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
            x = x + self.proj(y)
            return x + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))
        self.blocks = nn.Sequential(*(self.Block() for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])
