"""Train the digits model: ``python -m shared_hooks.models.digits.train --check`` (about a minute on one core).

    --output DIR     write weights.safetensors and images/ there (the shipped ones: of this folder)
    --images DIR  write all images as PNG files to DIR/training and DIR/held_out, and train nothing
    --check       compare the weights with the shipped ones instead of writing anything; exit status 1 if they differ
    --epochs N    default 24, with which the shipped weights were made

Seeds, order, threads and kernels are fixed, so that a repetition on the same kind of processor and the same torch gives
the same bytes. Other processors and other releases of torch round differently, and training amplifies that: there the
weights differ and the accuracy is about the same; --check says which of the two it found.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from shared_hooks import devices
from shared_hooks.models.digits.network import DigitsNet, digits

# scikit-learn's handwritten digits as 32x32 gray images, split into training and held-out images.
#
# The source is the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine
# Learning Repository, CC BY 4.0): 1797 images of 8x8 pixels with 17 gray levels, from 13 writers. scikit-learn
# carries it, so nothing is downloaded. Only training needs scikit-learn; running the model does not.


SIZE = 32
HELD_OUT = 360
"""Number of held-out images, one fifth of 1797."""


@dataclass(frozen=True)
class DigitImage:
    """One image: its index in the source, its label (0 to 9) and its pixels, uint8 of shape (32, 32), bright ink."""

    index: int
    truth: int
    pixels: npt.NDArray[np.uint8]

    @property
    def file_name(self) -> str:
        """File name of the shipped image, which contains the label."""
        return f"{self.index:04d}_label{self.truth}.png"


def upscale(gray17: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Upscale 8x8 gray values from 0 to 16 to 32x32 from 0 to 255, with Pillow's bicubic filter (integer
    arithmetic).
    """
    small = Image.fromarray(np.rint(gray17 * (255.0 / 16.0)).astype(np.uint8))
    return np.asarray(small.resize((SIZE, SIZE), Image.Resampling.BICUBIC))


def fixed_order(count: int) -> list[int]:
    """Return a permutation of range(count) that is the same on every machine and with every library version."""
    return sorted(range(count), key=lambda index: hashlib.sha256(f"isthmus digits {index}".encode()).digest())


def load_images() -> tuple[list[DigitImage], list[DigitImage]]:
    """Return (training images, held-out images), each in the fixed order."""
    from sklearn.datasets import load_digits  # imported here: running the model must not need scikit-learn

    source = load_digits()
    images = [
        DigitImage(index, int(source.target[index]), upscale(source.images[index]))
        for index in fixed_order(len(source.target))
    ]
    return images[HELD_OUT:], images[:HELD_OUT]


HERE = Path(__file__).parent
SEED = 1797
EPOCHS = 24
BATCH = 64
PEAK_RATE = 0.01
WEIGHT_DECAY = 0.01
SHIPPED_IMAGES = 40
"""Number of shipped held-out images, the first in the fixed order: the model's results have no part in the choice."""


