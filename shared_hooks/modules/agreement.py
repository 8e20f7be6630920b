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
from collections.abc import Iterator, Mapping
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


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By path, what each module holds that is a number, or a tuple of numbers. Ask before the first forward.

    Of torch's own modules also text and functions (a mode, an activation); the text of others is left out, for it may
    hold paths, which differ between machines. So is what torch keeps on every module, which differs between releases.
    """
    return {path: dict(sorted(_attributes(module))) for path, module in model.named_modules()}


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    torchs = is_torchs(type(module))
    for name, value in vars(module).items():
        if name in _OF_EVERY_MODULE or name.startswith("__"):
            continue
        if _is_number(value) or (torchs and type(value) is str):
            yield name, tuple(value) if isinstance(value, (list, tuple)) else value
        elif torchs and callable(value) and not isinstance(value, nn.Module) and hasattr(value, "__name__"):
            yield name, Named(value.__name__)


class Named(str):
    """The name of a function."""

    __slots__ = ()


def is_torchs(kind: type) -> bool:
    """Whether what its instances hold comes from torch, at least in part."""
    return any(one is not nn.Module and one.__module__.startswith("torch.nn.") for one in kind.__mro__)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def configuration_digest(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Of `attributes`."""
    return digest_of([[path, [[name, repr(value)] for name, value in each.items()]] for path, each in found.items()])


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


def source_digest(kind: type) -> str:
    """The same of one class; of torch's own all the same."""
    return digest_of(_source(kind))


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
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def tensor_hash(tensor: torch.Tensor) -> str:
    """Over the bytes of one tensor."""
    return hashlib.blake2b(_bytes(tensor), digest_size=8).hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
