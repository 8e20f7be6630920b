"""Nested values: tensors inside tuples, lists, dictionaries, named tuples, dataclasses and ``ModelOutput``s.

A *structure* is the JSON-able shape of such a value, with a number in place of every tensor:

    ["t", 3]                                 tensor number 3
    ["v", null | true | 7 | 0.5 | "text"]    a literal
    ["x", kind, text]                        a literal JSON cannot say: dtype, device, size, complex, slice, ellipsis
    ["list", [...]]  ["tuple", [...]]        sequences
    ["dict", [[key, structure], ...]]        keys are literals
    ["named", class, [...]]                  named tuple, fields in order
    ["data", class, [[field, ...], ...]]     dataclass, its attributes
    ["enum", class, name]                    member of an enumeration; of several flags together their number
    ["map", class, [[key, ...], ...]]        ModelOutput and other dictionaries that are built from keywords

Classes travel as ``module:qualname`` and are looked up by the receiver among classes it already has; nothing is
imported.
An object of any other type is an error (`UnknownHolder`), never a leaf: a tensor hidden in it would be lost in silence.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shared_hooks.errors import BadFrame, InputMismatch

Structure = list[Any]
MAX_DEPTH = 64
MAX_FLAGS = 16

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
DTYPE_NAMES = {value: str(value).removeprefix("torch.") for value in DTYPES.values()}


class UnknownHolder(InputMismatch):
    """A value of a type that Isthmus cannot flatten and rebuild."""


def class_name(cls: type) -> str:
    """Return a class's name on the wire."""
    return f"{cls.__module__}:{cls.__qualname__}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return DTYPE_NAMES[dtype]


def dtype_named(name: Any) -> torch.dtype:
    """Return ``torch.float32`` for ``"float32"``. Raises `BadFrame` for anything else."""
    if not isinstance(name, str) or name not in DTYPES:
        raise BadFrame(f"unknown dtype {name!r:.40}")
    return DTYPES[name]


# dtypes for which any bytes are a valid tensor, which excludes quantised types
PLAIN = frozenset(
    value
    for name, value in DTYPES.items()
    if name.startswith(("float", "bfloat", "complex", "int", "uint", "bool"))
    and name not in {f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)}
    and not name.endswith("x2")
)


def is_namedtuple(value: Any) -> bool:
    """Return whether it is a named tuple or one of torch's own structure sequences (``torch.return_types``)."""
    return isinstance(value, tuple) and (hasattr(value, "_fields") or type(value).__module__ == "torch.return_types")


def _is_keyword_map(value: Any) -> bool:
    """Return whether it is a dictionary whose entries are also attributes, built from keywords: ModelOutput."""
    return isinstance(value, dict) and dataclasses.is_dataclass(value)


_LITERALS = frozenset({bool, str, int, float})


def _literal(value: Any) -> Structure | None:
    if value is None or type(value) in _LITERALS:
        return ["v", value]
    if isinstance(value, torch.dtype):
        return ["x", "dtype", dtype_name(value)]
    if isinstance(value, torch.device):
        return ["x", "device", str(value)]
    if isinstance(value, torch.Size):
        return ["x", "size", list(value)]
    if isinstance(value, complex):
        return ["x", "complex", [value.real, value.imag]]
    if value is Ellipsis:
        return ["x", "ellipsis", None]
    if isinstance(value, slice) and all(part is None or type(part) is int for part in _slice_parts(value)):
        return ["x", "slice", _slice_parts(value)]
    return None


def _slice_parts(value: slice) -> list[Any]:
    return [value.start, value.stop, value.step]


def _literal_from(kind: Any, data: Any) -> Any:
    try:
        if kind == "dtype":
            return dtype_named(data)
        if kind == "device":
            return torch.device(data)
        if kind == "size":
            return torch.Size(data)
        if kind == "complex":
            return complex(*data)
        if kind == "ellipsis":
            return Ellipsis
        if kind == "slice":
            return slice(*data)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadFrame(f"malformed literal of kind {kind!r:.20}") from error
    raise BadFrame(f"unknown literal kind {kind!r:.20}")


def flatten(value: Any, *, plain: bool = False) -> tuple[Structure, list[torch.Tensor]]:
    """Flatten a nested value to its structure and its tensors, depth first.

    With ``plain`` only built-in containers and ``torch.return_types`` are accepted, so that rebuilding needs no class.
    A tensor object in two places keeps one number. Raises `UnknownHolder` naming the offending type.
    """
    # no closures here: one that calls itself is a cycle, and would keep the tensors until the collector runs
    tensors: list[torch.Tensor] = []
    return _down(value, 0, plain, tensors, {}), tensors


