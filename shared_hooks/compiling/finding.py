"""Which modules of a tail can be compiled: the outermost ones that are called behind the cut, and hold others.

A call that begins behind the cut lies wholly behind it, whatever other calls of its module do. Leaves are left alone:
alone they are a kernel each, and nothing is won.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Finder:
    """What a tail runs in place of modules (`TailSession.substitutes`): themselves, and their names are noted."""

    def __init__(self, passed: set[nn.Module]) -> None:
        """``passed``: those that cannot be compiled; what they call may."""
        self.found: dict[nn.Module, None] = {}
        self._passed = passed
        self._inside = False

    def __call__(self, module: nn.Module) -> Callable[..., Any] | None:
        if self._inside or module in self._passed or next(module.children(), None) is None:
            return None
        return partial(self._run, module)

    def _run(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.found[module] = None
        self._inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False
