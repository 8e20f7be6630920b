"""The decoding profile of a model on this machine: replies to prompts of several lengths, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn

from shared_hooks import devices
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.generation import is_state
from shared_hooks.profiling import machine
from shared_hooks.profiling.decoding.profile import (
    DecodingProfile,
    Line,
    Named,
    Part,
    Prompt,
    blocks_of,
    check_generates,
    generated,
    longest,
    nbytes_of,
    weights_bytes,
    words_at_random,
)
from shared_hooks.profiling.profile import Side
from shared_hooks.tensors import tensors_in

# What is not a time, looked at in a reply: weights, what is kept, what crosses.

LOOKED_TOKENS = 2


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
            generated(model, prompt(tokens), LOOKED_TOKENS)
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


# One run of generate(), and what each part of each of its forwards took.

Times = tuple[float, ...]
"""Nanoseconds before the blocks, of each block, and after them."""


class StepTimer:
    """Times the forwards of ``model`` by its blocks. A forward's time before the blocks begins on the edge where the
    one before it has ended: what generate() does between them runs there.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Named], side: Side) -> None:
        self._model = model
        self._blocks = blocks
        self._between = side == "edge"
        parameter = next(model.parameters(), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device
        self._began = 0
        self._marks: list[int] = []
        self._found: list[Times] = []

    def run(self, prompt: Prompt, tokens: int, new: int) -> list[Times]:
        """Measure the prompt's forward, and ``new - 1`` steps."""
        inputs = prompt(tokens)
        self._found = []
        with ExitStack() as hooks:
            hooks.callback(self._model.register_forward_pre_hook(self._begin).remove)
            for _, block in self._blocks:
                hooks.callback(block.register_forward_pre_hook(self._mark).remove)
            hooks.callback(self._blocks[-1][1].register_forward_hook(self._mark).remove)
            hooks.callback(self._model.register_forward_hook(self._end).remove)
            self._began = self._now()
            generated(self._model, inputs, new)
        return self._found

    def _now(self) -> int:
        devices.synchronize(self._device)
        return time.perf_counter_ns()

    def _begin(self, module: nn.Module, args: Any) -> None:
        now = self._now()
        self._marks = [self._began if self._between else now]

    def _mark(self, *args: Any) -> None:
        self._marks.append(self._now())

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._began = self._now()
        marks = [*self._marks, self._began]
        self._found.append(tuple(float(after - before) for before, after in pairwise(marks)))


LENGTHS: Final = (16, 128, 512)
NEW_TOKENS: Final = 9
LEAST_ROUNDS: Final = 3


class Measurement:
    """Rounds over prompts of all ``lengths``, one after the other when asked, so that others can be measured in turns
    with them. ``prompt`` makes the inputs of generate() (words drawn at random); lengths that the model has no
    positions for are left out. On the cloud's side what generate() does between forwards does not count.

    Raises SpecError (a model that does not generate, no length that fits) and CutRefused (no blocks, no logits).
    """

    def __init__(
        self,
        model: nn.Module,
        model_id: str,
        side: Side,
        *,
        prompt: Prompt | None = None,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        check_generates(model)
        self.lengths = fitting_lengths(model, lengths)
        self.prompt = prompt or words_at_random(model)
        self._about = side, model_id
        self._device = next((one.device for one in model.parameters()), torch.device("cpu"))
        self._blocks = blocks_of(model, self.prompt)
        self._seen = look(model, self._blocks, self.prompt, sorted({self.lengths[0], self.lengths[-1]}))
        self._timer = StepTimer(model, self._blocks, side)
        self._found: dict[int, list[list[Times]]] = {tokens: [] for tokens in self.lengths}
        self._timer.run(self.prompt, self.lengths[0], NEW_TOKENS)

    @property
    def blocks(self) -> list[str]:
        """Their paths, in order: what a model can be cut after."""
        return [name for name, _ in self._blocks]

    def round(self) -> None:
        """One reply to a prompt of each length."""
        for tokens in self.lengths:
            self._found[tokens].append(self._timer.run(self.prompt, tokens, NEW_TOKENS))

    def result(self) -> DecodingProfile:
        """Each number's median over all rounds."""
        seen, found = self._seen, self._found
        names = ["before", *self.blocks, "after"]
        weights = [seen.before_weights, *seen.block_weights, seen.after_weights]
        states, hidden = [Line(), *seen.state, Line()], [0, *seen.hidden, 0]
        parts = [
            Part(name, _steps(found, at), _prefills(found, at), weights[at], states[at], hidden[at])
            for at, name in enumerate(names)
        ]
        return DecodingProfile(
            *self._about,
            machine.describe(self._device),
            parts[0],
            tuple(parts[1:-1]),
            parts[-1],
            seen.words,
            seen.word_bytes,
            tuple(self.lengths),
        )


def measure_decoding(
    model: nn.Module,
    model_id: str,
    side: Side,
    *,
    prompt: Prompt | None = None,
    lengths: Sequence[int] = LENGTHS,
    seconds: float = 20.0,
) -> DecodingProfile:
    """A `Measurement` of ``seconds``, of three rounds at least."""
    measurement = Measurement(model, model_id, side, prompt=prompt, lengths=lengths)
    began, rounds = time.monotonic(), 0
    while rounds < LEAST_ROUNDS or time.monotonic() - began < seconds:
        measurement.round()
        rounds += 1
    return measurement.result()


def fitting_lengths(model: nn.Module, lengths: Sequence[int]) -> list[int]:
    """Those after which there are positions left for a reply. Raises SpecError for none."""
    most = longest(model)
    found = sorted({one for one in lengths if one > 0 and (most is None or one + NEW_TOKENS <= most)})
    if not found:
        raise SpecError(
            f"no prompt to measure with: the model has {most} positions, and the shortest of {min(lengths, default=0)} "
            f"tokens needs {NEW_TOKENS} more"
        )
    return found


def _steps(found: dict[int, list[list[Times]]], at: int) -> Line:
    """The median of all steps after prompts of one length, at the middle one's tokens."""
    return Line.fit(
        [
            (tokens + NEW_TOKENS / 2, statistics.median(times[at] for run in runs for times in run[1:]))
            for tokens, runs in found.items()
        ]
    )


def _prefills(found: dict[int, list[list[Times]]], at: int) -> Line:
    return Line.fit([(tokens, statistics.median(run[0][at] for run in runs)) for tokens, runs in found.items()])
