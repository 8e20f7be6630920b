"""`Book`: what was learnt of one tensor that crosses a cut. Data only; it comes from strangers, too."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from shared_hooks.codecs.basis import cosine
from shared_hooks.codecs.grain import Grain
from shared_hooks.errors import BadFrame, TooLarge

GROUPS: Final = 4
MAX_CHANNELS: Final = 1 << 14
MAX_SIDE: Final = 1024
MAX_BOOK_BYTES: Final = 1 << 20
"""Most bytes of `Book.basis`: as text it is a third more, and the description of a cut has a bound."""
MAX_COEFFICIENTS: Final = 1 << 23
"""R * H * W of all the books of one cut: a few bytes of text may name as many, and each takes eight in `places`."""


@dataclass(frozen=True, eq=False)
class Book:
    """A tensor less ``mean``, times ``basis``, of a feature map the cosine transform of that, over ``step``: symbols.

    ``mean`` (C,) float32; ``basis`` (C, R) float16, orthonormal columns, the one with most energy first; ``groups``
    (R, `cosine.BANDS`) uint8: which components are of like size, 0 the largest; ``height`` and ``width`` of a feature
    map in memory, 1 and 1 for tokens. ``rounding``: what is added before rounding down (0.5 = to the nearest).
    ``is_positive``: no value was below zero. ``most``: mean square that may remain outside of the basis: an input
    beyond it is unlike those it was learnt from, and is not coded by it.
    """

    mean: torch.Tensor
    basis: torch.Tensor
    groups: torch.Tensor
    height: int
    width: int
    step: float
    rounding: float
    is_positive: bool
    most: float

    @property
    def channels(self) -> int:
        return int(self.basis.shape[0])

    @property
    def rank(self) -> int:
        """Components that are sent."""
        return int(self.basis.shape[1])

    @property
    def block(self) -> int:
        """Elements of one token, or of one feature map with all its channels."""
        return self.channels * self.height * self.width

    @property
    def coefficients(self) -> int:
        """Numbers that stand for one block."""
        return self.rank * self.height * self.width

    def suits(self, grain: Grain) -> bool:
        """Whether a tensor of this grain is of the kind it was learnt from; any number of tokens or maps is."""
        sides = (grain.inner // grain.width, grain.width) if grain.is_map else (1, 1)
        return grain.channels == self.channels and sides == (self.height, self.width)

    @cached_property
    def places(self) -> tuple[torch.Tensor, ...]:
        """The numbers of each group's coefficients among the R * H * W of one block."""
        bands = cosine.bands(self.height, self.width)
        group = self.groups[:, bands.long()].reshape(-1)
        return tuple(torch.nonzero(group == number).reshape(-1) for number in range(GROUPS))

    def to_json(self) -> dict[str, Any]:
        """For the description of a cut, or a file."""
        return {
            "mean": _text(self.mean),
            "basis": _text(self.basis),
            "groups": _text(self.groups),
            "size": [self.channels, self.rank, self.height, self.width],
            "step": self.step,
            "rounding": self.rounding,
            "positive": self.is_positive,
            "most": self.most,
        }

    @classmethod
    def from_json(cls, data: Any) -> Book:
        """The reverse of `to_json`. Raises BadFrame, and TooLarge before anything large is made."""
        try:
            channels, rank, height, width = data["size"]
            if any(type(one) is not int or one < 1 for one in data["size"]) or rank > channels:
                raise BadFrame("malformed basis: its size")
            sides = max(height, width) > MAX_SIDE or rank * height * width > MAX_COEFFICIENTS
            if sides or channels > MAX_CHANNELS or 2 * channels * rank > MAX_BOOK_BYTES:
                raise TooLarge(f"a basis of {rank} components of {channels} channels on {height} x {width}")
            step, rounding, most = (float(data[name]) for name in ("step", "rounding", "most"))
            if not (0 < step < math.inf and 0 <= rounding <= 1 and 0 <= most < math.inf):
                raise BadFrame("malformed basis: its step")
            mean = _array(data["mean"], np.float32, (channels,))
            basis = _array(data["basis"], np.float16, (channels, rank))
            groups = _array(data["groups"], np.uint8, (rank, cosine.BANDS))
            if type(data["positive"]) is not bool:
                raise BadFrame("malformed basis: its sign")
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise BadFrame(f"malformed basis: {error!s:.100}") from error
        if not bool(torch.isfinite(mean).all()) or not bool(torch.isfinite(basis).all()) or int(groups.max()) >= GROUPS:
            raise BadFrame("malformed basis: numbers that are none")
        return cls(mean, basis, groups, height, width, step, rounding, data["positive"], most)


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def _array(text: Any, dtype: Any, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape) * np.dtype(dtype).itemsize
    if not isinstance(text, str) or len(text) != 4 * -(-count // 3):
        raise BadFrame("malformed basis: it has another size than it says")
    data = np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    return torch.from_numpy(data.reshape(shape).copy())