def as_tensors(images: Sequence[DigitImage]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels (N, 1, 32, 32), float32 in [-1, 1], as digits.toml's preprocess makes them, and labels
    (N,), int64.
    """
    pixels = torch.from_numpy(np.stack([image.pixels for image in images])).unsqueeze(1)
    return (pixels.float() / 255.0 - 0.5) / 0.5, torch.tensor([image.truth for image in images])


def distort(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rotate each image by up to 0.2 rad, scale it by 15 %, shear it by 0.15 and shift it by 2 pixels, at random."""
    count = len(pixels)
    angle, scale, shear, shift_x, shift_y = torch.empty(5, count).uniform_(-1, 1, generator=generator)
    angle, scale, shear = 0.2 * angle, 1 + 0.15 * scale, 0.15 * shear
    matrix = torch.stack(
        [
            torch.stack([scale * angle.cos(), scale * (shear - angle.sin()), 0.125 * shift_x], dim=1),
            torch.stack([scale * angle.sin(), scale * angle.cos(), 0.125 * shift_y], dim=1),
        ],
        dim=1,
    )
    grid = functional.affine_grid(matrix, list(pixels.shape), align_corners=False)
    return functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def train(images: Sequence[DigitImage], epochs: int = EPOCHS, seed: int = SEED, quiet: bool = False) -> DigitsNet:
    """Train a network and return it in eval mode. AdamW, warm-up and cosine schedule, label smoothing, augmentation.

    Uses one thread and deterministic kernels, and restores both; the global random state is unchanged.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        with devices.forked(seed=seed):
            model = digits()
        generator = torch.Generator().manual_seed(seed)
        pixels, truths = as_tensors(images)
        steps = epochs * math.ceil(len(images) / BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=WEIGHT_DECAY, foreach=False)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK_RATE, total_steps=max(steps, 2))
        loss_of = nn.CrossEntropyLoss(label_smoothing=0.05)
        model.train()
        for epoch in range(epochs):
            total = 0.0
            order = torch.randperm(len(images), generator=generator)
            for batch in (order[start : start + BATCH] for start in range(0, len(order), BATCH)):
                loss = loss_of(model(distort(pixels[batch], generator)), truths[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item() * len(batch)
            if not quiet:
                print(f"epoch {epoch + 1:2d} of {epochs}: loss {total / len(images):.4f}", flush=True)
        return model.eval()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def accuracy(model: nn.Module, images: Sequence[DigitImage]) -> float:
    """Return the share of correctly classified images, 0 to 1."""
    pixels, truths = as_tensors(images)
    with torch.inference_mode():
        return float((model(pixels).argmax(1) == truths).double().mean())


def write(model: nn.Module, held_out: Sequence[DigitImage], folder: Path) -> None:
    """Write weights.safetensors and the first `SHIPPED_IMAGES` held-out images as PNG files to ``folder``."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    weights = folder / "weights.safetensors"
    save_file(state, weights, metadata={"made_by": "shared_hooks.models.digits.train"})
    weights.chmod(0o644)  # safetensors makes it readable by its owner only, and an installed package is for everyone
    for image in held_out[:SHIPPED_IMAGES]:
        Image.fromarray(image.pixels).save(folder / "images" / image.file_name, optimize=True)


def differences(model: nn.Module, weights: Path) -> list[str]:
    """Return a line per tensor of the model that is not bit-identical in the file."""
    shipped = load_file(weights)
    state = model.state_dict()
    lines = [f"{name}: only on one side" for name in sorted(shipped.keys() ^ state.keys())]
    for name in sorted(shipped.keys() & state.keys()):
        if not torch.equal(shipped[name], state[name]):
            gap = (shipped[name].double() - state[name].double()).abs().max().item()
            lines.append(f"{name}: largest difference {gap:.3g}")
    return lines


def write_images(images: Sequence[DigitImage], folder: Path) -> None:
    """Write images as PNG files whose names contain the label (`DigitImage.file_name`)."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        Image.fromarray(image.pixels).save(folder / image.file_name)
    print(f"{folder}: {len(images)} images")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shared_hooks.models.digits.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--output", type=Path, metavar="DIR", help="folder to write the weights and images to")
    target.add_argument("--images", type=Path, metavar="DIR", help="folder to write all images to; nothing is trained")
    target.add_argument("--check", action="store_true", help="compare with the shipped weights, write nothing")
    parser.add_argument("--epochs", type=int, default=EPOCHS, metavar="N")
    options = parser.parse_args(arguments)

    training, held_out = load_images()
    if options.images is not None:
        for name, images in (("training", training), ("held_out", held_out)):
            write_images(images, options.images / name)
        return 0
    began = time.perf_counter()
    model = train(training, epochs=options.epochs)
    print(f"trained on {len(training)} images in {time.perf_counter() - began:.0f} s")
    print(f"accuracy on {len(held_out)} held-out images: {accuracy(model, held_out):.2%}")
    if options.output is not None:
        write(model, held_out, options.output)
        print(f"wrote {options.output / 'weights.safetensors'} and {min(SHIPPED_IMAGES, len(held_out))} images")
        return 0
    lines = differences(model, HERE / "weights.safetensors")
    print("\n".join([f"{len(lines)} tensors differ from the shipped weights", *lines]) if lines else "bit-identical")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
