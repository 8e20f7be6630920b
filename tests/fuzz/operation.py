"""An operation whose result's shape depends on data, registered without a meta kernel and without a tag, as
torchvision's ``nms`` is. Imported by generated models that use it; registered once.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("isthmus_fuzz", "DEF")
_LIBRARY.define("keep(Tensor x) -> Tensor")


def _keep(x: Tensor) -> Tensor:
    """The rows of ``x`` (rows, columns) whose sum is above nought, and the first."""
    kept = x.sum(-1) > 0
    kept[0] = True
    return x[kept]


_LIBRARY.impl("keep", _keep, "CPU")
