"""A server's hook that makes answers wrong: one bit, after the tail, at some cuts, from some request on."""

from __future__ import annotations

from typing import Any

import torch

from shared_hooks.lifecycle import Event


class Liar:
    """Turns the lowest bit of the output's first fraction, or adds ``by`` to it, at ``cuts`` (none: at all)."""

    name = "liar"

    def __init__(self, cuts: tuple[str, ...] | list[str] = (), after: int = 0, by: float = 0.0) -> None:
        self._cuts, self._honest, self._by = cuts, after, by

    def after_tail(self, event: Event) -> None:
        if self._cuts and event.split not in self._cuts:
            return
        self._honest -= 1
        if self._honest < 0:
            first: Any = event.output.view(-1)[:1]
            if self._by:
                first.add_(self._by)
            else:
                first.view(torch.int32).bitwise_xor_(1)
