"""Capture attention weights of ``nn.MultiheadAttention``, ``transformers`` models and functional code.

Eager attention exposes its weights as the result of a softmax inside the module. Fast kernels do not, so they are
recomputed eagerly from the kernel's arguments, *beside* it: the output stays the kernel's, bit for bit.
`AttentionCapture.notes` lists where. Other kernels than PyTorch's own (such as flash attention in ``transformers``)
cannot be observed: there the model is switched to eager attention until the observer is detached.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from shared_hooks import devices
from shared_hooks.errors import InputMismatch, UnknownLayer
from shared_hooks.modules import walk
from shared_hooks.observers.base import Attachment, Observer, Record
from shared_hooks.observers.thumbnails import encoded, over_places, shrunk
from shared_hooks.observers.watching import Deferred, ObservedCall, is_real
from shared_hooks.showing import short

if TYPE_CHECKING:
    from PIL import Image

MAX_WEIGHTS = 1 << 22


@short
@dataclass(frozen=True, eq=False)
class Attention(Record):
    """One attention inside a module: ``part`` numbers them if a call has several.

    ``shape``: (batch, heads, queries, keys). ``entropy`` in nats, mean over queries, and ``maximum``: one number per
    head. ``positions``: the most attended keys with their mean weight over batch, heads and queries. ``weights``:
    float32 of ``shape`` on the CPU, or None if not kept. ``source``: how they were obtained. ``picture``: a small heat
    map (`thumbnails`), empty if not requested; ``picture_max``: the weight that white stands for. ``over``,
    ``over_max``: the same for the total attention to image patches, if the keys are such (`over_places`).
    """

    part: int
    shape: tuple[int, ...]
    entropy: tuple[float, ...]
    maximum: tuple[float, ...]
    positions: tuple[tuple[int, float], ...]
    weights: torch.Tensor | None
    source: str
    picture: str = ""
    picture_max: float = 0.0
    over: str = ""
    over_max: float = 0.0


class AttentionCapture(Observer):
    """Records one `Attention` for each attention in each call of a module.

    ``top``: number of most attended positions. ``keep_weights``: keep the weights, of at most 4 million elements per
    call. ``picture``: keep a small heat map, of the mean over heads and the first item of the batch. Observes all
    attention modules by default.
    """

    surrounds = True

    def __init__(
        self,
        targets: Any = None,
        every_n: int = 1,
        max_records: int = 1000,
        top: int = 5,
        keep_weights: bool = True,
        picture: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(targets, every_n, max_records, **more)
        if isinstance(top, bool) or not isinstance(top, int) or top < 1:
            raise InputMismatch(f"top is a number from 1 up, not {top!r}")
        self.top = top
        self.keep_weights = keep_weights
        self.picture = picture
        self._own = threading.local()
        self._asked: dict[nn.Module, tuple[int, str]] = {}

    def default_targets(self, model: nn.Module) -> dict[nn.Module, str]:
        found = attention_modules(model)
        if not found:
            raise UnknownLayer("no module of this model is called attention: name those that attend in targets")
        return found

    def _attachment(self, root: nn.Module, modules: dict[nn.Module, str], owner: Any, thread: int | None) -> Attachment:
        # the fused kernel of a TransformerEncoderLayer does not call its attention
        outer: dict[nn.Module, str] = {
            module: modules[module.self_attn]
            for module in root.modules()
            if isinstance(module, nn.TransformerEncoderLayer) and module.self_attn in modules and module not in modules
        }
        self._require_eager(root, owner)
        return super()._attachment(root, {**modules, **outer}, owner, thread)

    def around(
        self, call: ObservedCall, name: str, step: int, add: Callable[[Any], None]
    ) -> AbstractContextManager[Any] | None:
        module = call.module
        if isinstance(module, nn.TransformerEncoderLayer):
            self._called().discard(module.self_attn)
            return None
        # PyTorch does not use its fused kernels under a function mode: where they may run there must be none
        if any(isinstance(inner, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for inner in module.modules()):
            return None
        return _Inside(self, call, name, step, add)

    def observe(self, call: ObservedCall, name: str, step: int) -> Deferred | None:
        module = call.module
        if isinstance(module, nn.MultiheadAttention):
            self._called().add(module)
            self.note("nn.MultiheadAttention returns no weights unless requested", name)
            return self.summary(_of_multihead(module, call.args, call.kwargs), name, step, 0, RECOMPUTED)
        if isinstance(module, nn.TransformerEncoderLayer) and module.self_attn not in self._called():
            self.note("the fused kernel of nn.TransformerEncoderLayer calls no attention", name)
            return self.summary(_of_encoder_layer(module, call.args, call.kwargs), name, step, 0, RECOMPUTED)
        return None

    def summary(self, weights: torch.Tensor, name: str, step: int, part: int, source: str) -> Deferred:
        """Summarise ``weights``: (..., queries, keys); dimensions before the heads are the batch."""
        weights = weights.detach().float()
        while weights.dim() < 4:
            weights = weights.unsqueeze(0)
        weights = weights.reshape(-1, *weights.shape[-3:])
        shape = tuple(weights.shape)
        entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
        top = weights.mean((0, 1, 2)).topk(min(self.top, shape[-1]))
        keep = self.keep_weights and weights.numel() <= MAX_WEIGHTS
        small = shrunk(weights) if self.picture else weights.new_empty(0, 0)
        over = over_places(weights) if self.picture else weights.new_empty(0, 0)
        rows = [entropy, weights.amax((0, 2, 3)), top.indices.float(), top.values, small.reshape(-1), over.reshape(-1)]
        sizes, form, over_form = [len(row) for row in rows], small.shape, over.shape
        values = torch.cat([*rows, weights.reshape(-1)] if keep else rows)

        def make(values: torch.Tensor) -> Attention:
            entropy, maximum, places, means, grid, laid, kept = values.split([*sizes, len(values) - sum(sizes)])
            return Attention(
                name,
                step,
                part,
                shape,
                tuple(entropy.tolist()),
                tuple(maximum.tolist()),
                tuple(zip(map(int, places.tolist()), means.tolist(), strict=True)),
                kept.reshape(shape).clone() if keep else None,
                source,
                encoded(grid.reshape(form).numpy()) if self.picture else "",
                _greatest(grid),
                encoded(laid.reshape(over_form).numpy()) if len(laid) else "",
                _greatest(laid),
            )

        return Deferred(values, make)

    def _called(self) -> set[nn.Module]:
        if not hasattr(self._own, "called"):
            self._own.called = set()
        found: set[nn.Module] = self._own.called
        return found

    def note(self, why: str, name: str) -> None:
        """Note once, with the first ``name``, that a kernel's weights had to be recomputed."""
        if not any(note.startswith(why) for note in self.notes):
            self.notes = (*self.notes, f"{why} (first: {name}): {RECOMPUTED}; the output stays the kernel's")

    # -- fused kernels ------------------------------------------------------------------------------------------

    def _require_eager(self, root: nn.Module, owner: Any) -> None:
        now = getattr(getattr(root, "config", None), "_attn_implementation", None)
        if root in self._asked:
            users, before = self._asked[root]
            self._asked[root] = users + 1, before
        elif now not in (None, "eager", "sdpa") and hasattr(root, "set_attn_implementation"):
            if owner is not None:
                self.notes = (*self.notes, f"{now} hides its weights: wrap the model with eager or sdpa attention")
                return
            self._asked[root] = 1, now
            _set_implementation(root, "eager")
            self.notes = (*self.notes, f"{now} hides its weights: the model runs eager attention while observed")

    def detached(self, root: nn.Module) -> None:
        if root in self._asked:
            users, before = self._asked.pop(root)
            if users > 1:
                self._asked[root] = users - 1, before
            else:
                _set_implementation(root, before)


