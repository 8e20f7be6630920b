"""A residual network of 14 weighted layers for 32x32 gray images of digits.

It is small on purpose (0.7 MB of float32) and has what makes models awkward to cut: skip connections with and without a
projection, strided downsampling, batch normalisation, a ReLU in place, and one ReLU module called twice per block.

The shape is He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2, with a strided stem.
"""

from __future__ import annotations

import torch
from torch import nn


class ResidualBlock(nn.Module):
    """``relu(branch(x) + shortcut(x))``; the shortcut is a 1x1 projection where the shape changes, else the identity.

    Input (N, channels_in, H, W), output (N, channels_out, H / stride, W / stride).
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.bn2(self.conv2(branch))
        result: torch.Tensor = self.relu(branch + self.shortcut(x))
        return result


class DigitsNet(nn.Module):
    """Stem, three stages of two residual blocks, global average, linear classifier.

    Input (N, 1, 32, 32), gray, scaled to [-1, 1]; output (N, 10), unnormalised class scores.
    """

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.stage1 = nn.Sequential(ResidualBlock(width, width), ResidualBlock(width, width))
        self.stage2 = nn.Sequential(ResidualBlock(width, 2 * width, stride=2), ResidualBlock(2 * width, 2 * width))
        self.stage3 = nn.Sequential(ResidualBlock(2 * width, 4 * width, stride=2), ResidualBlock(4 * width, 4 * width))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(4 * width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.stage3(self.stage2(self.stage1(self.stem(image))))
        scores: torch.Tensor = self.classifier(torch.flatten(self.pool(features), 1))
        return scores


def digits(width: int = 16) -> DigitsNet:
    """Make the network with random weights. The factory in digits.toml."""
    return DigitsNet(width=width)
