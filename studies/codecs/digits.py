"""The shipped digits model, images to learn from, and images to judge by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from safetensors.torch import load_file

import shared_hooks.models.digits as shipped
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.models.digits.network import digits
from shared_hooks.models.digits.train import as_tensors, distort, load_images

CUTS = ("stage1.0", "stage1.1", "stage2.0", "stage2.1")
"""The middle of the network: its blocks from a third to two thirds of its depth."""
LEARNT = 400
"""Training images that books are learnt from; they hardly change beyond that."""
COPIES = 10
"""Copies of each held-out image: itself, and distorted as in training, so that a tenth of a point is a few images."""


@dataclass(frozen=True)
class Digits:
    """``learn``: (n, 1, 32, 32); ``judge``: the same with ``truths``, none of them used in training."""

    wrapped: WrappedModel
    learn: torch.Tensor
    judge: torch.Tensor
    truths: torch.Tensor

    @classmethod
    def load(cls, copies: int = COPIES) -> Digits:
        torch.set_num_threads(1)
        model = digits().eval()
        (folder,) = shipped.__path__
        model.load_state_dict(load_file(f"{folder}/weights.safetensors"))
        training, held_out = load_images()
        pixels, truths = as_tensors(held_out)
        dice = torch.Generator().manual_seed(1)
        judge = torch.cat([pixels, *(distort(pixels, dice) for _ in range(copies - 1))])
        return cls(WrappedModel(model), as_tensors(training[:LEARNT])[0], judge, truths.repeat(copies))

    def heads(self, images: torch.Tensor, cut: str) -> list[EarlyOutput]:
        """One for each image, as an edge sends them."""
        return [self.wrapped.forward(image[None], end=cut) for image in images]

    def answers(self, cut: str, frontiers: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        """Classes (n,): the tail on what came of each image, many at once."""
        found = []
        for start, group in _groups(frontiers):
            early = self.wrapped.forward(self.judge[start : start + len(group)], end=cut)
            pieces = tuple(torch.cat(parts) for parts in zip(*group, strict=True))
            early = replace(early, pieces=pieces)
            found.append(self.wrapped.forward(early, start=early.layer_id).argmax(1))
        return torch.cat(found)


def _groups(
    items: list[tuple[torch.Tensor, ...]], size: int = 120
) -> Iterator[tuple[int, list[tuple[torch.Tensor, ...]]]]:
    for start in range(0, len(items), size):
        yield start, items[start : start + size]


def bounds(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, z = hits / count, 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