def _greatest(values: torch.Tensor) -> float:
    return max(0.0, float(values.nan_to_num(0.0, 0.0, 0.0).max())) if len(values) else 0.0


RECOMPUTED = "computed again beside it, eagerly, from its own inputs"
SOFTMAX = "softmax in the module"


class _Inside(TorchFunctionMode):
    """Intercepts the softmaxes and the fast kernel of one call of a module."""

    def __init__(
        self, observer: AttentionCapture, call: ObservedCall, name: str, step: int, add: Callable[[Any], None]
    ) -> None:
        super().__init__()
        self.observer, self.call, self.name, self.step, self.add = observer, call, name, step, add
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kind = getattr(func, "__name__", "")
        if kind in ("softmax", "scaled_dot_product_attention") and self.call.is_real():
            try:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    self.seen(kind, args, kwargs, result)
            except Exception as error:
                self.observer.failed(error, self.name)
        return result

    def seen(self, kind: str, args: Any, kwargs: Any, result: Any) -> None:
        weights: torch.Tensor
        if kind == "softmax":
            weights, source = result, SOFTMAX
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if not is_real(result) or result.dim() < 3 or dim not in (-1, result.dim() - 1):
                return
        else:
            if not all(is_real(tensor) for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)):
                return
            self.observer.note("scaled_dot_product_attention gives no weights", self.name)
            weights, source = weights_of(*args, **kwargs), RECOMPUTED
        self.add(self.observer.summary(weights, self.name, self.step, self.count, source))
        self.count += 1


