"""A gate stands for the forward of one module: calls that run in lock-step meet there and go through as one.

It lies below the module's shim, so that sessions and observers see each call as it would be alone. What runs outside of
a lock-step goes straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from shared_hooks.forward import UNSEEN, Session
from shared_hooks.generation.together.rows import is_row_wise
from shared_hooks.modules import Shim, running

Form = tuple[int, int, torch.dtype, torch.device]
"""Rank, last dimension, dtype and device of rows."""

LOOKS = 8
"""How often a gate is looked at that was not quiet: a model may build something in its first steps."""

_copied_parts: Any = torch.split_with_sizes_copy  # annotated for its other variant, with out=


class Traveller(Protocol):
    """One of the calls in lock-step."""

    def arrive(self, gate: Gate, form: Form, rows: torch.Tensor) -> Any:
        """What the module gives for ``rows``."""

    @property
    def may_meet(self) -> bool:
        """Whether others are under way, and nothing is set for the thread that would hold for them, too."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether the model's Python state is as it was before all calls: what this one has written there would be
        overwritten by the others while it waits.
        """
        ...


travelling: ContextVar[Traveller | None] = ContextVar("isthmus_travelling", default=None)


@contextmanager
def nobodys() -> Iterator[None]:
    """What runs in the block is of no session and in no lock-step: several calls' rows, or none's."""
    tokens = travelling.set(None), running.set(UNSEEN)
    try:
        yield
    finally:
        travelling.reset(tokens[0])
        running.reset(tokens[1])


class Gate:
    """Of one module that writes no state. ``number``: its place in the model; those behind have lower ones."""

    __slots__ = ("_inside", "_known", "_looks", "_quiet", "forward", "module", "number", "users")

    def __init__(self, module: nn.Module, forward: Callable[..., Any], number: int) -> None:
        self.module = module
        self.forward = forward
        self.number = number
        self.users = 0
        self._inside = [child for child in module.modules() if child is not module]
        self._known: dict[Form, bool] = {}
        self._quiet = False
        self._looks = LOOKS

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traveller = travelling.get()
        if traveller is None or kwargs or len(args) != 1 or not traveller.may_meet:
            return self.forward(*args, **kwargs)
        (rows,) = args
        if type(rows) is not torch.Tensor or rows.dim() < 2 or (self._inside and isinstance(running.get(), Session)):
            return self.forward(rows)  # a session counts the layers inside
        form = rows.dim(), rows.shape[-1], rows.dtype, rows.device
        known = self._known.get(form)
        if known is None:
            if self._is_watched:
                return self.forward(rows)
            with nobodys():
                known = self._known[form] = is_row_wise(self.forward, rows)
        if not known or not self._is_quiet(traveller):
            return self.forward(rows)
        return traveller.arrive(self, form, rows)

    def look_again(self) -> None:
        """The model's Python state has changed: whoever comes next is looked at again."""
        self._quiet = False

    def _is_quiet(self, traveller: Traveller) -> bool:
        if not self._quiet and self._looks:
            self._quiet = traveller.is_quiet
            self._looks -= not self._quiet
        return self._quiet

    def through(self, several: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The module's results for rows of one form, each in memory of its own; None where they must go alone.

        Raises what the module raises.
        """
        if self._is_watched:
            return None
        alike = all(rows.shape[1:] == several[0].shape[1:] for rows in several)
        ones = (1,) * (several[0].dim() - 2)
        flat = several if alike else [rows.reshape(-1, *ones, rows.shape[-1]) for rows in several]
        found = self.forward(torch.cat(list(flat)))
        parts: list[torch.Tensor] = list(_copied_parts(found, [rows.shape[0] for rows in flat]))
        return (
            parts if alike else [part.reshape(*rows.shape[:-1], -1) for part, rows in zip(parts, several, strict=True)]
        )

    @property
    def _is_watched(self) -> bool:
        """Whether somebody looks at calls inside, and must not be shown the rows of others."""
        for module in self._inside:
            shim = module.__dict__.get("forward")
            if module._forward_hooks or module._forward_pre_hooks or (isinstance(shim, Shim) and shim.watching):
                return True
        return False
