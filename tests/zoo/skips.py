"""Values that jump over cuts: residuals, concatenations, late readers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Call, Draw, call, image, vector, zoo


class ResidualBlock(nn.Module):
    """conv, norm, relu, conv, norm, add, relu, with in-place activations as in ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


@zoo(image, listed=True)
class Residual(nn.Module):
    """Two residual blocks between a stem and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2)
        self.blocks = nn.Sequential(ResidualBlock(4), ResidualBlock(4))
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.fc(x.mean((2, 3)))


@zoo(image, listed=True)
class DenseConcatenation(nn.Module):
    """Every layer reads all earlier ones, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 2 * i, 2, 3, padding=1) for i in range(4))
        self.out = nn.Conv2d(11, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return self.out(torch.cat(features, 1))


@zoo(image, listed=True)
class UNetSkips(nn.Module):
    """Encoder, decoder, and a skip at each of two resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(self.pool(a)))
        c = F.relu(self.middle(self.pool(b)))
        c = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.up1(torch.cat([F.interpolate(c, scale_factor=2), a], 1))


@zoo(image, listed=True)
class ParallelBranches(nn.Module):
    """Three branches that read one value, joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.one, self.three = nn.Conv2d(4, 2, 1), nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.ReLU())
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.one(x), self.three(x), self.pool(x)], 1)


def two_images(draw: Draw) -> Call:
    return call(draw.randn(2, 3, 8, 8), draw.randn(2, 3, 8, 8))


@zoo(two_images)
class Siamese(nn.Module):
    """One encoder over two inputs, compared at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 6))
        self.judge = nn.Linear(6, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.encoder(left), self.encoder(right)
        return self.judge((a - b).abs())


@zoo(image)
class DeepSupervision(nn.Module):
    """A list of outputs from middle layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(3 if i == 0 else 4, 4, 3) for i in range(3))
        self.heads = nn.ModuleList(nn.Conv2d(4, 2, 1) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = torch.relu(stage(x))
            outputs.append(head(x))
        return outputs


@zoo(image)
class SliceSkip(nn.Module):
    """Only a quarter of the channels is read again later."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        return self.last(self.mid(stem)) + stem[:, :2]


@zoo(vector)
class SliceTakenEarly(nn.Module):
    """The slice is made before the cut, the rest of its base is dead after it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.mid, self.last = nn.Linear(8, 64), nn.Linear(64, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        part = wide[:, 8:12]
        return self.last(self.mid(wide)) + part


@zoo(vector)
class GlobalResidual(nn.Module):
    """The model's input is added to its last layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) + x


class DropPath(nn.Module):
    """Stochastic depth: in eval mode it hands through its input."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.rand(x.shape[0], 1)


@zoo(vector)
class StochasticDepthInEval(nn.Module):
    """Residual branches that are dropped at random in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.relu(layer(x)))
        return x


@zoo(vector)
class CrossedBranches(nn.Module):
    """Two streams that exchange halves after every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        for left, right in zip(self.left, self.right, strict=True):
            a, b = right(b) + a, left(a) * torch.sigmoid(b)
        return torch.cat([a, b], -1)


@zoo(vector)
class LongResidualStream(nn.Module):
    """A pre-norm stream: the sum is never the output of any module."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2
        for norm, layer in zip(self.norms, self.layers, strict=True):
            residual = hidden
            hidden = layer(norm(hidden))
            hidden = hidden + residual
        return hidden


@zoo(vector)
class DeadValues(nn.Module):
    """Values that are computed and never used, and a whole branch whose result is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused, self.b = nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        self.unused(hidden).relu().sum()
        return self.b(hidden)
