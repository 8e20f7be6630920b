"""A digest over the path that a forward takes: module calls, operations, and the forms of their results.

Both sides work it out by themselves, the edge from its trace and the tail's side from its rehearsal, and must agree at
the cut. Strides and devices are left out: they may differ between machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from shared_hooks.forward import unreflected

CALL = "(call)"


class PathDigest:
    """Grows with the run; `hexadecimal` at any moment."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def call(self, path: str, number: int) -> None:
        """A module is called for the ``number``-th time."""
        self._digest.update(f"call {path} {number}\n".encode())

    def operation(self, name: str, results: Iterable[Any]) -> None:
        """A torch function gives ``results``: tensors or values of a trace, with shape and dtype."""
        self._operation(name, [f"{tuple(result.shape)}{result.dtype}" for result in results])

    def _operation(self, name: str, forms: list[str]) -> None:
        self._digest.update(f"{unreflected(name)} {forms}\n".encode())

    def item(self, item: tuple[Any, ...]) -> None:
        """One of `Trace.path_items`."""
        if item[0] == CALL:
            self.call(item[1], item[2])
        else:
            self._operation(item[0], [f"{shape}{dtype}" for shape, dtype in item[1]])

    def hexadecimal(self) -> str:
        """The digest of everything so far."""
        return self._digest.hexdigest()
