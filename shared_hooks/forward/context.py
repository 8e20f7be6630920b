"""The settings around a forward that change what the kernels compute."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shared_hooks import devices
from shared_hooks.errors import BadFrame, Disagreement
from shared_hooks.modules import ModuleInfo
from shared_hooks.tensors import dtype_name, dtype_named, flatten_inputs

_AUTOCAST_DEVICES = devices.AUTOCAST
_NOTHING = contextlib.nullcontext()
_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_SETTINGS = frozenset({"mkldnn", "cudnn", "attention_kernels"})
"""Settings that choose among kernels of one precision. Their defaults change between releases of torch, as do the last
bits of all kernels, so they must be equal only if the release is.
"""


def ambient() -> dict[str, Any]:
    """Return the caller's autocast settings: ``{"autocast": [[device type, dtype], ...]}``."""
    found = [
        [device, dtype_name(torch.get_autocast_dtype(device))]
        for device in _AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    ]
    return {"autocast": found}


def restored(context: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context with the head's autocast settings, whatever those around the tail are."""
    if not context.get("autocast") and not torch._C._is_any_autocast_enabled():
        return _NOTHING
    return _restored(context)


@contextlib.contextmanager
def _restored(context: dict[str, Any]) -> Iterator[None]:
    try:
        wanted = {str(device): dtype_named(dtype) for device, dtype in context.get("autocast", [])}
    except (TypeError, ValueError) as error:
        raise BadFrame("malformed description of a cut: autocast") from error
    for name, dtype in wanted.items():
        if name not in _AUTOCAST_DEVICES or dtype not in _AUTOCAST_DTYPES:
            raise BadFrame(f"malformed description of a cut: autocast of {name!r:.20} to {dtype}")
        if name != "cpu" and not devices.count(name):  # torch would continue without it
            raise Disagreement(f"the head ran under autocast of {name}, and this side has no such device")
    with contextlib.ExitStack() as stack:
        for device in _AUTOCAST_DEVICES:
            if device in wanted:
                stack.enter_context(torch.autocast(device, dtype=wanted[device]))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


_SETTINGS: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    torch._C._get_float32_matmul_precision,
    torch._C._get_deterministic_algorithms,
    torch._C._get_mkldnn_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_cublas_allow_tf32,
    torch._C._get_cudnn_allow_tf32,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)
"""The functions behind `torch.backends`, called directly: every tail calls them, with cold caches."""


def settings() -> tuple[Any, ...]:
    """Return the process-wide settings that must be equal on both sides; quick to get and compare."""
    return tuple([ask() for ask in _SETTINGS])


def environment() -> dict[str, str]:
    """These settings by name, as text."""
    dtype, precision, deterministic, mkldnn, cudnn, matmul_tf32, cudnn_tf32, *attention = settings()
    kinds = zip(("flash", "memory-efficient", "math", "cudnn"), attention, strict=True)
    return {
        "default_dtype": dtype_name(dtype),
        "float32_matmul_precision": precision,
        "deterministic_algorithms": str(deterministic),
        "mha_fast_path": "off",
        "mkldnn": str(mkldnn),
        "cudnn": str(cudnn),
        "tf32": f"matmul {matmul_tf32}, cudnn {cudnn_tf32}",
        "attention_kernels": ", ".join(name for name, enabled in kinds if enabled),
    }


def context_of(modules: Mapping[nn.Module, ModuleInfo]) -> dict[str, Any]:
    """Return what must be equal around a tail and its head: autocast, settings, modules in training mode, and torch's
    release.
    """
    training = [info.path for module, info in modules.items() if module.training]
    return {**ambient(), "environment": environment(), "training": training, "torch": str(torch.__version__)}


def excused(setting: str, mine: object, theirs: object) -> bool:
    """Return whether this setting may differ between two sides with these releases of torch (None: unknown).

    Builds for CPU and CUDA ("2.13.0+cpu", "2.13.0+cu130") are the same release, with the same defaults.
    """
    return setting in KERNEL_SETTINGS and None not in (mine, theirs) and _release(mine) != _release(theirs)


def _release(version: object) -> str:
    return str(version).partition("+")[0]


def check(context: dict[str, Any], modules: Mapping[nn.Module, ModuleInfo], cache: dict[Any, Any]) -> None:
    """Compare the head's context with this side's, except for autocast, which is restored.

    Raises Disagreement that names the differences. ``cache`` makes a repeated check cheap.
    """
    now = (settings(), [module.training for module in modules])
    if cache.get("agreed") == now:
        return
    mine = context_of(modules)
    theirs = context.get("environment")
    for name, value in mine["environment"].items():
        other = theirs.get(name) if isinstance(theirs, dict) else None
        if other != value and not excused(name, mine["torch"], context.get("torch")):
            raise Disagreement(f"{name} is {other} on the edge and {value} here")
    if context.get("training") != mine["training"]:
        raise Disagreement(f"modules in training mode: {context.get('training')} on the edge, {mine['training']} here")
    cache["agreed"] = now


def key_of(
    modules: Mapping[nn.Module, ModuleInfo],
    weight: torch.Tensor | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    """Return what a plan is valid for in this process; computed for every request.

    It covers the `signature`, and strides, devices and aliasing of inputs, which may differ on the other side, and
    dtype and device of one ``weight`` of the model, which may be moved or converted between forwards.
    """
    structure, tensors = flatten_inputs(args, kwargs)
    forms: list[Any] = []
    first: dict[int, int] = {}
    for tensor in tensors:
        form = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
        try:
            storage = first.setdefault(tensor.untyped_storage()._cdata, len(forms))
            offset = tensor.storage_offset() - tensors[storage].storage_offset()
            # even the stride of a dimension of size 1 counts: torch derives the memory format of a result from it
            forms.append((*form, tensor.stride(), storage, offset))
        except (RuntimeError, NotImplementedError):
            forms.append((*form, tensor.layout))
    kept = None if weight is None else (weight.dtype, weight.device)
    around = [torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _AUTOCAST_DEVICES]
    training = tuple([module.training for module in modules])
    return repr(structure), tuple(forms), kept, tuple(around), settings(), training


def signature(
    modules: Mapping[nn.Module, ModuleInfo], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return what a plan is valid for on either side: (digest to compare, context).

    It covers the structure, shapes, dtypes and literals of the inputs, autocast and the training flags. Settings are
    compared separately by `check`.
    """
    structure, tensors = flatten_inputs(args, kwargs)
    context = context_of(modules)
    shapes = [[list(tensor.shape), dtype_name(tensor.dtype)] for tensor in tensors]
    return signature_digest(structure, shapes, context), context


def signature_digest(structure: Any, shapes: list[list[Any]], context: dict[str, Any]) -> str:
    """``shapes``: the shape and the dtype's name for each tensor of the inputs."""
    around = [context.get("autocast"), context.get("training")]
    return hashlib.blake2b(json.dumps([structure, shapes, around]).encode(), digest_size=16).hexdigest()
