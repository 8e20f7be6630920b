"""The calls of a session: what the model was given, step by step, so that the head can compute the steps once more when
what it sent was too much to keep. Token ids are a few bytes each; hidden states are thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shared_hooks.errors import SessionLost
from shared_hooks.generation.forms import version_of
from shared_hooks.generation.holders import is_state
from shared_hooks.tensors import tensors_in

SMALL = 4096
"""Elements; a larger tensor is not copied: the session can be made again as long as nobody has written to it."""


@dataclass(frozen=True)
class Call:
    """One. ``state``: the name under which the state is given, if it is. ``done``: what was done to it before."""

    values: dict[str, Any]
    versions: list[tuple[torch.Tensor, int]]
    state: str | None
    done: list[Any]

    def kwargs(self, state: Any) -> dict[str, Any]:
        """What the model is called with. Raises SessionLost where somebody has written to it since."""
        if any(version_of(tensor) != version for tensor, version in self.versions):
            raise SessionLost("the session cannot be made again: the inputs of an earlier step were changed since")
        return self.values if self.state is None else {**self.values, self.state: state}


class Calls:
    """Those of one session, in order; ``opening``: the form of its state at the first one."""

    def __init__(self) -> None:
        self.opening: Any = None
        self.entries: list[Call] = []

    def add(self, kwargs: dict[str, Any], done: list[Any]) -> None:
        """Keep one."""
        values = {name: _kept(value) for name, value in kwargs.items() if not is_state(value)}
        state = next((name for name, value in kwargs.items() if is_state(value)), None)
        versions = [(tensor, version_of(tensor)) for tensor in tensors_in(values)]
        self.entries.append(Call(values, versions, state, list(done)))

    def copied(self) -> Calls:
        """For a session that goes on from here by itself."""
        made = Calls()
        made.opening, made.entries = self.opening, list(self.entries)
        return made


def _kept(value: Any) -> Any:
    is_small = isinstance(value, torch.Tensor) and value.numel() <= SMALL
    return value.clone() if is_small else value
