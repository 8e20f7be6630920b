"""Any value in a few characters, whatever is in it: the text is short because nothing long is ever made.

A tensor is its shape and dtype, a module its class, a container its first entries, and an object that is none of ours
its class: another's ``__repr__`` may be of any length, and take any time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from itertools import islice
from pathlib import PurePath
from typing import Any, Final, TypeVar

MOST: Final = 2000
"""Characters of any public object's ``repr``, at most."""
_EACH: Final = 120
_ENTRIES: Final = 4
_DEPTH: Final = 2
_OURS: Final = ("shared_hooks", "edge_client", "cloud_server")
_TORCH: Final = ("dtype", "device", "Size", "layout")

AClass = TypeVar("AClass", bound=type)


def short(cls: AClass) -> AClass:
    """A class decorator, above ``@dataclass``: ``Name(field=..., ...)`` with every field brief."""
    cls.__repr__ = _of_fields  # type: ignore[assignment,method-assign]
    return cls


def summary_of(of: object, *facts: str) -> str:
    """``Name(fact, fact)``: what objects say that are no list of fields. Facts may hold others' names."""
    text = ", ".join(cut(fact, _EACH) for fact in facts if fact)
    return cut(f"{type(of).__name__}({text})", MOST)


def brief(value: Any, most: int = _EACH, depth: int = _DEPTH) -> str:
    """``value`` in at most ``most`` characters; containers to ``depth`` levels."""
    return cut(_text(value, most, depth), most)


def cut(text: str, most: int) -> str:
    """The beginning of a long text, and that there is more."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _of_fields(self: Any) -> str:
    assert is_dataclass(self)
    shown = (f"{one.name}={brief(getattr(self, one.name, None))}" for one in fields(self) if one.repr)
    return cut(f"{type(self).__name__}({', '.join(shown)})", MOST)


def _text(value: Any, most: int, depth: int) -> str:
    kind = type(value)
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind is int:
        return repr(value) if value.bit_length() < 256 else f"an integer of {value.bit_length()} bits"
    if kind in (str, bytes, bytearray):
        return repr(value) if len(value) <= most else f"{value[:most]!r}…"
    if isinstance(value, BaseException):
        return f"{kind.__name__}({cut(str(value), most)!r})"
    if isinstance(value, enum.Enum):
        return f"{kind.__name__}.{value.name}"
    if isinstance(value, PurePath):
        return repr(str(value))
    if kind.__module__ == "torch" and kind.__name__ in _TORCH:
        return cut(repr(value), most)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _array(value)
    if kind.__module__.partition(".")[0] in _OURS:  # which may hold others of ours, and those this one again
        return cut(str(value), most) if "__str__" in vars(kind) else f"{kind.__name__}(…)"
    if isinstance(value, (Mapping, Sequence, Set)):
        return _container(value, most, depth)
    return value.__qualname__ if hasattr(value, "__qualname__") else f"<{kind.__name__}>"


def _array(value: Any) -> str:
    """A tensor or an array."""
    try:
        shape = "x".join(str(one) for one in islice(value.shape, 16)) or "scalar"
    except Exception:  # of nested tensors, for one
        shape = "?"
    name = "tensor" if type(value).__module__.partition(".")[0] == "torch" else type(value).__name__
    return f"{name}({shape} {str(value.dtype).removeprefix('torch.')})"


def _container(value: Any, most: int, depth: int) -> str:
    left, right = ("(", ")") if isinstance(value, tuple) else ("[", "]") if isinstance(value, Sequence) else ("{", "}")
    if not len(value):
        return f"{left}{right}"
    if depth <= 0:
        return f"{left}{len(value)}…{right}"
    each = max(24, most // _ENTRIES)
    if isinstance(value, Mapping):
        entries = [f"{brief(k, each, 0)}: {brief(v, each, depth - 1)}" for k, v in islice(value.items(), _ENTRIES)]
    else:
        entries = [brief(one, each, depth - 1) for one in islice(value, _ENTRIES)]
    if len(value) > _ENTRIES:
        entries.append(f"… {len(value) - _ENTRIES} more")
    elif isinstance(value, tuple) and len(value) == 1:
        entries.append("")
    return f"{left}{', '.join(entries).rstrip()}{right}"