# set by torch.nn.Buffer on a tensor
_OWN_ATTRIBUTES = frozenset({"_is_buffer", "persistent"})


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Structure, list[torch.Tensor]]:
    """Flatten a model's inputs. Raises `UnknownHolder` for a tensor that is more than its elements.

    The class and the attributes of a tensor would not reach the other side.
    """
    structure, tensors = flatten((args, kwargs))
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UnknownHolder(
                f"an input is a {class_name(type(tensor))}, a tensor of a class of its own: "
                "pass it as a plain tensor (as_subclass(torch.Tensor))"
            )
        own = vars(tensor).keys() - _OWN_ATTRIBUTES
        if own:
            raise UnknownHolder(f"an input is a tensor with attributes of its own ({', '.join(sorted(own))})")
    return structure, tensors


def _down(value: Any, depth: int, plain: bool, tensors: list[torch.Tensor], numbers: dict[int, int]) -> Structure:
    if isinstance(value, torch.Tensor):
        if id(value) not in numbers:
            numbers[id(value)] = len(tensors)
            tensors.append(value)
        return ["t", numbers[id(value)]]
    kind = type(value)
    if value is None or kind in _LITERALS:
        return ["v", value]
    if kind is not tuple and kind is not dict and kind is not list and (literal := _literal(value)) is not None:
        return literal
    if depth >= MAX_DEPTH:
        raise UnknownHolder(f"a value nested deeper than {MAX_DEPTH} levels")
    rest = (depth + 1, plain, tensors, numbers)
    if kind is tuple or kind is list:
        parts: list[Structure] = []
        for item in value:
            parts.append(_down(item, *rest))
        return ["tuple" if kind is tuple else "list", parts]
    if kind is dict:
        entries: list[list[Structure]] = []
        for key, item in value.items():
            entries.append([_key(key), _down(item, *rest)])
        return ["dict", entries]
    if not plain and isinstance(value, enum.Enum):
        known = value.name in kind.__members__
        return ["enum", class_name(kind), value.name if known else value.value]
    if is_namedtuple(value) and (not plain or kind.__module__ == "torch.return_types"):
        return ["named", class_name(kind), [_down(item, *rest) for item in value]]
    if not plain and _is_keyword_map(value):
        return ["map", class_name(kind), [[key, _down(item, *rest)] for key, item in value.items()]]
    if kind is OrderedDict or (not plain and isinstance(value, dict) and _dict_like(kind)):
        return ["dict", [[_key(key), _down(item, *rest)] for key, item in value.items()]]
    if not plain and dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = list(vars(value)) if hasattr(value, "__dict__") else [field.name for field in dataclasses.fields(value)]
        return ["data", class_name(kind), [[name, _down(getattr(value, name), *rest)] for name in names]]
    raise UnknownHolder(f"a value of type {class_name(kind)} cannot be taken apart: {_instead(kind)}")


def _instead(kind: type) -> str:
    """Return a hint for a class of values that cannot be sent."""
    if kind.__name__.endswith("Cache"):  # DynamicCache and such, of transformers
        return (
            "it is a cache of keys and values, and use_cache = false under [call_kwargs] of the spec (in Python "
            "use_cache=False) leaves it out"
        )
    return "give and return tensors in built-in containers, named tuples or dataclasses"


def leaves_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's result, in the order of `flatten`; also those in unknown holders."""
    if isinstance(value, torch.Tensor):
        return [value]
    try:
        return flatten(value, plain=True)[1]
    except UnknownHolder:
        return list(tensors_in(value))


def _dict_like(kind: type) -> bool:
    # transformers' BatchEncoding is a UserDict; defaultdict and similar classes behave as dictionaries when read
    return vars(kind).get("__init__") is None or kind.__module__ == "collections"


def _key(key: Any) -> Structure:
    literal = _literal(key)
    if literal is None:
        raise UnknownHolder(f"a dictionary key of type {type(key).__name__}: use text or numbers")
    return literal


def form_of(structure: Any) -> Any:
    """Return a structure with every literal replaced by its type's name, equal for values of one kind."""
    if isinstance(structure, list):
        if len(structure) == 2 and structure[0] == "v":
            return ["v", type(structure[1]).__name__]
        return [form_of(part) for part in structure]
    return structure


ClassFinder = Callable[[str], "type | None"]


