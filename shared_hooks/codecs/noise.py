"""Add Gaussian noise to the values that cross, so that they reveal less of the input. Saves no bytes.

The idea is Shredder's (F. Mireshghallah et al., ASPLOS 2020), without its training: one width for a whole piece.
`edge-client calibrate` measures the accuracy it costs, `edge-client leakage` what it hides. It is not differential
privacy.
"""

from __future__ import annotations

import math
import secrets
from functools import lru_cache
from typing import Final

import numpy as np
import torch

from shared_hooks.codecs.codec import RAW, Codec, Coded, Grain, Param
from shared_hooks.errors import SpecError

PREFIX: Final = "noise:"
_FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Noise(Codec):
    """Adds noise of standard deviation ``sigma``, as a multiple of the piece's own.

    Each tensor's noise has its own seed from the system's entropy: the noise of one request reveals nothing of
    another's, and the model's random state is unchanged. Pieces without floats are sent as they are.
    """

    lossless = False
    listed = False
    shrinks = False

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma
        self.name = f"{PREFIX}{sigma:g}"  # type: ignore[misc]  # of the object: one for each width

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        if tensor.dtype not in _FLOATS:
            return None
        return RAW.encode(self.added(tensor, np.random.default_rng(secrets.randbits(128))), grain)

    def added(self, tensor: torch.Tensor, dice: np.random.Generator) -> torch.Tensor:
        """Return the tensor with noise. Non-finite values are kept, and do not count for the width."""
        values = tensor.detach().to("cpu", torch.float32)
        finite = values[torch.isfinite(values)]
        width = self.sigma * float(finite.std(correction=0)) if finite.numel() else 0.0
        noise = dice.standard_normal(values.numel(), dtype=np.float32).reshape(values.shape)
        most = torch.finfo(tensor.dtype).max
        noisy = torch.where(
            torch.isfinite(values), (values + width * torch.from_numpy(noise)).clamp(-most, most), values
        )
        return noisy.to(tensor.dtype)

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        RAW.check(params, dtype, elements, nbytes)

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return RAW.decode(data, params, dtype, elements)


@lru_cache(64)
def named(name: str) -> Noise | None:
    """Return the codec of a name such as "noise:0.5", or None for other names. Raises SpecError for an invalid
    width.
    """
    if not name.startswith(PREFIX):
        return None
    try:
        sigma = float(name.removeprefix(PREFIX))
    except ValueError:
        sigma = math.nan
    if not 0 < sigma <= 1000:
        raise SpecError(f'codec="{name:.60}": expected a width above 0, of at most 1000, as in noise:0.5')
    return Noise(sigma)
