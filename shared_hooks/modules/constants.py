"""What must be equal on both sides: digests of a model, and its constants.

A digest is hexadecimal and the same in every process, on every device: of structure, configuration, code and weights.
Weights and structure come from the state dictionary; the constants are what it does not contain: a slope, an epsilon, a
factor in a dictionary, in a class, or in what a function closes over.
"""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import decimal
import dis
import enum
import fractions
import functools
import hashlib
import inspect
import json
import linecache
import operator
import os
import re
import sys
import tokenize
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeGuard

import numpy as np
import torch
from torch import nn

from shared_hooks.modules.attach import Shim, named_hooks
from shared_hooks.tensors import dtype_name


def digest_of(value: Any) -> str:
    """Return the digest of a JSON-able value."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def structure_digest(model: nn.Module, depth: int | None) -> str:
    """Return the digest of paths, classes, depth, and the names, shapes and dtypes of parameters and buffers."""
    modules = [[name, type(module).__name__] for name, module in model.named_modules(remove_duplicate=False)]
    return digest_of([modules, [[name, *form_of(value)] for name, value in state_of(model)], depth])


def state_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the entries of the state dictionary, unpacked: tensors, and other values (a quantised layer has both)."""
    return [one for name, value in model.state_dict().items() for one in _unpacked(name, value)]


