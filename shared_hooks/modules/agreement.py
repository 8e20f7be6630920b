"""Digests that tell whether two sides have the same model: its structure, configuration, code and weights.

Each is hexadecimal and the same in every process, on every device. Weights and structure come from the state
dictionary; configuration and code catch what it does not show: a slope, an epsilon, a constant in ``forward``.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import inspect
import json
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shared_hooks.modules.attach import Shim
from shared_hooks.tensors import dtype_name


def digest_of(value: Any) -> str:
    """Digest of a JSON-able value."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def structure_digest(model: nn.Module, depth: int | None) -> str:
    """Over paths, classes, depth, and the names, shapes and dtypes of parameters and buffers."""
    modules = [[name, type(module).__name__] for name, module in model.named_modules(remove_duplicate=False)]
    return digest_of([modules, [[name, *form_of(value)] for name, value in state_of(model)], depth])


def state_of(model: nn.Module) -> list[tuple[str, Any]]:
    """The state dictionary, without what it is packed in: tensors, and other values (a quantised layer has both)."""
    return [one for name, value in model.state_dict().items() for one in _unpacked(name, value)]


def _unpacked(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _unpacked(f"{name}.{number}", one)
    else:
        yield name, value


def form_of(value: Any) -> list[Any]:
    """A value in words: a tensor by its dtype and shape, another by itself."""
    return [dtype_name(value.dtype), list(value.shape)] if isinstance(value, torch.Tensor) else [repr(value)]


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By path, what each module holds that is a number, or a tuple of numbers. Ask before the first forward.

    Of torch's own modules also text and functions (a mode, an activation); the text of others is left out, for it may
    hold paths, which differ between machines. So is what torch keeps on every module, which differs between releases.
    """
    return {path: dict(sorted(_attributes(module))) for path, module in model.named_modules()}


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    torchs = is_torchs(type(module))
    for name, value in vars(module).items():
        if name in OF_EVERY_MODULE or name.startswith("__") or _is_own_forward(module, name, value):
            continue
        if _is_number(value) or (torchs and type(value) is str):
            yield name, tuple(value) if isinstance(value, (list, tuple)) else value
        elif torchs and callable(value) and not isinstance(value, nn.Module) and (text := _function(value)):
            yield name, Named(text)


def _function(value: Any) -> str:
    """A function in words: torch's by the name alone, others also by what they do and the numbers that they hold."""
    if isinstance(value, functools.partial):
        held = [*map(_held, value.args), *(f"{name}={_held(one)}" for name, one in sorted(value.keywords.items()))]
        return f"{_function(value.func)}({', '.join(held)})"
    if not isinstance(value, types.FunctionType) or value.__module__.partition(".")[0] == "torch":
        return str(getattr(value, "__name__", ""))
    held = [repr(one) for one in (*(value.__defaults__ or ()), *_cells(value)) if one is not None and _is_number(one)]
    return f"{value.__name__} {digest_of([_source_of(value), held])}"


def _cells(function: types.FunctionType) -> Iterator[Any]:
    """What a closure holds on to; a name that has no value yet holds nothing."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _held(value: Any) -> str:
    """An argument in words that are the same in every process: no address."""
    if _is_number(value) or type(value) is str:
        return repr(value)
    return (_function(value) if callable(value) else "") or type(value).__qualname__


def _is_own_forward(module: nn.Module, name: str, value: Any) -> bool:
    """Whether what stands on the module is what its class has under that name: the shim of one that is wrapped, or
    what a copy has of it.
    """
    if isinstance(value, Shim):
        value = value.forward
    return isinstance(value, types.MethodType) and value.__func__ is getattr(type(module), name, None)


class Named(str):
    """The name of a function."""

    __slots__ = ()


def is_torchs(kind: type) -> bool:
    """Whether what its instances hold comes from torch, at least in part."""
    return any(one is not nn.Module and one.__module__.startswith("torch.nn.") for one in kind.__mro__)


OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch keeps on each."""


def configuration_digest(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A digest of `attributes`."""
    return digest_of([[path, [[name, repr(value)] for name, value in each.items()]] for path, each in found.items()])


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_number(item) for item in value)
    return value is None or type(value) in (bool, int, float)


def code_digest(model: nn.Module) -> str:
    """Over the source of the model's own classes: the functions they define or inherit, and numbers of the class.

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
    held = []
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and base.__module__.partition(".")[0] != "torch":
            for name, value in vars(base).items():
                if (function := _unbound(value)) is not None and function not in functions:
                    functions.append(function)
                elif value is not None and _is_number(value) and not name.startswith("__"):
                    held.append((name, value))
    # What class methods assign is kept in passing: one process has it sooner than another.
    passing = {name for one in functions if _takes_class(kind, one) for name in assigned_by(one)}
    return [*map(_source_of, functions), *(f"{name} = {value!r}" for name, value in held if name not in passing)]


def _takes_class(kind: type, function: types.FunctionType) -> bool:
    return any(
        isinstance(found := vars(base).get(function.__name__), classmethod) and found.__func__ is function
        for base in kind.__mro__
    )


def assigned_by(function: types.FunctionType) -> Iterator[str]:
    """Names of the attributes that a function assigns to, of whatever object."""
    return (one.argval for one in dis.get_instructions(function) if one.opname == "STORE_ATTR")


def _unbound(value: Any) -> types.FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)  # a static method, or one of the class
    return value if isinstance(value, types.FunctionType) else None


def _source_of(function: types.FunctionType) -> str:
    """Its own text and that of what it wraps, less torch's, whose releases word the same thing differently: a model may
    wrap a method of ``nn.Module``, and torch's decorators wrap a model's.
    """
    texts: list[str] = []
    wrapped: Any = function
    while isinstance(wrapped, types.FunctionType):
        if not wrapped.__code__.co_filename.startswith(_OF_TORCH):
            try:
                texts.append(inspect.getsource(wrapped.__code__))
            except (OSError, TypeError):  # typed at a prompt, or compiled: the plan has to do
                texts.append(wrapped.__qualname__)
        wrapped = getattr(wrapped, "__wrapped__", None)
    return "\n".join(texts)


_OF_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def weights_hash(model: nn.Module) -> str:
    """Over the state dictionary: names, shapes, dtypes and bytes, whatever device they are on."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(state_of(model), key=lambda one: one[0]):
        digest.update(json.dumps([name, *form_of(value)]).encode())
        if isinstance(value, torch.Tensor):
            digest.update(_bytes(value))
    return digest.hexdigest()


def tensor_hash(value: Any) -> str:
    """Over the bytes of one tensor; empty for another value."""
    return hashlib.blake2b(_bytes(value), digest_size=8).hexdigest() if isinstance(value, torch.Tensor) else ""


def _bytes(tensor: torch.Tensor) -> bytes | memoryview:
    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        return b"".join((_bytes(tensor.int_repr()), _bytes(tensor.dequantize())))  # the second tells the scales
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
