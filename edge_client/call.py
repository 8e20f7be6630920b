"""The arguments of a model, and the load that a server reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared_hooks.showing import short


@short
@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model: its positional and keyword arguments."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, item: Any) -> Call:
        """Return a `Call` unchanged, a tuple as positional, a dictionary as keyword arguments, anything else as the
        only one.
        """
        if isinstance(item, Call):
            return item
        if type(item) is tuple:
            return cls(item)
        if type(item) is dict:
            return cls((), item)
        return cls((item,))


@dataclass(frozen=True)
class Load:
    """How busy the server is: requests waiting or running, workers, and the recent mean wait for one (ns)."""

    pending: int = 0
    workers: int = 1
    queue_ns: float = 0.0