def no_class(name: str) -> type | None:
    """Find only torch's own structure sequences."""
    module, _, qualname = name.partition(":")
    found = getattr(torch.return_types, qualname, None) if module == "torch.return_types" else None
    return found if isinstance(found, type) else None


def classes_of(modules: set[str]) -> ClassFinder:
    """Return a finder of holder classes among *already imported* modules, and only those in ``modules``. Imports
    nothing.

    A class is found only under its own name, in the module that defines it.
    """

    def find(name: str) -> type | None:
        module, _, qualname = name.partition(":")
        if module not in modules:
            return no_class(name)
        found: Any = sys.modules.get(module)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type) or class_name(found) != name:
            return None
        holder = dataclasses.is_dataclass(found) or hasattr(found, "_fields") or issubclass(found, enum.Enum)
        return found if holder else None

    return find


def unflatten(structure: Any, tensors: list[Any] | Mapping[int, Any], find: ClassFinder = no_class) -> Any:
    """Rebuild the value; classes the finder does not know become plain tuples and dictionaries.

    Raises `BadFrame` if malformed.
    """
    return _up(structure, 0, tensors, find)


def _up(node: Any, depth: int, tensors: list[Any] | Mapping[int, Any], find: ClassFinder) -> Any:
    if not isinstance(node, list) or not node or not isinstance(node[0], str) or depth > MAX_DEPTH + 1:
        raise BadFrame("malformed structure")
    kind = node[0]
    rest = (depth + 1, tensors, find)
    try:
        if kind == "t":
            return tensors[node[1]]
        if kind == "v":
            return node[1]
        if kind == "x":
            return _literal_from(node[1], node[2])
        if kind in ("list", "tuple"):
            items = [_up(item, *rest) for item in node[1]]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {_up(key, *rest): _up(item, *rest) for key, item in node[1]}
        if kind == "named":
            items = [_up(item, *rest) for item in node[2]]
            cls = find(node[1])
            if cls is None:
                return tuple(items)
            _check_holder(kind, cls, issubclass(cls, tuple))
            # named tuples may override __new__; structure sequences take one iterable
            return tuple.__new__(cls, items) if hasattr(cls, "_fields") else cls(items)
        if kind == "enum":
            cls = find(node[1])
            if cls is None:
                return node[2]
            _check_holder(kind, cls, issubclass(cls, enum.Enum))
            return _flags(cls, node[2]) if type(node[2]) is int else cls[node[2]]  # type: ignore[index]
        if kind in ("data", "map"):
            entries = {str(key): _up(item, *rest) for key, item in node[2]}
            cls = find(node[1])
            if cls is None:
                return entries
            _check_holder(kind, cls, dataclasses.is_dataclass(cls) and issubclass(cls, dict) == (kind == "map"))
            return cls(**entries) if kind == "map" else _filled(cls, entries)
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BadFrame(f"malformed structure at {kind!r:.20}: {error}") from error
    raise BadFrame(f"unknown structure {kind!r:.20}")


def _check_holder(kind: str, cls: type, fits: bool) -> None:
    """Raise unless a class is rebuilt as what it was flattened as, so that no constructor runs on anything else."""
    if not fits:
        raise BadFrame(f"{class_name(cls)} is not taken apart as {kind!r}")


def _flags(cls: Any, number: int) -> Any:
    """Return a combination of flags. A class keeps every combination ever requested, so these must be few."""
    known = [int(one.value) for one in cls.__members__.values()] if issubclass(cls, enum.Flag) else []
    if len(known) > MAX_FLAGS or number & ~functools.reduce(operator.or_, known, 0):
        raise BadFrame(f"{number} is no combination of {class_name(cls)}")
    return cls(number)


def _filled(cls: type, entries: dict[str, Any]) -> Any:
    # with its attributes, without running its __init__ and __post_init__ a second time
    made: Any = object.__new__(cls)
    for name, value in entries.items():
        if name.startswith("__"):
            raise BadFrame(f"an attribute called {name!r:.40}")
        object.__setattr__(made, name, value)
    return made


def tensors_in(value: Any, _seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield every tensor reachable from a value, through containers and the attributes of unknown objects; each object
    once.

    For reading only, to know what must be kept alive.
    """
    seen = set() if _seen is None else _seen
    if value is None or isinstance(value, (bool, int, float, str, bytes, type, torch.nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, seen)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, seen)
    elif hasattr(value, "__dict__"):
        for item in list(vars(value).values()):
            yield from tensors_in(item, seen)
