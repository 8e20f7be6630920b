"""What of the logits comes back. All of them are the largest bytes on the wire: of 150,000 words 600 KB a token.

    None              all of them
    ["top", k]        those that are among the k largest after a temperature was applied; all others are minus infinity
    ["token"]         the largest at each position: logits in which that word is likeliest, and no more is known
    ["sample", [...]] the word that was drawn at the last position by these processors (`sampling`)

The leaves of an answer (`results`): ``["top" | "token" | "drawn", shape, dtype]`` and the numbers of its tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from shared_hooks.errors import BadFrame
from shared_hooks.tensors import dtype_name, dtype_named

Answer = tuple[Any, ...] | None
LOGITS = "logits"
SHORT = ("top", "token", "drawn")
Short = Callable[[str, torch.Tensor], Any]
Draw = Callable[[Any, torch.Tensor], torch.Tensor]
MOST_LOGITS = 1 << 32
_NOTHING = float("-inf")


def shortened(wanted: Any, draw: Draw) -> Short:
    """For `results.said`. ``draw`` samples by processors, from the float32 scores of (rows, words). Raises BadFrame."""
    if wanted is None:
        return lambda name, tensor: None
    kind, *details = wanted if isinstance(wanted, list) and wanted else [None]
    most = details[0] if details and type(details[0]) is int else 0
    short: Callable[[torch.Tensor], Any]
    if kind == "top" and len(details) == 1 and most > 0:
        short = functools.partial(_top, most=most)
    elif kind == "token" and not details:
        short = _token
    elif kind == "sample" and len(details) == 1:
        short = functools.partial(_drawn, draw=draw, processors=details[0])
    else:
        raise BadFrame(f"no such answer: {wanted!r:.60}")
    return lambda name, tensor: short(tensor) if name == LOGITS and tensor.dim() > 1 and tensor.numel() else None


def _top(logits: torch.Tensor, most: int) -> Any:
    """Ties with the k-th are sent, too, and what a division by a temperature may make one of them. Where that is much,
    all is sent.
    """
    words = logits.shape[-1]
    if 2 * most >= words:
        return None
    scores = logits.to(torch.float32)
    last = scores.topk(most, -1).values[..., -1:]
    # numbers that one division may make equal differ by 2^-23 of themselves; NaN is below nothing
    bound = torch.where(last.isfinite(), last - last.abs() * 2.0**-20 - 1e-30, last)
    count = int((~(scores < bound)).sum(-1).max())
    if 2 * count >= words:
        return None
    values, found = logits.topk(count, -1)
    return ["top", list(logits.shape), dtype_name(logits.dtype)], [values, found.to(torch.int32)]


def _token(logits: torch.Tensor) -> Any:
    found = logits.to(torch.float32).argmax(-1)
    return ["token", list(logits.shape), dtype_name(logits.dtype)], [found.to(torch.int32)]


def _drawn(logits: torch.Tensor, draw: Draw, processors: Any) -> Any:
    if logits.dim() != 3:
        return None
    found = draw(processors, logits[:, -1].to(device="cpu", dtype=torch.float32))
    return ["drawn", list(logits.shape), dtype_name(logits.dtype)], [found.to(torch.int32)]


def widened(said: Any, tensors: list[torch.Tensor], most_words: int) -> torch.Tensor:
    """The logits on the edge: what was sent, and minus infinity. ``most_words``: that the model may tell apart. Raises
    BadFrame, before memory is taken for an answer that is not this model's.
    """
    kind, shape, dtype, first = said
    try:
        sent = tuple(tensors[first].shape)
        rows = sent[:-1] if kind == "top" else sent
        fits = sent == (shape[0],) and len(shape) == 3 if kind == "drawn" else tuple(shape[:-1]) == rows
        if not fits or not 0 < shape[-1] <= most_words or math.prod(shape) > MOST_LOGITS:
            raise BadFrame(f"an answer says that its logits are {shape!r:.60}, which is none of this model's")
        whole = torch.full(shape, _NOTHING, dtype=dtype_named(dtype))
        if kind == "top":
            return whole.scatter_(-1, tensors[first + 1].long(), tensors[first])
        words = tensors[first].long()[..., None]
        (whole if kind == "token" else whole[:, -1]).scatter_(-1, words, 0.0)
    except RuntimeError as error:
        raise BadFrame(f"the words of an answer do not fit its logits: {error!s:.120}") from error
    return whole
