"""Tables: what a model computes with and no state dictionary names: tensors and arrays of frequencies, masks, windows.

They are made by code from numbers, such as buffers that are not persistent, so nothing else tells that two sides have
other ones. Where they were made by another release of torch, or on another processor, they differ in their last bits:
so a fact has besides a hash some values, and `compared` says whether two sides' are equal but for rounding.
"""

from __future__ import annotations

import base64
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shared_hooks.modules.attach import COMPILED, Shim, hooks_of
from shared_hooks.tensors import dtype_name

# Digests that tell whether two sides have the same model: its structure, configuration, code and weights.
#
# Each is hexadecimal and the same in every process, on every device. Weights and structure come from the state
# dictionary; configuration and code catch what it does not show: a slope, an epsilon, a constant in ``forward``.


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


def attributes(
    model: nn.Module,
    is_read: Callable[[str], bool] = lambda _: True,
    is_written: Callable[[str], bool] = lambda _: False,
) -> dict[str, dict[str, Any]]:
    """By path, what each module holds that is a number, or a tuple of numbers; and by the way to it ("config.eps"),
    what plain objects and dictionaries do that it holds, each of these once. Ask before the first forward.

    So are texts and functions (a mode, an activation), but for texts of others than torch's own modules that may be
    paths or devices, which differ between machines. What torch keeps on every module, which differs between releases,
    is left out; and so is what is no number on a module itself, where no code looks at an attribute of that name
    (``is_read``): it may be a process's own. A set that code may write to (``is_written``) is none.
    """
    found = {
        path: [
            (name, value)
            for name, value in _attributes(module, is_written)
            if name == "forward" or not isinstance(value, (Word, Named)) or is_torchs(type(module)) or is_read(name)
        ]
        for path, module in model.named_modules()
    }
    for path, way, held, is_table in _objects(model):
        parts = [part.partition("[")[0] for part in way.split(".")[:-1]]
        if all(map(is_read, parts)):
            # of a dictionary any entry may be taken, and where code writes to it only what it names is a setting
            named = is_read if not is_table or is_written(parts[-1]) else _always
            numbered = not is_written(parts[-1])
            entries = _numbers(held, named, is_written)
            found[path] += [(f"{way}{name}", _plain(one)) for name, one in entries if numbered or name.isidentifier()]
    return {path: dict(sorted(each, key=operator.itemgetter(0))) for path, each in found.items()}


def words_of(value: Any, is_read: Callable[[str], bool]) -> str:
    """A constant that code holds, as facts are said: a number, a text, a list or dictionary of them, or an object with
    such attributes; "" for anything else. Truth values are none: they say what a machine has.
    """
    if type(value) is bool or value is None:
        return ""
    if _is_number(value) or _is_word(value):
        return _shortened(repr(_fixed(value)))
    if (text := _constant(value)) is not None:
        return "" if isinstance(value, type) else _shortened(text)
    entries = [
        (f"{way}{name}", _plain(one))
        for _, way, held, is_table in _objects_in({"": value})
        for name, one in _numbers(held, _always if is_table else is_read, lambda _: False)
    ]
    return _shortened(repr(sorted(entries, key=operator.itemgetter(0)))) if entries else ""


def _always(_: str) -> bool:
    return True


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}... {digest_of(text)}"


MOST_KEYS: Final = 64
"""A dictionary that has more is a table, and is not looked into."""
MOST_OBJECTS: Final = 4096
_ADDRESS: Final = 1 << 32
"""A whole number above it as a key is some object's `id`, another in each process."""
_DEPTH: Final = 4


_Object = tuple[str, str, dict[Any, Any], bool]


