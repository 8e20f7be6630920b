"""Digits at its middle cuts by every codec: how many times fewer bytes, and how many answers change.

Judged on images that the model was not trained on: the 360 held out, and ten copies of each that are turned, stretched
and shifted as the ones for training are. The codecs here know of no images: their steps come from the tensor itself.
The copies of an image are not independent of each other, so their bounds are those of as many images as there are
originals.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from edge_client.calibrating import inputs
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.codecs import CODECS, Codec, Grain
from shared_hooks.crossing import Parcel
from shared_hooks.models import load_spec
from shared_hooks.models.digits.train import HELD_OUT, as_tensors, distort, load_images
from studies.benchmarks.codec_maps import CUTS

COPIES = 10
SEED = 13
NAMES = tuple(name for name in CODECS if name not in ("raw", "basis", "frames"))
"""All that need nothing beside the tensor."""


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measured and printed."""
    torch.set_num_threads(1)
    found = measure(COPIES // 10 if given.quick else COPIES)
    print(f"{'images':10} {'cut':17} {'codec':13} {'smaller':>8} {'+ header':>8} {'agree':>8} {'loss':>6}")
    for one in found:
        words = f"{one['images']:10} {one['cut']:17} {one['codec']:13}"
        sizes = f"{one['ratio']:7.1f}x {one['ratio_with_header']:7.1f}x"
        print(f"{words} {sizes} {100 * one['agreement']:7.2f}% {one['loss_points']:+6.2f}")
    return found


def measure(copies: int = COPIES, names: tuple[str, ...] = NAMES, cuts: tuple[str, ...] = CUTS) -> list[dict[str, Any]]:
    """One entry for each set of images, cut and codec."""
    model = load_spec("digits").load_model(torch.device("cpu"))
    found = []
    with torch.no_grad(), WrappedModel(model) as wrapped:
        for kind, pixels, truths in _images(copies):
            whole = wrapped.forward(pixels)
            for cut in cuts:
                early = wrapped.forward(pixels, end=cut)
                for name in names:
                    entry = {"images": kind, "cut": cut, "codec": name}
                    found.append(entry | _judged(wrapped, early, cut, CODECS[name], whole, truths))
    return found


def _images(copies: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    _, held_out = load_images()
    pixels, truths = as_tensors(held_out)
    yield "held out", pixels, truths
    if copies:
        dice = torch.Generator().manual_seed(SEED)
        yield "distorted", torch.cat([distort(pixels, dice) for _ in range(copies)]), truths.repeat(copies)


def _judged(
    wrapped: WrappedModel, early: EarlyOutput, cut: str, codec: Codec, whole: torch.Tensor, truths: torch.Tensor
) -> dict[str, Any]:
    """Every image is a request of its own, as an edge sends them; only the tails of all run at once."""
    count = len(truths)
    [piece], [grain] = early.pieces, early.crossing.grains
    own = grain._replace(outer=grain.outer // count)
    images = piece.contiguous().view(count, -1)
    section = header = 0
    decoded = torch.empty_like(images)
    for image, into in zip(images, decoded, strict=True):
        size, parcel = _there_and_back(image, own, codec, into)
        section, header = section + size, header + parcel
    pieces = (decoded.view(-1).as_strided(piece.shape, piece.stride()),)
    answers = wrapped.forward(EarlyOutput(early.crossing, pieces, early.values), start=cut).argmax(1)
    same = int((answers == whole.argmax(1)).sum())
    right, right_whole = int((answers == truths).sum()), int((whole.argmax(1) == truths).sum())
    originals = min(count, HELD_OUT)
    return {
        "requests": count,
        "frontier_bytes": images[0].nbytes,
        "ratio": images.nbytes / section,
        "ratio_with_header": images.nbytes / header,
        "agreement": same / count,
        "changed_at_most": 1 - inputs.share(same * originals // count, originals)[0],
        "accuracy": right / count,
        "loss_points": 100 * (right_whole - right) / count,
        "relative_error": float((decoded - images).norm() / images.norm()),
    }


def _there_and_back(image: torch.Tensor, grain: Grain, codec: Codec, into: torch.Tensor) -> tuple[int, int]:
    """Bytes of the section, and of header and payload together."""
    parcel = Parcel.of_tensors("", [image], codec, [grain])
    payload = b"".join(parcel.buffers)
    _, [found] = Parcel.tensors(parcel.header, payload)
    into.copy_(found)
    return len(parcel.buffers[0]), len(parcel.header) + parcel.nbytes
