"""The settings around a forward that change what the kernels compute."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shared_hooks.trees import dtype_name, dtype_named, flatten

_AUTOCAST_DEVICES = ("cpu", "cuda")


def ambient() -> dict[str, Any]:
    """Autocast as it is around the caller: ``{"autocast": [[device type, dtype], ...]}``."""
    found = [
        [device, dtype_name(torch.get_autocast_dtype(device))]
        for device in _AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    ]
    return {"autocast": found}


@contextlib.contextmanager
def restored(context: dict[str, Any]) -> Iterator[None]:
    """Autocast as it was around the head, whatever is around the tail."""
    wanted = dict(context.get("autocast", []))
    with contextlib.ExitStack() as stack:
        for device in _AUTOCAST_DEVICES:
            if device in wanted:
                stack.enter_context(torch.autocast(device, dtype=dtype_named(wanted[device])))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def environment() -> dict[str, str]:
    """Process-wide settings that must be the same on both sides."""
    return {
        "default_dtype": dtype_name(torch.get_default_dtype()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "mha_fast_path": "off",
    }


def signature(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """What a plan is valid for: (key of this process, digest to compare with the other side, context).

    Both cover the structure, shapes, dtypes and literals of the inputs, autocast and the training flags. The key also
    covers strides, devices and aliasing among inputs, which the other side may have differently.
    """
    structure, tensors = flatten((args, kwargs))
    context = ambient() | {"training": model.training}
    shapes = [[list(tensor.shape), dtype_name(tensor.dtype)] for tensor in tensors]
    digest = hashlib.blake2b(json.dumps([structure, shapes, context]).encode(), digest_size=16).hexdigest()
    forms: list[Any] = []
    first: dict[int, int] = {}
    for tensor in tensors:
        try:
            storage = first.setdefault(tensor.untyped_storage()._cdata, len(forms))
            offset = tensor.storage_offset() - tensors[storage].storage_offset()
            forms.append([tensor.stride(), str(tensor.device), storage, offset])
        except (RuntimeError, NotImplementedError):
            forms.append([str(tensor.layout), str(tensor.device)])
    weight = next(model.parameters(), None)
    kept = None if weight is None else [dtype_name(weight.dtype), str(weight.device)]
    return f"{digest} {forms} {kept}", digest, context
