"""Steps that are sent while earlier ones are in progress: calls of the model that will probably come next.

A caller of the model (drafts: `edge_client.generation.drafting`) foresees a call. Its head runs while the previous
call's answer is awaited, on the state as it will probably be then, and its step is sent. If the call comes, on that
state, its answer is already under way. If anything differs, the server takes the steps back with the next one, and the
call is made as usual: a wrong guess costs time, and never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shared_hooks.generation.edge_session import PendingStep
from shared_hooks.generation.head import GenerationHead
from shared_hooks.generation.hidden import is_state_class
from shared_hooks.generation.inputs import LITERALS, StateNode
from shared_hooks.generation.mirror import Forms, Mirror, Snapshot
from shared_hooks.tensors import identical

MOST_AHEAD = 4
"""The maximum number of steps in progress besides the current one."""
ASKS = frozenset({"w", "rng", "new", "born", "still"})
"""Parts of a header that no step sent ahead has, because the answers before it may change them."""


@dataclass(frozen=True)
class NextCall:
    """The expected arguments of the model. ``tokens``: how many the call adds to the state."""

    kwargs: dict[str, Any]
    tokens: int


class CallForesight(Protocol):
    """Predicts the next calls of ``model``."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def tokens(self) -> int:
        """How many tokens the call in progress adds to the state; 0 if no call follows it."""
        ...

    def next(self, after: int, saved_ns: int, compute_ns: int) -> NextCall | None:
        """Return the call after the one in progress and ``after`` more that were foreseen, or None. What is done to the
        state between the two is done now.

        ``saved_ns``: the time saved if the step comes true: a head and the network. ``compute_ns``: the server's time
        for a step, wasted if it does not.
        """
        ...


foresight: ContextVar[CallForesight | None] = ContextVar("isthmus_foresight", default=None)
"""Predicts the calls of this context."""


@dataclass(frozen=True)
class Foreseen:
    """A foreseen call whose step is in progress. ``kwargs``: copies, since the caller may write to its own.
    ``expected``: the forms of the state that it depends on; ``done``: what was done to the state since. ``marks``: what
    the session has sent with it. ``after``: the state after its head.
    """

    kwargs: dict[str, Any]
    tokens: int
    expected: Forms
    done: list[Any]
    head: GenerationHead
    message: tuple[dict[str, Any], list[torch.Tensor]]
    pending: PendingStep
    marks: dict[str, Any]
    after: Snapshot

    def is_of(self, kwargs: dict[str, Any], done: Sequence[Any]) -> bool:
        """Return whether it is this call, after these calls of the state's methods."""
        return list(done) == self.done and _same(self.kwargs, kwargs)


def unchanging(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Copies of inputs, except for a state."""
    return {
        name: value if is_state_class(type(value)) else tree_map_only(torch.Tensor, torch.clone, value)
        for name, value in kwargs.items()
    }


def _same(one: Any, other: Any) -> bool:
    """Return whether two inputs are equal; False if that is uncertain."""
    if is_state_class(type(one)):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.stride() == other.stride() and identical(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) in LITERALS and bool(one == other)


# What a step will change in the server's part of a state: the changes of the last one, for as many tokens.


@dataclass(frozen=True)
class AnswerGrowth:
    """What one answer has changed. ``places``: by how much the sizes, or the number, of each value grew.
    ``nodes_changed``: of the mirror on which it was seen.
    """

    tokens: int
    nodes_changed: int
    places: list[tuple[StateNode, Any, tuple[int, ...]]]

    @classmethod
    def seen(cls, mirror: Mirror, before: Snapshot, tokens: int) -> AnswerGrowth | None:
        """Return the growth since ``before``, with ``tokens`` more; None if anything did not just grow."""
        places: list[tuple[StateNode, Any, tuple[int, ...]]] = []
        if tokens < 1 or mirror.nodes_changed != before.nodes_changed:
            return None
        for node, forms, _ in before.contents:
            for key, form in node.forms.items():
                was = forms.get(key)
                if form is was or isinstance(form, StateNode) or form == was:
                    continue
                grown = _grown(was, form)
                if grown is None:
                    return None
                places.append((node, key, grown))
        return cls(tokens, mirror.nodes_changed, places)

    def apply(self, mirror: Mirror, tokens: int) -> bool:
        """Apply it to the mirror, for another number of tokens. Returns False, with nothing changed, if that is
        unknown.
        """
        if mirror.nodes_changed != self.nodes_changed:
            return False
        changes: list[tuple[Any, StateNode, Any]] = []
        for node, key, grown in self.places:
            if any(one * tokens % self.tokens for one in grown):
                return False
            more = tuple([one * tokens // self.tokens for one in grown])
            form = node.forms.get(key)
            if form is None or isinstance(form, StateNode):
                return False
            if form[0] == "m":
                shape = tuple([size + one for size, one in zip(form[1], more, strict=True)])
                stride = tuple([new - old for new, old in zip(_dense(shape), form[2], strict=True)])
                changes.append((("+m", more, stride), node, key))
            else:
                changes.append((("+v" if form[0] == "v" else "+i", more[0]), node, key))
        for difference, node, key in changes:
            mirror.grow(difference, [(node, key)])
        return True


def _grown(was: Any, form: Any) -> tuple[int, ...] | None:
    """Return by how much a value grew; None if it changed otherwise."""
    if was is None or isinstance(was, StateNode) or was[0] != form[0]:
        return None
    if form[0] == "m" and len(was[1]) == len(form[1]) and was[3] == form[3] and form[2] == _dense(form[1]):
        return tuple([new - old for new, old in zip(form[1], was[1], strict=True)])
    if form[0] == "v" and type(form[1]) is type(was[1]) is int:
        return (form[1] - was[1],)
    if form[0] == "i" and form[1] == was[1] and type(form[2]) is type(was[2]) is int:
        return (form[2] - was[2],)
    return None


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
