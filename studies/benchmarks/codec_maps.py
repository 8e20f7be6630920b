"""Feature maps to code: what ReLU leaves in the trained digits at their middle cuts, and in an untrained ResNet-18."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shared_hooks import WrappedModel
from shared_hooks.codecs import Grain
from shared_hooks.models import load_spec
from shared_hooks.models.digits.train import as_tensors, load_images
from studies.benchmarks.networks import ResNet18, built, image

CUTS = ("stage1.1.relu#2", "stage2.0.relu#2", "stage2.1.relu#2", "stage3.0.relu#2")
TILES = 32
"""The digits see one picture of so many times so many of their training images: maps of 4 to 17 MB in the middle."""
RESNET_CUTS = ("stem.2", "stages.0.1.relu#2", "stages.1.1.relu#2")


class Map(NamedTuple):
    """A flat tensor as it crosses a cut."""

    name: str
    flat: torch.Tensor
    grain: Grain

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.itemsize


def maps() -> list[Map]:
    """One for each cut: the largest tensor that crosses it."""
    training, _ = load_images()
    pixels, _ = as_tensors(training[: TILES * TILES])
    size = pixels.shape[-1]
    tiled = pixels.reshape(TILES, TILES, size, size).permute(0, 2, 1, 3).reshape(1, 1, TILES * size, TILES * size)
    digits = load_spec("digits").load_model(torch.device("cpu"))
    found = _at(digits, tiled, CUTS, "digits")
    return found + _at(built(ResNet18), image(), RESNET_CUTS, "ResNet-18")


def _at(model: torch.nn.Module, given: torch.Tensor, cuts: tuple[str, ...], name: str) -> list[Map]:
    found = []
    with torch.no_grad(), WrappedModel(model) as wrapped:
        for cut in cuts:
            early = wrapped.forward(given, end=cut)
            piece, grain = max(zip(early.pieces, early.crossing.grains, strict=True), key=lambda one: one[0].numel())
            found.append(Map(f"{name} {cut}", piece.contiguous().view(-1), grain))
    return found
