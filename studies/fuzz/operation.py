"""Two operations that are hard on an engine. Imported by generated models that use them; registered once.

``keep``: its result's shape depends on data, and it has neither a meta kernel nor a tag, as torchvision's ``nms``.
``by_address``: rounds by where its input lies, as kernels of MKL do on some processors.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("isthmus_fuzz", "DEF")
_LIBRARY.define("keep(Tensor x) -> Tensor")
_LIBRARY.define("by_address(Tensor x) -> Tensor")


def _keep(x: Tensor) -> Tensor:
    """The rows of ``x`` (rows, columns) whose sum is above nought, and the first."""
    kept = x.sum(-1) > 0
    kept[0] = True
    return x[kept]


_LIBRARY.impl("keep", _keep, "CPU")


def _by_address(x: Tensor) -> Tensor:
    """``x``, a little more of it the further it begins from a multiple of 64 bytes."""
    return x * (1 + 1e-3 * (x.data_ptr() % 64))


_LIBRARY.impl("by_address", _by_address, "CPU")
torch.library.register_fake("isthmus_fuzz::by_address", torch.empty_like, lib=_LIBRARY)