def _objects(model: nn.Module) -> Iterator[_Object]:
    """Plain objects and dictionaries that modules hold, and those in them, each once: the module's path, the way, what
    is in it, and whether it is a dictionary.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
        yield from _objects_in(own, path, seen)
        for name, parameter in module.named_parameters(recurse=False):
            yield path, f"{name}.", vars(parameter), False


def _objects_in(held: dict[str, Any], path: str = "", seen: set[int] | None = None) -> Iterator[_Object]:
    known = set[int]() if seen is None else seen

    def within(way: str, held: dict[Any, Any], depth: int) -> Iterator[_Object]:
        for name, value in [one for pair in list(held.items()) for one in _each(*pair)]:
            if _is_plain_object(value) and id(value) not in known and len(known) < MOST_OBJECTS:
                known.add(id(value))
                is_table = isinstance(value, _DICTIONARIES)
                inner = dict(value) if is_table else _fields(value)
                yield path, f"{way}{name}.", inner, is_table
                if depth:
                    yield from within(f"{way}{name}.", inner, depth - 1)

    return within("", held, _DEPTH)


_DICTIONARIES = (dict, types.MappingProxyType)


def _each(name: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """An entry; each of those in a list or tuple of objects."""
    if type(name) is not str:
        return
    if type(value) in (list, tuple) and len(value) <= MOST_KEYS:  # others may have no length
        yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))
    yield name, value


def _fields(value: Any) -> dict[str, Any]:
    """Attributes of an object, those in slots too."""
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and not name.startswith("__"):
                with contextlib.suppress(AttributeError):  # nothing yet
                    found[name] = slot.__get__(value)
    return found


def _numbers(
    held: dict[Any, Any], is_read: Callable[[str], bool], is_written: Callable[[str], bool]
) -> Iterator[tuple[str, Any]]:
    """Numbers and constants that an object or dictionary holds; an entry that is no attribute is read."""
    for name, one in list(held.items()):
        value = one if _is_number(one) or _is_word(one) else _constant(one)
        if (value is None and one is not None) or (isinstance(one, set) and is_written(str(name))):
            continue
        if type(name) is str:
            if not name.startswith("__") and is_read(name):
                yield name, value
        elif _is_number(name) and not (type(name) is int and name > _ADDRESS):
            yield repr(name), value


def _constant(value: Any) -> str | None:
    """What is neither number nor text and never changes, in words that are the same in every process; None if it is
    something else.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, (set, frozenset)) and len(value) <= MOST_KEYS:
        return repr(sorted(map(repr, value))) if all(_is_number(one) or _is_word(one) for one in value) else None
    if isinstance(value, (operator.itemgetter, operator.attrgetter)) or type(value) in _CONSTANTS:
        return _shortened(repr(value))
    return value.__qualname__ if isinstance(value, type) else None


MOST_TEXT: Final = 256
_CONSTANTS = (
    bytes, complex, range, slice, re.Pattern, datetime.timedelta, decimal.Decimal, fractions.Fraction,
)  # fmt: skip
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,40}")
_DEVICES = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|meta|auto)(:\d+)?")


def _is_word(value: Any) -> bool:
    """Whether this is a text that is the same on any machine."""
    return type(value) is str and bool(_WORD.fullmatch(value)) and not _DEVICES.fullmatch(value)


def _plain(value: Any) -> Any:
    return Word(value) if type(value) is str else _fixed(value)


def _fixed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_fixed, value))
    return value.item() if isinstance(value, np.generic) else value


def _is_plain_object(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, _DICTIONARIES):
        return len(value) <= MOST_KEYS
    if issubclass(kind, enum.Enum):
        return False
    if issubclass(kind, (nn.Module, type, torch.Tensor, types.ModuleType)) or callable(value):
        return False
    package = kind.__module__.partition(".")[0]
    known = package in ("torch", "numpy") or package in sys.stdlib_module_names - {"__main__", "types", "argparse"}
    return not known and (type(getattr(value, "__dict__", None)) is dict or bool(getattr(kind, "__slots__", ())))


