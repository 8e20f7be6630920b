"""Images with the statistics of photographs, drawn from a seed; none is a photograph.

Light falls off smoothly, soft-edged shapes lie over each other (edges and occlusion are what gives photographs their
spectrum), each shape has a texture whose power falls with the square of the frequency, and a little sensor noise lies
on top. As JPEG they need about as many bits per pixel as photographs do, which is what sending the file is about.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

WIDTH, HEIGHT = 480, 360
SHAPES, NOISE = 14, 2.0
QUALITY = 85


def draw(seed: int, width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """The image of a seed, RGB."""
    dice = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / height
    angle = dice.uniform(0, 2 * np.pi)
    light = 0.75 + 0.25 * np.cos(2.0 * (x * np.cos(angle) + y * np.sin(angle)) + dice.uniform(0, 6))
    canvas = np.ones((height, width, 3)) * dice.uniform(60, 200, 3)
    canvas *= (1 + 0.25 * _texture(dice, width, height))[..., None]
    for _ in range(SHAPES):
        mask = Image.new("L", (width, height))
        centre, size = dice.uniform(0, (width, height)), dice.uniform(0.08, 0.35, 2) * height
        box = (*(centre - size), *(centre + size))
        pen = ImageDraw.Draw(mask)
        (pen.ellipse if dice.random() < 0.6 else pen.rectangle)(box, fill=255)
        mask = mask.rotate(dice.uniform(0, 90)).filter(ImageFilter.GaussianBlur(dice.uniform(0.6, 2.5)))
        alpha = np.asarray(mask, dtype=np.float64)[..., None] / 255
        surface = dice.uniform(20, 240, 3) * (1 + dice.uniform(0.05, 0.3) * _texture(dice, width, height))[..., None]
        canvas = canvas * (1 - alpha) + surface * alpha
    canvas = canvas * light[..., None] + dice.normal(0, NOISE, canvas.shape)
    return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))


def write(folder: Path, count: int, width: int = WIDTH, height: int = HEIGHT) -> list[Path]:
    """``count`` JPEG files in ``folder``."""
    files = [folder / f"scene-{seed:03}.jpg" for seed in range(count)]
    for seed, file in enumerate(files):
        draw(seed, width, height).save(file, quality=QUALITY)
    return files


def _texture(dice: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Noise whose amplitude falls with the frequency, standard deviation 1."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width) * width)
    spectrum = np.fft.rfft2(dice.normal(size=(height, width))) / np.maximum(frequency, 1.0)
    texture = np.fft.irfft2(spectrum, (height, width))
    return np.asarray((texture - texture.mean()) / texture.std())
