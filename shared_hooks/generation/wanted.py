"""What of the logits is wanted back. All of them are the largest bytes on the wire: of 150,000 words 300 KB a token.

None  all of them        ["top", k]  the k likeliest and their numbers; on the edge all others are minus infinity
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shared_hooks.errors import BadFrame
from shared_hooks.tensors import dtype_name

LOGITS = "logits"
Short = Callable[[str, torch.Tensor], Any]


def shortened(wanted: Any) -> Short:
    """For `results.said`. Raises BadFrame."""
    if wanted is None:
        return lambda name, tensor: None
    if not (
        isinstance(wanted, list)
        and len(wanted) == 2
        and wanted[0] == "top"
        and type(wanted[1]) is int
        and wanted[1] > 0
    ):
        raise BadFrame(f"no such answer: {wanted!r:.60}")
    most = wanted[1]

    def short(name: str, tensor: torch.Tensor) -> Any:
        if name != LOGITS or tensor.dim() < 2:
            return None
        values, words = tensor.topk(min(most, tensor.shape[-1]), -1)
        return ["top", list(tensor.shape), dtype_name(tensor.dtype)], [values, words.to(torch.int32)]

    return short


def widened(shape: list[int], values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The logits on the edge: those that were sent, and minus infinity."""
    whole = torch.full(shape, float("-inf"), dtype=values.dtype)
    return whole.scatter_(-1, words.long(), values)