def _attributes(module: nn.Module, is_written: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    if own := [name for name in hooks_of(module) if not name.startswith(_OF_LIBRARIES)]:
        yield "forward hooks", ", ".join(own)
    torchs = is_torchs(type(module))
    for name, value in vars(module).items():
        if name in OF_EVERY_MODULE or name.startswith("__") or _is_own_forward(module, name, value):
            continue
        if isinstance(value, set) and is_written(name):
            continue
        if name in _LEFT_BY_LOADING and not value:
            continue
        if _is_number(value) or (torchs and type(value) is str):
            yield name, _fixed(value)
        elif _is_word(value):
            yield name, Word(value)
        elif (text := repr(value) if isinstance(value, torch.dtype) else _constant(value)) is not None:
            yield name, Word(text)
        elif callable(value) and not isinstance(value, (nn.Module, type)):
            text = _function(value)
            if text and "new_forward" not in text:  # what accelerate puts there, to move values between devices
                yield name, Named(text)


def _function(value: Any) -> str:
    """A function in words: torch's by the name alone, others also by what they do and the numbers that they hold."""
    if isinstance(value, functools.partial):
        held = [*map(_held, value.args), *(f"{name}={_held(one)}" for name, one in sorted(value.keywords.items()))]
        return f"{_function(value.func)}({', '.join(held)})"
    if not isinstance(value, types.FunctionType) or value.__module__.partition(".")[0] == "torch":
        owner = value.__self__ if isinstance(value, types.BuiltinFunctionType) else None
        content = [*owner, *owner.values()] if isinstance(owner, dict) else owner
        held_by = isinstance(content, (list, tuple)) and all(_is_number(one) or _is_word(one) for one in content)
        return str(getattr(value, "__name__", "")) + (f" of {_shortened(repr(_fixed(content)))}" if held_by else "")
    held = [
        repr(_fixed(one))
        for one in (*(value.__defaults__ or ()), *_cells(value))
        if one is not None and _is_number(one)
    ]
    return f"{value.__name__} {digest_of([_source_of(value), held])}"


def _cells(function: types.FunctionType) -> Iterator[Any]:
    """What a closure holds on to; a name that has no value yet holds nothing."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _held(value: Any) -> str:
    """An argument in words that are the same in every process: no address."""
    if _is_number(value) or type(value) is str:
        return repr(_fixed(value))
    return (_function(value) if callable(value) else "") or type(value).__qualname__


def _is_own_forward(module: nn.Module, name: str, value: Any) -> bool:
    """Whether what stands on the module is what its class has under that name: the shim of one that is wrapped, or
    what a copy has of it.
    """
    if isinstance(value, Shim):
        value = value.forward
    return isinstance(value, types.MethodType) and value.__func__ is getattr(type(module), name, None)


_OF_LIBRARIES = ("torch.", "transformers.", "accelerate.", "functools.")
"""Hooks that come with how a model is loaded: on one device, or divided among several."""


class Named(str):
    """The name of a function."""

    __slots__ = ()


class Word(str):
    """A text that is no setting of one of torch's own modules."""

    __slots__ = ()


def is_torchs(kind: type) -> bool:
    """Whether what its instances hold comes from torch, at least in part."""
    return any(one is not nn.Module and one.__module__.startswith("torch.nn.") for one in kind.__mro__)


OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch keeps on each."""


_LEFT_BY_LOADING = frozenset({"_use_kernels", "_weight_conversions"})
"""Attributes that ``from_pretrained`` of transformers sets and its ``from_config`` does not; false and empty ones mean
nothing.
"""


def configuration_digest(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A digest of `attributes`."""
    return digest_of([[path, [[name, repr(value)] for name, value in each.items()]] for path, each in found.items()])


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_number(item) for item in value)
    return value is None or type(value) in (bool, int, float) or isinstance(value, (np.number, np.bool_))


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


def _source(kind: Any) -> list[str]:
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    return _source_of_class(kind, tuple(_Identity(value) for base in bases for value in list(vars(base).values())))


class _Identity:
    """Equal to itself alone: what a class holds may be replaced."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


@functools.lru_cache(maxsize=4096)
def _source_of_class(kind: Any, holds: tuple[_Identity, ...]) -> list[str]:
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
    numbers = (f"{name} = {_fixed(value)!r}" for name, value in held if name not in passing)
    return [*map(_source_of, functions), *numbers]


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
            texts.append(_text_of(wrapped))
        wrapped = getattr(wrapped, "__wrapped__", None)
    return "\n".join(texts)


def _text_of(function: types.FunctionType) -> str:
    """As `inspect.getsource`, which first looks up the files of all loaded modules. Its name where there is no source:
    typed at a prompt, or compiled. Then the plan has to do.
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


# The static module tree: which modules are walked, and by which names.


ROOT = "(model)"


@dataclass(frozen=True)
class ModuleInfo:
    """One module of the tree. ``path`` is its first name; ``(model)`` for the model itself."""

    path: str
    module_type: str
    opaque: bool


