"""Which objects hold tensors between the calls of a model: transformers' caches, and what users register.

Such an object is taken apart into its attributes and made again without a call of its code. The receiver makes those
classes only that it has already, and that are states or parts of states.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Hashable
from typing import Any

from torch import nn

from shared_hooks.errors import BadFrame
from shared_hooks.tensors import class_name

_registered: list[type] = []
# classes of transformers outside its module of caches: parts of caches that a model brings
_PART = re.compile(r"(Cache|CacheLayer|Layer|LayerMixin|States?|Params)$")


def register_state(cls: type) -> type:
    """Objects of ``cls`` hold tensors between calls. Do this on both sides; usable as a decorator.

    Its instances must keep all they know in their ``__dict__``: numbers, text, tensors, lists, dictionaries, and other
    registered objects.
    """
    if cls not in _registered:
        _registered.append(cls)
        _is_state.cache_clear()
    return cls


def _caches() -> tuple[type, ...]:
    module = sys.modules.get("transformers.cache_utils")
    found = getattr(module, "Cache", None)
    return (*_registered, found) if isinstance(found, type) else tuple(_registered)


@functools.lru_cache(1024)
def _is_state(cls: Hashable) -> bool:
    return isinstance(cls, type) and issubclass(cls, _caches())  # one of transformers' is there once its caches are


def is_state(value: Any) -> bool:
    """Whether a value is an object that keeps tensors for the next call."""
    return _is_state(type(value))  # type: ignore[arg-type]


def is_part(cls: type) -> bool:
    """Whether objects of a class may be part of a state."""
    if issubclass(cls, _caches()):
        return True
    own = cls.__module__.startswith("transformers.") and not issubclass(cls, nn.Module)
    return own and any(_PART.search(base.__name__) for base in cls.__mro__)


def part_class(name: str) -> type:
    """The class of that name. Raises BadFrame for a class that is not here, or no part of states."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, type) or class_name(found) != name or not is_part(found):
        raise BadFrame(f"{name!r:.80} is no class of states that is known here")
    return found
