"""What the sweep looks at: a model that can be built again and again, and inputs for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
NUMPY_SEED_LIMIT = 1 << 32


class NotUsable(Exception):
    """The library's model is not built or does not run by itself with what the sweep knows to give it."""


@dataclass(frozen=True)
class Prepared:
    """``build()`` gives equal models in eval mode, ``inputs(seed)`` the arguments of one call. ``first``: the one that
    was tried."""

    label: str
    first: nn.Module
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Call]


@dataclass(frozen=True)
class Subject:
    """One architecture of a library. ``prepare`` tries what makes it run; raises `NotUsable`."""

    family: str
    name: str
    prepare: Callable[[], Prepared] = field(repr=False)

    @property
    def key(self) -> str:
        """What it is called in the file of results."""
        return f"{self.family}/{self.name}"


def seed_all(seed: int) -> None:
    """Every generator a model may draw from."""
    import numpy as np

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % NUMPY_SEED_LIMIT)  # noqa: NPY002 - the global one is what a model's code would use


def equal_builds(make: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    """A builder whose every call gives the same weights, none of them where an error would not show.

    Fresh weights are full of zeros and ones (biases, layer scales, gates that begin closed), behind which a wrong
    value disappears: every parameter gets noise, every normalisation statistics that are not the identity.
    """

    def build() -> nn.Module:
        seed_all(seed)
        model = make()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in model.parameters():
                if tensor.is_floating_point():
                    noise = torch.empty(tensor.shape).uniform_(-1, 1, generator=generator)
                    tensor.add_(noise.to(tensor.dtype), alpha=0.3 if tensor.ndim < 2 else 0.03)
            for name, tensor in model.named_buffers():
                if name.endswith("running_mean"):
                    tensor.uniform_(-0.3, 0.3, generator=generator)
                elif name.endswith("running_var"):
                    tensor.uniform_(0.6, 1.5, generator=generator)
        return model.eval()

    return build