def _set_implementation(model: Any, name: str) -> None:
    model.set_attn_implementation(name)


def weights_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the weights of ``F.scaled_dot_product_attention`` before dropout: (..., queries, keys).

    A fully masked row is all zeros.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query.float() @ key.float().transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
    nowhere = (scores == -math.inf).all(-1, keepdim=True)
    return F.softmax(scores, -1).masked_fill(nowhere, 0.0)


_MULTIHEAD = inspect.signature(nn.MultiheadAttention.forward)
_ENCODER_LAYER = inspect.signature(nn.TransformerEncoderLayer.forward)


def _of_multihead(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    bound = _MULTIHEAD.bind(module, *args, **kwargs)
    bound.arguments.update(need_weights=True, average_attn_weights=False)
    # dropout draws random numbers, and zeroes weights
    query = bound.arguments["query"]
    drops = module.training and module.dropout > 0
    with devices.forked(query.device) if drops else contextlib.nullcontext():
        found: Any = nn.MultiheadAttention.forward(*bound.args, **bound.kwargs)
    weights: torch.Tensor = found[1]
    return weights


def _of_encoder_layer(layer: nn.TransformerEncoderLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    given = _ENCODER_LAYER.bind(layer, *args, **kwargs)
    given.apply_defaults()
    src = given.arguments["src"]
    padding = given.arguments["src_key_padding_mask"]
    if src.is_nested:  # how nn.TransformerEncoder represents padding
        lengths = torch.tensor([len(row) for row in src.unbind()], device=src.device)
        src = src.to_padded_tensor(0.0)
        padding = torch.arange(src.shape[1], device=src.device) >= lengths[:, None]
    x = layer.norm1(src) if layer.norm_first else src
    return _of_multihead(
        layer.self_attn,
        (x, x, x),
        {
            "attn_mask": given.arguments["src_mask"],
            "key_padding_mask": padding,
            "is_causal": given.arguments["is_causal"],
        },
    )


def attention_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Return attention modules by type: ``nn.MultiheadAttention``, and the innermost whose type is called attention."""
    found: dict[nn.Module, str] = {}
    for module, info in walk(model, None).items():
        inner = (type(child).__name__.lower() for child in list(module.modules())[1:])
        if isinstance(module, nn.MultiheadAttention) or (
            "attention" in info.module_type.lower() and not any("attention" in kind for kind in inner)
        ):
            found[module] = info.path
    return found


# Attention weights as a picture: queries downwards, keys to the right, larger weights brighter.


STOPS: Final = np.array([[0, 0, 0], [120, 28, 109], [237, 105, 37], [252, 255, 164]], dtype=np.float64)
LEAST_SIDE: Final = 256


def heat_map(record: Attention, head: int | None = None, row: int = 0) -> Image.Image:
    """Draw an RGB picture of one head, or of the mean over heads, for one row of the batch; scaled to its maximum.

    Small maps are enlarged by a whole factor, so that a weight is a square. Raises InputMismatch if the weights were
    not kept or there is no such head or row.
    """
    if record.weights is None:
        raise InputMismatch(f"the attention weights of {record.name} were not kept")
    batch, heads = record.shape[:2]
    if not 0 <= row < batch or (head is not None and not 0 <= head < heads):
        raise InputMismatch(f"row {row}, head {head}: {record.name} has {batch} rows and {heads} heads")
    weights = record.weights[row].mean(0) if head is None else record.weights[row, head]
    return coloured(weights.numpy())


def coloured(grid: np.ndarray[Any, Any]) -> Image.Image:
    """Draw an RGB picture of (queries, keys), scaled to its maximum and enlarged by a whole factor."""
    from PIL import Image

    grid = np.nan_to_num(grid.astype(np.float64))
    grid = grid / max(grid.max(initial=0.0), 1e-12) * (len(STOPS) - 1)
    below = np.clip(grid.astype(int), 0, len(STOPS) - 2)
    colours = STOPS[below] + (STOPS[below + 1] - STOPS[below]) * (grid - below)[..., None]
    factor = max(1, LEAST_SIDE // max(grid.shape))
    pixels = colours.round().astype(np.uint8).repeat(factor, 0).repeat(factor, 1)
    return Image.fromarray(pixels)


def save_heat_map(record: Attention, path: str | Path, head: int | None = None, row: int = 0) -> None:
    """Write `heat_map` as PNG."""
    heat_map(record, head, row).save(path, "PNG")
