"""Frames of a scene that changes slowly: each as the difference to the one before, against each alone, at equal loss.

A scene is a held-out digit that turns and drifts a little from one frame to the next, before a camera with noise. Both
ways decode to the same bits, so the loss is the same.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from edge_client.request.ahead import SentFrames
from shared_hooks.crossing import books_of
from studies.codecs.digits import CUTS, Digits

SCENES = 20
FRAMES = 25
MOTIONS = ((0.002, 0.0), (0.01, 0.0), (0.002, 0.01), (0.01, 0.01), (0.0, 0.02))
"""Radians a frame, and half of that in widths of the picture; noise in parts of black to white."""
STEPS = (0.5, 1.5)


def scene(image: torch.Tensor, motion: float, noise: float, seed: int) -> list[torch.Tensor]:
    """`FRAMES` pictures, (1, 1, 32, 32)."""
    dice, found = torch.Generator().manual_seed(seed), []
    for number in range(FRAMES):
        turn = motion * number
        cos, sin = math.cos(turn), math.sin(turn)
        matrix = torch.tensor([[[cos, -sin, turn], [sin, cos, turn / 2]]])
        grid = functional.affine_grid(matrix, [1, 1, 32, 32], align_corners=False)
        picture = functional.grid_sample(image[None], grid, padding_mode="border", align_corners=False)
        found.append(picture + 2 * noise * torch.randn(picture.shape, generator=dice))
    return found


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each cut, step and motion."""
    digits, scenes = Digits.load(1), 2 if given.quick else SCENES
    print(f"{scenes} scenes of {FRAMES} frames; bytes of a frame, all key frames counted")
    print(f"{'cut':22} {'step':>5} {'motion':>7} {'noise':>6} {'alone':>7} {'differences':>11} {'ratio':>6}")
    found = []
    for cut in (CUTS[1], CUTS[3]):
        learnt = digits.heads(digits.learn, cut)
        for step in STEPS:
            books = books_of(learnt, step)
            for motion, noise in MOTIONS:
                alone = apart = 0
                for number in range(scenes):
                    sent = SentFrames()
                    for picture in scene(digits.judge[number], motion, noise, number):
                        head = digits.wrapped.forward(picture, end=cut)
                        early = replace(head, crossing=head.crossing.with_books(books))
                        alone += early.pack("basis").nbytes
                        codecs, frame = sent.codecs(early)
                        apart += early.pack(codecs).nbytes
                        sent.answered(frame)
                count = scenes * FRAMES
                line = {
                    "cut": early.layer_name, "step": step, "motion": motion, "noise": noise,
                    "alone": alone / count, "differences": apart / count, "ratio": alone / apart,
                }  # fmt: skip
                found.append(line)
                print(
                    f"{line['cut']:22} {step:5} {motion:7} {noise:6} {line['alone']:7.0f} {line['differences']:11.0f} "
                    f"{line['ratio']:6.2f}",
                    flush=True,
                )
    return found