def _unpacked(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _unpacked(f"{name}.{number}", one)
    else:
        yield name, value


def form_of(value: Any) -> list[Any]:
    """Return the dtype and shape of a tensor; the `repr` of another value."""
    return [dtype_name(value.dtype), list(value.shape)] if isinstance(value, torch.Tensor) else [repr(value)]


def attributes(
    model: nn.Module,
    is_read: Callable[[str], bool] = lambda _: True,
    is_written: Callable[[str], bool] = lambda _: False,
) -> dict[str, dict[str, Any]]:
    """Return the constants in each module, by path, and by the way to them ("config.eps") those in objects that it
    holds: dictionaries, lists, functions, modules that are no part of the model. Call it before the first forward.

    Constants are numbers, and what has the same text in every process (a mode, a type, a function): no paths, no
    devices. Omitted is what torch keeps on every module, which differs between releases; so is what is no number on a
    module itself, and all that an object holds, if no code reads an attribute of that name (``is_read``): it may be a
    process's own. A set or list that code may write to (``is_written``) is none, except for a list of numbers on a
    module itself.
    """
    walk = _Walk(is_read, is_written, map(id, model.modules()))
    found = {}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
        facts = [
            (name, value)
            for name, value in _attributes(module, own, is_written)
            if name == "forward"
            or not isinstance(value, (Word, FunctionName))
            or is_torchs(type(module))
            or is_read(name)
        ]
        for name, value in own.items():
            if is_read(name) and not _is_own_forward(module, name, value):
                facts += walk.below(name, name, value)
        hooks = {str(number): hook for number, (_, hook) in enumerate(_hooks(module))}
        facts += walk.facts("forward hooks.", hooks, named=False)
        for name, parameter in module.named_parameters(recurse=False):
            facts += walk.facts(f"{name}.", vars(parameter), named=True)
        found[path] = dict(sorted(facts, key=operator.itemgetter(0)))
    return found


def words_of(value: Any, is_read: Callable[[str], bool], is_written: Callable[[str], bool]) -> str:
    """Return the text of a constant that code holds, with its content; "" for anything else.

    Truth values alone, or of a class or module, are none: they describe a machine. ``is_read``, ``is_written``: as in
    `attributes`.
    """
    if value is None or type(value) is bool:
        return ""
    constant = None if isinstance(value, (type, *FUNCTIONS)) else _constant(value)
    entries = sorted(_Walk(is_read, is_written).below("", "", value), key=operator.itemgetter(0))
    if isinstance(value, (type, types.ModuleType)):
        entries = [(name, one) for name, one in entries if type(one) is not bool and one is not None]
    return " ".join(_shortened(repr(one)) for one in (constant, entries) if one is not None and one != [])


MOST_KEYS: Final = 64
"""A dictionary with more keys is a table: a single constant, whose values are not examined."""
MOST_ENTRIES: Final = 1 << 16
"""The maximum number of entries of such a table, and of a list."""
MOST_OBJECTS: Final = 4096
MOST_TEXT: Final = 256
_DEPTH: Final = 8
_ADDRESS: Final = 1 << 32
"""A larger integer as a key is some object's `id`, which differs between processes."""


class _Walk:
    """Visits what a model's modules hold, each object once. ``known``: ids of objects that are skipped."""

    def __init__(
        self,
        is_read: Callable[[str], bool],
        is_written: Callable[[str], bool] = lambda _: False,
        known: Iterable[int] = (),
    ) -> None:
        self._is_read = is_read
        self._is_written = is_written
        self._known = set(known)
        self._left = MOST_OBJECTS

    def facts(self, way: str, held: Mapping[str, Any], *, named: bool, depth: int = _DEPTH) -> Iterator[Fact]:
        """Yield the constants in ``held``, by the way to them. ``named``: only of attributes that code reads."""
        for name, value in list(held.items()):
            if named and (name.startswith("__") or not self._is_read(name)):
                continue
            if name in _LEFT_IN_CONFIGURATIONS and not value:
                continue
            if not (_may_grow(value) and self._is_written(name)):
                constant = _constant(value)
                if constant is not None or value is None:
                    yield f"{way}{name}", constant
            yield from self.below(f"{way}{name}", name, value, depth)

    def below(self, way: str, name: str, value: Any, depth: int = _DEPTH) -> Iterator[Fact]:
        """Yield the constants in an object that is held under ``name``."""
        if type(value) in _SCALARS or not depth or not self._left or id(value) in self._known:
            return
        if isinstance(value, _LISTS):
            self._known.add(id(value))
            for number, one in enumerate(_entries(value)):
                if not _is_number(one):
                    yield from self.below(f"{way}[{number}]", name, one, depth - 1)
            return
        held = inside(value)
        if held is None:
            return
        self._known.add(id(value))
        self._left -= 1
        if isinstance(value, (types.FunctionType, functools.partial)):  # its numbers are in its own facts
            held = {entry: one for entry, one in held.items() if not _is_number(one)}
        if isinstance(value, nn.Module):
            named = not is_torchs(type(value))
        else:
            named = isinstance(value, (type, types.ModuleType)) or _is_plain_object(value)
        if isinstance(value, _DICTIONARIES) and self._is_written(name):
            # any entry of a dictionary may be read, and where code writes to it only the names in the code are
            # settings
            named, held = True, {entry: one for entry, one in held.items() if entry.isidentifier()}
        if isinstance(value, types.ModuleType):
            held, depth = {entry: one for entry, one in held.items() if not callable(one)}, 1
        yield from self.facts(f"{way}." if way else "", held, named=named, depth=depth - 1)


Fact = tuple[str, Any]

_SCALARS = frozenset({bool, int, float, str, bytes, type(None), torch.Tensor})
_DICTIONARIES = (dict, types.MappingProxyType, collections.ChainMap, collections.UserDict)
_LISTS = (list, tuple, collections.deque, collections.UserList)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def inside(value: Any) -> dict[str, Any] | None:
    """Return what an object holds, by name; None for what holds nothing that counts: a tensor, an object of torch,
    NumPy or the standard library, other than dictionaries, functions and modules.
    """
    kind = type(value)
    if isinstance(value, _DICTIONARIES):
        if len(value) > MOST_KEYS:
            return None
        return {name: one for key, one in _items(value) if (name := _key(key)) is not None}
    if isinstance(value, nn.Module):
        own = {name: one for name, one in vars(value).items() if name not in OF_EVERY_MODULE}
        return own | dict(value._modules)
    if isinstance(value, types.MethodType):
        return {"__self__": value.__self__}
    if isinstance(value, weakref.ReferenceType):
        return {"()": value()}
    if isinstance(value, functools.partial):
        return {"(func)": value.func, "(args)": value.args, **value.keywords}
    if isinstance(value, types.FunctionType):
        return None if _is_known(value.__module__ or "") else _around(value)
    if isinstance(value, type):
        if issubclass(value, enum.Enum):
            return {one.name: one.value for one in value}
        return None if _is_known(value.__module__) else _of_class(type(value)) | _of_class(value)
    if isinstance(value, types.ModuleType):
        return None if _is_known(value.__name__) else dict(vars(value))
    if not _is_plain_object(value):
        return None
    return _of_class(kind) | _fields(value)


_APART = (nn.Module, type, torch.Tensor, types.ModuleType, enum.Enum, Shim, *_DICTIONARIES, *_LISTS)


def _is_plain_object(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, _APART) or _is_known(kind.__module__):
        return False
    return type(getattr(value, "__dict__", None)) is dict or bool(getattr(kind, "__slots__", ()))


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


_KNOWN: Final = frozenset({"torch", "numpy", *sys.stdlib_module_names}) - {"__main__", "types", "argparse"}


def _of_class(kind: type) -> dict[str, Any]:
    """Return what a class and its bases hold that is neither a function nor a descriptor."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not _is_known(base.__module__):
            found |= {
                name: one
                for name, one in list(vars(base).items())
                if not (name.startswith("__") or (hasattr(type(one), "__get__") and _is_known(type(one).__module__)))
            }
    return found


def _fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including slots."""
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and not name.startswith("__"):
                with contextlib.suppress(AttributeError):  # not set yet
                    found[name] = slot.__get__(value)
    return found


def _entries(value: Any) -> list[Any]:
    """Return the entries of a list, whatever its class defines; empty for one that is too long."""
    kind = next(one for one in _LISTS if isinstance(value, one))
    if kind is collections.UserList:
        kind, value = list, value.data
    return [*kind.__iter__(value)] if kind.__len__(value) <= MOST_ENTRIES else []


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return the entries of a dictionary, likewise."""
    return list(dict.items(value)) if isinstance(value, dict) else list(value.items())


def _around(function: types.FunctionType) -> dict[str, Any]:
    """Return what a function closes over, and its defaults."""
    found: dict[str, Any] = {"(defaults)": [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        for value in _filled(cell):
            found[name] = value
    return found


def cells(function: types.FunctionType) -> Iterator[Any]:
    """Return the values of a function's closure variables; those without a value are omitted."""
    return (value for cell in function.__closure__ or () for value in _filled(cell))


def _filled(cell: types.CellType) -> Iterator[Any]:
    with contextlib.suppress(ValueError):
        yield cell.cell_contents


def _key(key: Any) -> str | None:
    """Return a key as text that is the same in every process."""
    if type(key) is str:
        return None if key.startswith("__") else key if key.isprintable() else ascii(key)
    if type(key) is int and key > _ADDRESS:
        return None
    constant = _constant(key)
    return None if constant is None else str(constant)


def _may_grow(value: Any) -> bool:
    """Return whether runs may add to it."""
    return isinstance(value, (set, bytearray, array.array, *_LISTS, *_DICTIONARIES)) and not isinstance(value, tuple)


def _constant(value: Any) -> Any:
    """Return a number, or numbers, as they are; another constant as text (`Word`) that is the same in every process;
    None for anything else.
    """
    if _is_number(value):
        return _fixed(value)
    text = _words(value)
    return None if text is None else Word(text)


def _words(value: Any, depth: int = _DEPTH) -> str | None:
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name} {_constant_text(value.value)}"
    if isinstance(value, (str, torch.dtype)):
        text = str(value).removeprefix("torch.")  # a configuration may have a dtype as text until it is read
        return _shortened(text) if _is_word(text) else None
    if isinstance(value, (int, float)):  # of a subclass
        return int.__repr__(value) if isinstance(value, int) else float.__repr__(value)
    if isinstance(value, (bytes, bytearray, array.array)):
        data = memoryview(value).cast("B") if len(value) else b""
        return f"{type(value).__name__} {len(value)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"
    if isinstance(value, (set, frozenset)):
        texts = [_constant_text(one, depth) for one in value] if len(value) <= MOST_ENTRIES else [None]
        return None if None in texts else _shortened(repr(sorted(map(str, texts))))
    if isinstance(value, _LISTS):
        texts = [_constant_text(one, depth) for one in _entries(value)]
        return _shortened(f"[{', '.join(one or '?' for one in texts)}]") if any(texts) else None
    if isinstance(value, _DICTIONARIES):
        return _table(value, depth) if MOST_KEYS < len(value) <= MOST_ENTRIES else None
    if isinstance(value, (operator.itemgetter, operator.attrgetter, operator.methodcaller)):
        return _shortened(repr(value))
    if type(value) in _CONSTANTS:
        return _shortened(repr(value))
    if isinstance(value, (types.FunctionType, functools.partial)):
        return _function(value) or None
    return value.__qualname__ if isinstance(value, type) else None


