"""What is not a time: weights of each part, what its blocks keep and give, and the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import CutRefused
from shared_hooks.generation import is_state
from shared_hooks.profiling.decoding.profile import Line, Named, nbytes_of, weights_bytes
from shared_hooks.profiling.decoding.prompts import Prompt, generated
from shared_hooks.tensors import tensors_in

NEW_TOKENS = 2


@dataclass(frozen=True)
class Seen:
    """Bytes. Weights that both ends use (tied embeddings) count at both."""

    before_weights: int
    block_weights: Sequence[int]
    after_weights: int
    state: Sequence[Line]
    """Bytes of state that each block keeps, by the tokens so far."""
    hidden: Sequence[int]
    """Bytes that each block gives, for one token."""
    words: int
    word_bytes: int


def look(model: nn.Module, blocks: Sequence[Named], prompt: Prompt, lengths: Sequence[int]) -> Seen:
    """``lengths``: of the prompts; two tell what a token adds. Raises CutRefused for a model that gives no logits."""
    looks = [_Look(model, blocks) for _ in lengths]
    for one, tokens in zip(looks, lengths, strict=True):
        with one.attached():
            generated(model, prompt(tokens), NEW_TOKENS)
    last = looks[-1]
    if last.logits is None:
        raise CutRefused(f"{type(model).__name__} gives no logits")
    points = [
        [(tokens, float(one.kept[at])) for tokens, one in zip(lengths, looks, strict=True)] for at in range(len(blocks))
    ]
    return Seen(
        _own_bytes(last.called["before"]),
        [weights_bytes(block) for _, block in blocks],
        _own_bytes(last.called["after"]),
        [Line.fit(one) for one in points],
        last.hidden,
        last.logits[0],
        last.logits[1],
    )


class _Look:
    """One reply: its first forward shows what blocks keep of the prompt, its last what they give for a token."""

    def __init__(self, model: nn.Module, blocks: Sequence[Named]) -> None:
        self.model = model
        self.blocks = blocks
        self.called: dict[str, dict[nn.Module, None]] = {"before": {}, "after": {}}
        self.hidden: list[int] = []
        self.kept: list[int] = []
        self.logits: tuple[int, int] | None = None
        self._phase = "before"
        self._first = True
        self._state: Any = None
        self._so_far = 0

    def attached(self) -> ExitStack:
        """Until it is closed."""
        stack = ExitStack()
        inside = {module for _, block in self.blocks for module in block.modules()}
        for module in self.model.modules():
            if module not in inside and any(True for _ in module.parameters(recurse=False)):
                stack.callback(module.register_forward_pre_hook(self._called).remove)
        for _, block in self.blocks:
            stack.callback(block.register_forward_hook(self._block).remove)
        stack.callback(self.model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        stack.callback(self.model.register_forward_hook(self._end).remove)
        return stack

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._phase, self.hidden = "before", []
        self._state = next((one for one in (*args, *kwargs.values()) if is_state(one)), None)
        self._so_far = _bytes(self._state)

    def _called(self, module: nn.Module, args: Any) -> None:
        self.called[self._phase][module] = None

    def _block(self, module: nn.Module, args: Any, output: Any) -> None:
        self.hidden.append(next((nbytes_of(one) for one in _values(output) if isinstance(one, torch.Tensor)), 0))
        if self._first:
            whole = _bytes(self._state)
            self.kept.append(max(0, whole - self._so_far))
            self._so_far = whole
        if module is self.blocks[-1][1]:
            self._phase = "after"

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor):
            self.logits = logits.shape[-1], logits.element_size()
        if self._first and not any(self.kept):  # made before or inside the forward: nobody saw it grow block by block
            states = [one for one in (self._state, *_values(output)) if is_state(one)]
            self.kept = [_bytes(states) // len(self.blocks)] * len(self.blocks)
        self._first = False


def _values(output: Any) -> tuple[Any, ...]:
    if isinstance(output, (tuple, list)):
        return tuple(output)
    return tuple(output.values()) if isinstance(output, dict) else (output,)


def _bytes(state: Any) -> int:
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors_in(state)}
    return sum(storages.values())


def _own_bytes(modules: dict[nn.Module, None]) -> int:
    own = {id(one): one for module in modules for one in module.parameters(recurse=False)}
    return sum(nbytes_of(one) for one in own.values())
