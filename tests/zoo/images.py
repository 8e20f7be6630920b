"""Layers of vision models that are more than a chain: norms, resampling, shuffles, detection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Call, Draw, call, image, zoo


@zoo(image)
class Norms(nn.Module):
    """Batch, instance, group, layer, local response, RMS."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norms = nn.Sequential(
            nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.LocalResponseNorm(2)
        )
        self.last, self.one = nn.RMSNorm(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms(self.conv(x))
        return self.last(self.one(x.flatten(2)).mean(-1))


@zoo(image)
class PixelShuffle(nn.Module):
    """Sub-pixel upsampling onto an interpolated skip."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shuffle = nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2)
        self.back, self.out = nn.PixelUnshuffle(2), nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        up = self.shuffle(self.conv(x))
        skip = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(self.back(up + skip))


@zoo(image)
class ConvTranspose(nn.Module):
    """An autoencoder with transposed convolutions whose output size is given."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1)
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.up(self.act(self.down(x)), output_size=x.shape[-2:])) + x


@zoo(image)
class GridSample(nn.Module):
    """A spatial transformer: affine grid from a localisation net, sampling of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.find, self.theta = nn.Conv2d(3, 4, 5, stride=3), nn.Linear(64, 6)
        self.look = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.theta(torch.tanh(self.find(x)).flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.look(F.grid_sample(x, grid, align_corners=False))


@zoo(image)
class MaxUnpool(nn.Module):
    """Max pooling gives indices; unpooling wants them much later (SegNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2, return_indices=True)
        self.b, self.unpool, self.c = nn.Conv2d(4, 4, 3, padding=1), nn.MaxUnpool2d(2), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        size = x.size()
        x, indices = self.pool(x)
        return self.c(self.unpool(torch.relu(self.b(x)), indices, output_size=size))


@zoo(image)
class FoldUnfold(nn.Module):
    """Patches taken out, changed and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.unfold, self.fold = nn.Unfold(4, stride=2), nn.Fold(16, 4, stride=2)
        self.mix = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.fold(self.mix(self.unfold(x).mT).mT) / self.fold(self.unfold(torch.ones_like(x)))


@zoo(image)
class SqueezeExcite(nn.Module):
    """A value is reduced to a gate that multiplies it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2, self.out = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.out(x * F.hardsigmoid(self.fc2(F.silu(self.fc1(self.pool(x))))))


@zoo(image)
class DetectionHead(nn.Module):
    """Boxes and scores of two levels, anchors from shapes, the best k kept."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.lateral = nn.Conv2d(6, 6, 1)
        self.boxes, self.scores = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 3, 1)

    @staticmethod
    def anchors(feature: Tensor, stride: int) -> Tensor:
        ys, xs = torch.meshgrid(*(torch.arange(n) * stride for n in feature.shape[-2:]), indexing="ij")
        return torch.stack([xs, ys, xs + stride, ys + stride], -1).view(-1, 4).to(feature.dtype)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        p1 = F.silu(self.stem(x))
        p2 = F.silu(self.down(p1))
        p1 = self.lateral(p1) + F.interpolate(p2, size=p1.shape[-2:])
        boxes, scores = [], []
        for level, stride in ((p1, 2), (p2, 4)):
            boxes.append(self.boxes(level).flatten(2).mT + self.anchors(level, stride))
            scores.append(self.scores(level).flatten(2).mT.sigmoid())
        best, labels = torch.cat(scores, 1).max(-1)
        kept, index = best.topk(5, -1)
        found = torch.cat(boxes, 1).gather(1, index[..., None].expand(-1, -1, 4))
        return {"boxes": found, "scores": kept, "labels": labels.gather(1, index)}


@zoo(image, branches=True)
class NonMaximumSuppression(nn.Module):
    """A Python loop of suppression: sizes and steps depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 5, stride=4), nn.Conv2d(4, 5, 1)
        self.refine = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(torch.relu(self.conv(x)))[0].flatten(1).T
        boxes, scores = out[:, :4].sigmoid(), out[:, 4]
        order, kept = scores.argsort(descending=True), []
        while order.numel():
            kept.append(order[0])
            distance = (boxes[order] - boxes[order[0]]).abs().sum(-1)
            order = order[distance > 0.4]
        return self.refine(boxes[torch.stack(kept)])


@zoo(image)
class ShuffleUnits(nn.Module):
    """Channel split and shuffle (ShuffleNet), depthwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.units = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.ReLU6(True)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for unit in self.units:
            keep, change = x.chunk(2, 1)
            x = torch.cat([keep, unit(change)], 1)
            b, c, h, w = x.shape
            x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        return x


def upsampled(draw: Draw) -> Call:
    return call(draw.randn(1, 3, 9, 7), size=(20, 20))


@zoo(upsampled)
class Interpolate(nn.Module):
    """Resampling to a size given by the caller, odd sizes, padding modes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Upsample(scale_factor=2)
        self.out = nn.Conv2d(7, 2, 3)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        y = F.interpolate(self.up(self.conv(x)), size=size, mode="bicubic", align_corners=True)
        return self.out(torch.cat([y, F.interpolate(F.pad(x, (1, 1, 0, 2)), size=size)], 1))


@zoo(lambda draw: call(draw.randn(2, 1, 64)))
class DilatedAudio(nn.Module):
    """WaveNet: gated dilated convolutions, skips summed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv1d(1, 4, 1)
        self.filters = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**i) for i in range(3))
        self.mixes = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))
        self.out = nn.Conv1d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.inp(x), 0
        for conv, mix in zip(self.filters, self.mixes, strict=True):
            gate, signal = conv(F.pad(x, (conv.dilation[0], 0))).chunk(2, 1)
            z = mix(torch.sigmoid(gate) * torch.tanh(signal))
            x, skips = x + z, skips + z
        return self.out(F.relu(skips))