def is_opaque(module: nn.Module) -> bool:
    """Scripted and compiled modules run outside Python's sight: one layer, nothing inside."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or type(module).__name__ == "OptimizedModule"
        or module.__dict__.get(COMPILED) is not None  # compiled in place
    )


def walk(model: nn.Module, depth: int | None) -> dict[nn.Module, ModuleInfo]:
    """Every module down to ``depth`` (0 = the model alone, None = all), under its first name, in definition order."""
    found: dict[nn.Module, ModuleInfo] = {}
    deepest = 0
    waiting = [(model, "", 0)]
    while waiting:
        module, path, level = waiting.pop()
        if module in found:
            continue
        deepest = max(deepest, level)
        opaque = is_opaque(module)
        found[module] = ModuleInfo(path or ROOT, type(module).__name__, opaque)
        if not opaque and (depth is None or level < depth):
            children = [
                (child, f"{path}.{name}" if path else name, level + 1) for name, child in module.named_children()
            ]
            waiting += reversed(children)
    # a module's call takes three frames of its own, and ours as many again
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + 16 * deepest if deepest > 50 else 0))
    return found


# The parts of a multimodal model by what they are for: vision, audio, fusion, language, head.
#
# Found by the words in a module's name and in the name of its type; a module belongs to the group of the outermost
# ancestor that has one, so that a projection inside a vision encoder is vision. `GROUPS` may be extended with
# `add_group`.

GROUP: Final = "group:"
"""What names a group in place of modules: "group:vision"."""
GROUPS: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {}
"""Group -> (pattern for the last part of a name, pattern for a type's name), both searched in lower case."""


def add_group(group: str, names: str, types: str = "(?!)") -> None:
    """Add a group, or replace one: regular expressions for names and for the names of types."""
    GROUPS[group] = (re.compile(names), re.compile(types))


add_group("vision", r"^(vision|visual|image|pixel|vit$)", r"^(?!.*text).*(vision|visual|image.?encoder)(?!.*2seq)")
add_group("audio", r"^(audio|speech|acoustic|wave)", r"^(?!.*text).*(audio|speech)")
add_group(
    "fusion",
    r"(fusion|cross_?modal|multi_?modal|connector|projector|q_?former|perceiver|resampler)",
    r"(fusion|crossmodal|multimodal|connector|projector|qformer|perceiver|resampler)",
)
add_group("language", r"^(text|language|llm|bert|roberta)", r"(text|language)(model|encoder|decoder|transformer)")
add_group(
    "head", r"(^|_)(head|classifier|score|fc|logits?)($|_)|^classifier|(visual|text|vision|audio)_projection$", r"head$"
)


def grouped(modules: Iterable[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """The modules of each group that has some: ``{group: {path: path of the outermost module around it}}``.
    ``modules``: pairs (path, name of the type), parents before children.
    """
    found: dict[str, dict[str, str]] = {}
    owner: dict[str, tuple[str, str] | None] = {ROOT: None, "": None}
    for path, kind in modules:
        parts = path.split(".")
        for count in range(1, len(parts) + 1):  # what only holds modules may not be among them
            one = ".".join(parts[:count])
            if one not in owner:
                parent = owner[".".join(parts[: count - 1])]
                group = None if parent else _group(parts[count - 1].lower(), kind.lower() if one == path else "")
                owner[one] = parent or (None if group is None else (group, one))
        if (mine := owner[path]) is not None:
            found.setdefault(mine[0], {})[path] = mine[1]
    return found


def groups_of(model: nn.Module) -> dict[str, dict[str, str]]:
    """As `grouped`, of all modules of a model, in definition order."""
    return grouped((info.path, info.module_type) for info in walk(model, None).values())


def _group(name: str, kind: str) -> str | None:
    # projections are named after what they project: the more special rules first
    for group in ("head", "fusion", *GROUPS):
        names, _ = GROUPS.get(group, (None, None))
        if names is not None and names.search(name):
            return group
    return next((group for group, (_, types) in GROUPS.items() if types.search(kind)), None)


def aliases(model: nn.Module) -> dict[str, str]:
    """Second and further names of a module -> its first name."""
    first: dict[nn.Module, str] = {}
    found: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kept = first.setdefault(module, name or ROOT)
        if kept != (name or ROOT):
            found[name] = kept
    return found


def holder_modules(model: nn.Module) -> set[str]:
    """Python modules whose dataclasses and named tuples this model may take or return: those its own classes live
    in.
    """
    found = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    if any(name.startswith("transformers.") for name in found):
        found.add("transformers.modeling_outputs")
    return found | {"torch.nn.utils.rnn"}


def call_name(path: str, number: int) -> str:
    """What a module's call is called: the module's path, with ``#n`` from the second call on."""
    return path if number == 1 else f"{path}#{number}"


WHOLE: Final = 256
"""Values of a table that are given one by one; of a larger one half as many, and the means of as many parts."""
LONGEST: Final = 4096
"""An angle is known as well as its position is large: a table of sines is trusted by its length, to this length."""
ULPS: Final = 16
"""By which two machines' functions may differ, of each value; `FEW` of the largest one, where values cancel out."""
FEW: Final = 4
FLIPPED: Final = 0.01
"""Share of a table's values that may be rounded to another neighbour where they are kept in half the bits."""

Tables = Mapping[tuple[str, str], str]
"""By the module's path and a name."""


def tables(model: nn.Module, held: Iterable[tuple[str, Any]] = ()) -> dict[tuple[str, str], str]:
    """The tables of a model: each one's form, a hash, and some values of fractions. Ask before the first forward.
    ``held``: what its code holds, by name: globals, variables around functions.
    """
    modules = list(model.named_modules())
    stated = {id(parameter) for parameter in model.parameters()}
    for _, module in modules:
        own = module._non_persistent_buffers_set
        stated |= {id(buffer) for name, buffer in module.named_buffers(recurse=False) if name not in own}
    found = {}
    for path, module in modules:
        kept: dict[str, Any] = dict(module.named_buffers(recurse=False))
        kept |= {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
        package = type(module).__module__.partition(".")[0]
        for name, value in kept.items():
            for number, table in enumerate(_in(value, package)):
                if id(table) not in stated:
                    found[path, f"{name}.{number}" if number else name] = _fact(table)
    around: dict[str, set[str]] = {}  # two functions of one name may hold another value each
    for name, value in held:
        if isinstance(value, (torch.Tensor, np.ndarray, list, tuple, dict)):  # others may read files for what they hold
            around.setdefault(name, set()).update(_fact(table) for table in _in(value, "") if id(table) not in stated)
    for name, facts in around.items():
        for number, fact in enumerate(sorted(facts)):
            found["", f"{name}.{number}" if number else name] = fact
    return found


def _in(value: Any, package: str) -> Iterator[torch.Tensor]:
    """Through containers, and objects of the module's own package, however deep they lie in each other."""
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, (bool, int, float, str, bytes, type, nn.Module, Shim)) or value is None:
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        inner: Iterable[Any] = ()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, np.ndarray):
            if value.dtype.kind in "biufc" and value.dtype.isnative:
                yield torch.from_numpy(np.array(value))
        elif isinstance(value, (list, tuple)):  # whose class may have a length of its own, or none
            inner = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        elif isinstance(value, Mapping):
            inner = value.values()
        elif type(value).__module__.partition(".")[0] == package and hasattr(value, "__dict__"):
            inner = vars(value).values()
        left += reversed([*inner])


def digest(found: Tables) -> str:
    """A digest of forms and hashes."""
    return digest_of([[*place, fact.rpartition(" ")[0]] for place, fact in sorted(found.items())])


def _fact(value: torch.Tensor) -> str:
    """``float32[64] HASH VALUES``; the last is "-" for what must be equal in every bit."""
    name, shape = form_of(value)
    form = f"{name}{shape}".replace(" ", "")
    if value.is_meta:
        return f"{form} meta -"
    try:
        exact = tensor_hash(value)
    except (RuntimeError, TypeError, NotImplementedError):  # of a kind that does not show its bytes
        return f"{form} unreadable -"
    is_plain = value.layout == torch.strided and not value.is_quantized and value.numel()
    if not is_plain or not (value.is_floating_point() or value.is_complex()):
        return f"{form} {exact} -"
    with torch.no_grad():
        value = value.detach().cpu().resolve_conj().resolve_neg()
        return f"{form} {exact} {_told((torch.view_as_real(value) if value.is_complex() else value).reshape(-1))}"


def _told(flat: torch.Tensor) -> str:
    """Which values are not finite (a hash), in how many bits they fit, how many of the sample are no means, and the
    sample, after the largest magnitude of all.
    """
    odd, largest, narrow = hashlib.blake2b(digest_size=8), 0.0, True
    means: list[float] = []
    spots: list[float] = []
    count = flat.numel()
    parts = 1 if count <= WHOLE else WHOLE // 2
    for part in range(parts):
        begin, end = part * count // parts, (part + 1) * count // parts
        values: NDArray[np.float64] = flat[begin:end].double().numpy()
        finite = np.isfinite(values)
        odd.update(
            np.where(finite, 0, np.where(np.isnan(values), 1, np.where(values > 0, 2, 3))).astype(np.int8).tobytes()
        )
        values = np.where(finite, values, 0.0)
        with np.errstate(over="ignore", under="ignore"):
            narrow = narrow and bool((values.astype(np.float32).astype(np.float64) == values).all())
        largest = max(largest, float(np.abs(values).max()))
        means.append(float((values / len(values)).sum()))
        spots += values.tolist() if parts == 1 else [float(values[part * 2654435761 % len(values)])]
    sample = np.array([largest, *spots, *(means if parts > 1 else ())])
    data = sample.astype("<f4" if narrow else "<f8").tobytes()
    return f"{odd.hexdigest()}:{'single' if narrow else 'double'}:{len(spots)}:{base64.b64encode(data).decode()}"


@dataclass(frozen=True)
class Compared:
    """Two sides' facts of one table. ``client``, ``server``: the values that are furthest apart, in words."""

    alike: bool
    """But for rounding."""
    client: str
    server: str


def compared(client: str, server: str) -> Compared:
    """Compare facts that are not equal. What comes from a stranger may be anything."""
    (form, _, reported), (own_form, _, own) = _three(client), _three(server)
    if form != own_form:
        return Compared(False, form[:60], own_form)
    if reported == "-" or own == "-" or len(reported) > 2 * len(own) + 100:
        return Compared(False, "other values", "its own")
    try:
        theirs, mine = _read(reported), _read(own)
    except ValueError:
        return Compared(False, "values that cannot be read", "its own")
    if theirs.form != mine.form or not np.isfinite(theirs.sample).all():
        return Compared(False, "other values", "its own")
    with np.errstate(over="ignore"):
        apart = np.abs(theirs.sample - mine.sample) / _allowed(own_form, mine, theirs.narrow)
    worst = int(apart.argmax())
    alike = bool(apart[worst] <= 1)
    if alike and _half(own_form) is not None:
        flipped = int((theirs.sample != mine.sample)[1 : 1 + mine.spots].sum())
        alike = flipped <= max(_share(mine) * mine.spots, 1)
    return Compared(alike, f"{theirs.sample[worst]:.9g}", f"{mine.sample[worst]:.9g}")


@dataclass(frozen=True)
class _Sample:
    odd: str
    narrow: bool
    spots: int
    sample: NDArray[np.float64]

    @property
    def form(self) -> tuple[str, int, int]:
        return self.odd, self.spots, len(self.sample)

    @property
    def has_both_signs(self) -> bool:
        return bool((self.sample[1:] < 0).any() and (self.sample[1:] > 0).any())


def _allowed(form: str, mine: _Sample, narrow: bool) -> NDArray[np.float64]:
    """How far the client's may be from each of these values: by rounding, and not by another number in a formula."""
    eps, largest = 2.0**-23 if narrow and mine.narrow else 2.0**-52, mine.sample[0]
    shape = [int(size) for size in form.partition("[")[2].rstrip("]").split(",") if size]
    angles = min(max(shape, default=0), LONGEST) if mine.has_both_signs else 0
    allowed: NDArray[np.float64] = eps * (ULPS * np.abs(mine.sample) + (FEW + angles) * largest) + 1e-300
    if (half := _half(form)) is not None:
        end = 1 + mine.spots
        # the neighbour, which is up to `eps` away
        allowed[:end] += half.eps * np.abs(mine.sample[:end]) + half.smallest_normal * half.eps
        allowed[end:] += _share(mine) * half.eps * largest
    return allowed


def _share(mine: _Sample) -> float:
    """The share of values that may be rounded to another neighbour."""
    return 25 * FLIPPED if mine.has_both_signs else FLIPPED


def _half(form: str) -> torch.finfo | None:
    """The type of a table whose values have fewer bits than they were computed with; None for another."""
    dtype = getattr(torch, form.partition("[")[0], None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4:
        return torch.finfo(dtype)
    return None


def _three(fact: str) -> tuple[str, str, str]:
    form, _, rest = fact.partition(" ")
    exact, _, reported = rest.partition(" ")
    return form, exact, reported


def _read(reported: str) -> _Sample:
    """Raises ValueError."""
    odd, width, spots, text = reported.split(":")
    sample = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4" if width == "single" else "<f8")
    if not len(sample):
        raise ValueError("no values")
    return _Sample(odd, width == "single", int(spots), sample.astype(np.float64))
