"""A network of ResNet-50's shape (He et al. 2016, table 1): 25.6 million parameters, 97.5 MiB."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        shortcut = [nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)]
        self.shortcut = nn.Sequential(*(shortcut if channels != out or stride > 1 else []))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        out: Tensor = self.relu(y + self.shortcut(x))
        return out


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        channels = 64
        for number, (width, count) in enumerate(BLOCKS, 1):
            blocks = []
            for block in range(count):
                blocks.append(Bottleneck(channels, width, 2 if number > 1 and not block else 1))
                channels = 4 * width
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in range(len(BLOCKS)):
            x = self.get_submodule(f"layer{number + 1}")(x)
        out: Tensor = self.fc(torch.flatten(self.pool(x), 1))
        return out