def _constant_text(value: Any, depth: int = _DEPTH) -> str | None:
    """Return a constant as text, if it is not too deep."""
    if _is_number(value):
        return repr(_fixed(value))
    return _words(value, depth - 1) if depth else None


def _table(value: Mapping[Any, Any], depth: int) -> str | None:
    """Return a large dictionary that contains only constants."""
    entries = [(_key(key), _constant_text(one, depth)) for key, one in _items(value)]
    return digest_of(sorted(map(str, entries))) if all(None not in one for one in entries) else None


_CONSTANTS = (
    complex, range, slice, types.EllipsisType, re.Pattern, datetime.timedelta, decimal.Decimal,
    fractions.Fraction, torch.layout, torch.memory_format,
)  # fmt: skip
_WORD = re.compile(r"[\w\s.,:;()\[\]{}<>=*+>!?%&|^#'\"-]+", re.ASCII)
_OF_MACHINES = re.compile(
    r"(cpu|cuda|mps|xpu|hpu|npu|meta|auto)(:\d+)?$|.*0x[0-9a-f]{6}|v?\d+\.\d+(\.|\+|[a-z])|\d{4}-\d\d-\d\d", re.DOTALL
)


def _is_word(value: Any) -> bool:
    """Return whether this is text that is the same on any machine: no path, device, address, version, date."""
    return type(value) is str and bool(_WORD.fullmatch(value)) and not _OF_MACHINES.match(value)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}... {digest_of(text)}"


