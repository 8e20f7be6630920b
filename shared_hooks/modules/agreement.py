"""Digests that tell whether two sides have the same model: its structure, configuration, code and weights.

Each is hexadecimal and the same in every process, on every device. Weights and structure come from the state
dictionary; configuration and code catch what it does not show: a slope, an epsilon, a constant in ``forward``.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import types
from typing import Any

import torch
from torch import nn

from shared_hooks.tensors import dtype_name


def digest_of(value: Any) -> str:
    """Digest of a JSON-able value."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def structure_digest(model: nn.Module, depth: int | None) -> str:
    """Over paths, classes, depth, and the names, shapes and dtypes of parameters and buffers."""
    modules = [[name, type(module).__name__] for name, module in model.named_modules(remove_duplicate=False)]
    tensors = [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in model.state_dict().items()]
    return digest_of([modules, tensors, depth])


def configuration_digest(model: nn.Module) -> str:
    """Over what each module says of itself, and its attributes that are numbers. Ask before the first forward.

    Text is left out: it may hold paths, which differ between machines.
    """
    found = []
    for name, module in model.named_modules():
        numbers = {key: value for key, value in vars(module).items() if key != "training" and _is_number(value)}
        found.append([name, _said(module), numbers])
    return digest_of(found)


def _said(module: nn.Module) -> str:
    try:
        return str(module.extra_repr()) if type(module).__module__.startswith("torch.nn.") else ""
    except Exception:  # a half-built module may not be able to describe itself; its numbers still count
        return ""


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_number(item) for item in value)
    return value is None or type(value) in (bool, int, float)


def code_digest(model: nn.Module) -> str:
    """Over the source of the model's own classes: the functions they define, and the ``forward`` they inherit.

    Classes of torch itself are left out; releases of torch may differ as long as the plan does not.
    """
    kinds: set[Any] = {type(module) for module in model.modules()}
    # without the module's name: what is a script on one side may be installed on the other
    return digest_of(sorted([kind.__qualname__, _source(kind)] for kind in kinds))


@functools.lru_cache(maxsize=4096)
def _source(kind: Any) -> list[str]:
    if kind.__module__.partition(".")[0] == "torch":
        return []
    functions = [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    forward = getattr(kind, "forward", None)
    if isinstance(forward, types.FunctionType) and forward not in functions:
        functions.append(forward)
    found = []
    for function in functions:
        try:
            found.append(inspect.getsource(function))
        except (OSError, TypeError):  # typed at a prompt, or compiled: the plan has to do
            found.append(function.__qualname__)
    return found


def weights_hash(model: nn.Module) -> str:
    """Over the state dictionary: names, shapes, dtypes and bytes, whatever device they are on."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()
