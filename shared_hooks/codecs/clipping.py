"""Where a quantiser of few levels clips: the step with the least squared error, from a group's moments alone.

After R. Banner, Y. Nahshan, D. Soudry, "Post training 4-bit quantization of convolutional networks for
rapid-deployment" (NeurIPS 2019): values are taken for a Laplace or a normal distribution, whichever their moments are
nearer to. Here zero is always a level, and stays zero. What ReLU leaves is the one half of such a distribution; its
zeros do not count.
"""

from __future__ import annotations

from typing import Final

import torch

STEPS: Final = {
    1: (2.0000, 1.5341),
    3: (1.1621, 0.8156),
    7: (0.6885, 0.4429),
    15: (0.4065, 0.2422),
}
"""Levels beside zero, on one side -> the best step for a Laplace and for a normal distribution of mean magnitude 1."""

_LAPLACE, _NORMAL = 0.7071, 0.7979
"""Mean magnitude by root mean square."""


def best_step(magnitude: torch.Tensor, square: torch.Tensor, largest: torch.Tensor, levels: int) -> torch.Tensor:
    """The best step of each group, from the means of the magnitudes and squares, and the largest magnitude. The same
    shape.

    ``levels``: one of `STEPS`, or more: then nothing is clipped.
    """
    whole = largest / levels
    if levels not in STEPS:
        return whole
    laplace, normal = STEPS[levels]
    near = ((magnitude / square.sqrt() - _LAPLACE) / (_NORMAL - _LAPLACE)).clamp(0, 1).nan_to_num(0)
    return torch.minimum(magnitude * (laplace + (normal - laplace) * near), whole)