def _fixed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_fixed, value))
    return value.item() if isinstance(value, np.generic) else value


def _hooks(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, hook) for name, hook in named_hooks(module) if not name.startswith(_OF_LIBRARIES)]


def _attributes(module: nn.Module, own: Mapping[str, Any], is_written: Callable[[str], bool]) -> Iterator[Fact]:
    if hooks := _hooks(module):
        yield "forward hooks", ", ".join(name for name, _ in hooks)
    torchs = is_torchs(type(module))
    for name, value in own.items():
        if name.startswith("__") or _is_own_forward(module, name, value):
            continue
        if _may_grow(value) and not _is_number(value) and is_written(name):
            continue
        if name in _LEFT_BY_LOADING and not value:
            continue
        if type(value) in (bool, int, float) or value is None or (torchs and type(value) is str):
            yield name, value
        elif callable(value) and not isinstance(value, (nn.Module, type)) and (text := _function(value)):
            if "new_forward" not in text:  # set by accelerate, to move values between devices
                yield name, FunctionName(text)
        elif (constant := _constant(value)) is not None:
            yield name, constant


def _function(value: Any) -> str:
    """Return a function as text: torch's by its name, others also by their source and the numbers that they hold."""
    if isinstance(value, functools.partial):
        held = [*map(_held, value.args), *(f"{name}={_held(one)}" for name, one in sorted(value.keywords.items()))]
        return f"{_function(value.func)}({', '.join(held)})"
    if not isinstance(value, types.FunctionType) or value.__module__.partition(".")[0] == "torch":
        owner = value.__self__ if isinstance(value, types.BuiltinFunctionType) else None
        content = [*owner, *owner.values()] if isinstance(owner, dict) else owner
        held_by = isinstance(content, (list, tuple)) and all(_is_number(one) or _is_word(one) for one in content)
        return str(getattr(value, "__name__", "")) + (f" of {_shortened(repr(_fixed(content)))}" if held_by else "")
    around = (*(value.__defaults__ or ()), *cells(value))
    held = [repr(_fixed(one)) for one in around if one is not None and _is_number(one)]
    return f"{value.__name__} {digest_of([_source_of(value), held])}"


def _held(value: Any) -> str:
    """Return an argument as text that is the same in every process: no address."""
    if _is_number(value) or type(value) is str:
        return repr(_fixed(value))
    return (_function(value) if callable(value) else "") or type(value).__qualname__


def _is_own_forward(module: nn.Module, name: str, value: Any) -> bool:
    """Return whether an attribute of the module is what its class defines: the shim of a wrapped module, or a
    copy's.
    """
    if isinstance(value, Shim):
        value = value.forward
    return isinstance(value, types.MethodType) and value.__func__ is getattr(type(module), name, None)


_OF_LIBRARIES = ("torch.", "transformers.", "accelerate.")
"""Hooks that come from how a model is loaded: on one device, or divided among several."""


class FunctionName(str):
    """The name of a function."""

    __slots__ = ()


class Word(str):
    """A text that is no setting of one of torch's own modules."""

    __slots__ = ()


def is_torchs(kind: type) -> bool:
    """Return whether a part of what its instances hold comes from torch."""
    return any(one is not nn.Module and one.__module__.startswith("torch.nn.") for one in kind.__mro__)


OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch keeps on each module."""


_LEFT_BY_LOADING = frozenset({"_use_kernels", "_weight_conversions"})
_LEFT_IN_CONFIGURATIONS = frozenset({"architectures", "dtype", "torch_dtype"})
"""Attributes that ``from_pretrained`` of transformers sets and its ``from_config`` does not; false and empty ones mean
nothing.
"""


def configuration_digest(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the digest of `attributes`."""
    return digest_of([[path, [[name, repr(value)] for name, value in each.items()]] for path, each in found.items()])


