"""The arguments of a model's forward: has it room for these, and which constants of the spec go with them?"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from edge_client.call import Call
from shared_hooks.errors import InputMismatch, near


class Arguments:
    """Of one model. ``constants``: the spec's ``call_kwargs``, which give way to what a caller gives."""

    def __init__(self, model: nn.Module, constants: Mapping[str, Any]) -> None:
        self._constants = constants
        try:
            self._signature: inspect.Signature | None = inspect.signature(model.forward)
        except (TypeError, ValueError):  # code that is not Python's says nothing
            self._signature = None
        found = self._signature.parameters.values() if self._signature is not None else ()
        self._positional = [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
        self._known = [one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Call:
        """With the constants that nobody gave."""
        return Call(args, {**self._left(args), **(kwargs or {})})

    def fit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether there is room for all of them, and nothing is missing; True where nobody knows."""
        if self._signature is None:
            return True
        try:
            self._signature.bind(*args, **{**self._left(args), **kwargs})
        except TypeError:
            return False
        return True

    def are_in(self, item: Mapping[Any, Any]) -> bool:
        """Whether a dictionary's entries are keyword arguments; else it is one argument itself.

        Raises InputMismatch where only some of its names are the forward's, or some are missing.
        """
        if not all(isinstance(name, str) for name in item):
            return False
        if self.fit((), item):
            return True
        strange = [name for name in item if name not in self._known]
        if len(strange) == len(item):
            return False
        if strange:
            raise InputMismatch(
                f"the model has no argument {strange[0]!r}: it takes {', '.join(self._known)}."
                f"{near(strange[0], self._known)}"
            )
        raise InputMismatch(f"the dictionary has {', '.join(item)}; the model takes {', '.join(self._known)}")

    def _left(self, args: tuple[Any, ...]) -> dict[str, Any]:
        if not self._constants:
            return {}
        given = self._positional[: len(args)]
        return {name: value for name, value in self._constants.items() if name not in given}