def _is_number(value: Any, depth: int = _DEPTH) -> bool:
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_number(item, depth - 1) for item in value)
    return value is None or type(value) in (bool, int, float) or isinstance(value, (np.number, np.bool_))


def code_digest(model: nn.Module) -> str:
    """Return the digest of the source of the model's own classes: the functions they define or inherit, and numbers of
    the class.

    torch's classes are omitted; its releases may differ as long as the plan does not.
    """
    kinds: set[Any] = {type(module) for module in model.modules()}
    # without the module's name: a script on one side may be installed on the other
    return digest_of(sorted([kind.__qualname__, _source(kind)] for kind in kinds))


def source_digest(kind: type) -> str:
    """Return the digest of the source of one class; the same for all of torch's."""
    return digest_of(_source(kind))


def function_digest(function: types.FunctionType) -> str:
    """Return the digest of the source of a function."""
    return digest_of(_source_of(function))


def _source(kind: Any) -> list[str]:
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    return _source_of_class(kind, tuple(_Identity(value) for base in bases for value in list(vars(base).values())))


class _Identity:
    """Equal only to itself, because what a class holds may be replaced."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


def is_function(value: Any) -> TypeGuard[types.FunctionType]:
    """Return whether an attribute of a class is a function of the class's own code. The one that evaluates annotations,
    which Python makes since 3.14, and which holds all of its class, is not.
    """
    return isinstance(value, types.FunctionType) and value.__code__.co_name != "__annotate__"


@functools.lru_cache(maxsize=4096)
def _source_of_class(kind: Any, holds: tuple[_Identity, ...]) -> list[str]:
    if kind.__module__.partition(".")[0] == "torch":
        return []
    functions = [value for value in vars(kind).values() if is_function(value)]
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
    # Assigned by class methods as caches: one process has them sooner than another.
    passing = {name for one in functions if _takes_class(kind, one) for name in assigned_by(one)}
    numbers = (f"{name} = {_fixed(value)!r}" for name, value in held if name not in passing)
    return [*map(_source_of, functions), *numbers]


def _takes_class(kind: type, function: types.FunctionType) -> bool:
    return any(
        isinstance(found := vars(base).get(function.__name__), classmethod) and found.__func__ is function
        for base in kind.__mro__
    )


def assigned_by(function: types.FunctionType) -> Iterator[str]:
    """Return the names of the attributes that a function assigns to, on any object."""
    return (one.argval for one in dis.get_instructions(function) if one.opname == "STORE_ATTR")


def _unbound(value: Any) -> types.FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)  # a static method, or one of the class
    return value if is_function(value) else None


def _source_of(function: types.FunctionType) -> str:
    """Return the source of a function and of what it wraps, without torch's, which differs between releases: a model
    may wrap a method of ``nn.Module``, and torch's decorators wrap a model's.
    """
    texts: list[str] = []
    wrapped: Any = function
    while isinstance(wrapped, types.FunctionType):
        if not wrapped.__code__.co_filename.startswith(_OF_TORCH):
            texts.append(_text_of(wrapped))
        wrapped = getattr(wrapped, "__wrapped__", None)
    return "\n".join(texts)


def _text_of(function: types.FunctionType) -> str:
    """As `inspect.getsource`, which first looks up the files of all loaded modules. The function's name if there is no
    source (typed at a prompt, or compiled); then the plan must suffice.
    """
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
    try:
        return "".join(inspect.getblock(lines)) or function.__qualname__
    except (SyntaxError, tokenize.TokenError):
        return function.__qualname__


_OF_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def weights_hash(model: nn.Module) -> str:
    """Return the digest of the state dictionary: names, shapes, dtypes and bytes, on any device."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(state_of(model), key=lambda one: one[0]):
        digest.update(json.dumps([name, *form_of(value)]).encode())
        if isinstance(value, torch.Tensor):
            digest.update(_bytes(value))
    return digest.hexdigest()


def tensor_hash(value: Any) -> str:
    """Return the digest of the bytes of one tensor; empty for another value."""
    return hashlib.blake2b(_bytes(value), digest_size=8).hexdigest() if isinstance(value, torch.Tensor) else ""


def _bytes(tensor: torch.Tensor) -> bytes | memoryview:
    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        return b"".join((_bytes(tensor.int_repr()), _bytes(tensor.dequantize())))  # the second contains the scales
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
