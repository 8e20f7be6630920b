"""Measure a language model block by block: a decode step and a prefill, as functions of the number of tokens.

`DecodingProfile` holds one side's results, stored as JSON; times are nanoseconds, sizes bytes. `DecodingMeasurement`
measures them on this machine, with replies to prompts of several lengths in turn.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from shared_hooks import devices
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.files import write_json
from shared_hooks.generation import is_state
from shared_hooks.profiling import machine
from shared_hooks.profiling.profile import Fields, Side
from shared_hooks.showing import duration, short, size, summary_of
from shared_hooks.tensors import tensors_in

# Prompts of any length, for measuring: tokens drawn at random.

Prompt = Callable[[int], dict[str, torch.Tensor]]
"""Makes the keyword arguments of generate() for a prompt of so many tokens."""
LEAST_WORD = 3
"""Lowest word id used: those below are often special tokens."""


def words_at_random(model: nn.Module, rows: int = 1) -> Prompt:
    """Return a prompt of random ids from the vocabulary of a transformers model, always the same. Raises SpecError
    otherwise.
    """
    check_generates(model)
    words = getattr(_text_config(model), "vocab_size", None)
    if not isinstance(words, int) or words <= LEAST_WORD:
        raise SpecError(f"{type(model).__name__}: its configuration has no size of the vocabulary")
    device = next((one.device for one in model.parameters()), torch.device("cpu"))

    def prompt(tokens: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(tokens)
        ids = torch.randint(LEAST_WORD, words, (rows, tokens), generator=drawn).to(device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return prompt


def check_generates(model: nn.Module) -> None:
    """Raise SpecError for a model that has no generate()."""
    can = getattr(model, "can_generate", None)
    if not callable(getattr(model, "generate", None)) or (callable(can) and not can()):
        raise SpecError(f"{type(model).__name__} has no generate(): a generation is planned for language models")


def generated(model: nn.Module, inputs: dict[str, torch.Tensor], tokens: int, **more: Any) -> Any:
    """Generate exactly this many new tokens, greedily."""
    requested = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, **more}
    return model.generate(**inputs, **requested)  # type: ignore[operator]


def longest(model: nn.Module) -> int | None:
    """Return the model's maximum number of positions; None if it does not say."""
    for name in ("max_position_embeddings", "n_positions"):
        found = getattr(_text_config(model), name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


# Which modules are the decoder's blocks: the children of a list, each called once in every step, in order.


Named = tuple[str, nn.Module]


def blocks_of(model: nn.Module, prompt: Prompt) -> list[Named]:
    """Return the decoder blocks' paths, in order, seen in a second step of generate(). Of several lists the heaviest.

    Raises CutRefused if there are none.
    """
    called: list[nn.Module] = []
    inside = [child for one in model.modules() if isinstance(one, (nn.ModuleList, nn.Sequential)) for child in one]
    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(lambda module, args: called.clear()).remove)
        for child in {id(one): one for one in inside}.values():
            hooks.callback(child.register_forward_pre_hook(lambda module, args: called.append(module)).remove)
        generated(model, prompt(4), 2)
    counts: dict[nn.Module, int] = {}
    for module in called:
        counts[module] = counts.get(module, 0) + 1
    found: list[list[Named]] = []
    for path, one in model.named_modules():
        if isinstance(one, (nn.ModuleList, nn.Sequential)) and len(one) > 1:
            children = [(f"{path}.{name}", child) for name, child in one.named_children()]
            if all(counts.get(child) == 1 for _, child in children) and _in_order(children, called):
                found.append(children)
    if not found:
        raise CutRefused(f"{type(model).__name__} has no list of blocks that are called once each in a step")
    return max(found, key=lambda children: sum(weights_bytes(child) for _, child in children))


def weights_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers, shared ones once."""
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return sum(nbytes_of(one) for one in tensors.values())


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def _in_order(children: Sequence[Named], called: list[nn.Module]) -> bool:
    own = {child for _, child in children}
    return [one for one in called if one in own] == [child for _, child in children]


# A number that grows with the tokens: a fixed part, and a part per token.


TINY = 1e-9


@dataclass(frozen=True, slots=True)
class LineFit:
    """``fixed + slope * tokens``; both at least 0 if fitted."""

    fixed: float = 0.0
    slope: float = 0.0

    def at(self, tokens: float) -> float:
        """Return its value."""
        return self.fixed + self.slope * tokens

    def __add__(self, other: LineFit) -> LineFit:
        return LineFit(self.fixed + other.fixed, self.slope + other.slope)

    def __sub__(self, other: LineFit) -> LineFit:
        return LineFit(self.fixed - other.fixed, self.slope - other.slope)

    def times(self, factor: float) -> LineFit:
        """Return the line scaled by ``factor``."""
        return LineFit(self.fixed * factor, self.slope * factor)

    @classmethod
    def total(cls, lines: Iterable[LineFit]) -> LineFit:
        """Return the sum of lines."""
        found = cls()
        for line in lines:
            found += line
        return found

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> LineFit:
        """Fit a line to (tokens, value), values at least 0, by least squares of relative errors, as a millisecond
        matters more at few tokens than at many. Neither part is negative. Raises ValueError for no points.
        """
        if not points:
            raise ValueError("no points to fit a line to")
        weights = [1.0 / max(value, TINY) ** 2 for _, value in points]
        scale = max(weights)
        weighted = [(weight / scale, x, y) for weight, (x, y) in zip(weights, points, strict=True)]
        w, wx = sum(weight for weight, _, _ in weighted), sum(weight * x for weight, x, _ in weighted)
        wy, wxx = sum(weight * y for weight, _, y in weighted), sum(weight * x * x for weight, x, _ in weighted)
        wxy = sum(weight * x * y for weight, x, y in weighted)
        spread = w * wxx - wx * wx
        slope = (w * wxy - wx * wy) / spread if spread > TINY * w * wxx else 0.0
        fixed = (wy - slope * wx) / w
        if slope < 0:
            return cls(wy / w, 0.0)
        if fixed < 0:
            return cls(0.0, wxy / wxx)
        return cls(fixed, slope)


@short
@dataclass(frozen=True)
class DecoderPart:
    """A block of the decoder, or all that runs before or after the blocks.

    ``step``: a decode step of one token, by the tokens before it. ``prefill``: a prompt, by its tokens.
    ``state_bytes``: the cache kept for the next step (keys and values, recurrent states), by the tokens so far.
    """

    name: str
    step: LineFit
    prefill: LineFit
    weights_bytes: int = 0
    state_bytes: LineFit = field(default_factory=LineFit)
    hidden_bytes: int = 0
    """Bytes of a block's output for one token: what crosses after it."""

    def chunk_ns(self, tokens: int, before: float) -> float:
        """Return the time of ``tokens`` new ones at once: the first costs a step, each further one what it costs in a
        prompt, as weights and cache are read once for all of them.
        """
        return self.step.at(before) + (tokens - 1) * self.prefill.slope

    def times(self, factor: float) -> DecoderPart:
        """Return the part on a machine that takes ``factor`` times as long."""
        return replace(self, step=self.step.times(factor), prefill=self.prefill.times(factor))


@dataclass(frozen=True)
class DecodingProfile:
    """One side of one model on one machine. ``before``: from the call to the first block (embeddings, masks, an
    encoder); ``after``: from the last block to the logits.
    """

    side: Side
    model_id: str
    machine: Mapping[str, Any]
    before: DecoderPart
    blocks: Sequence[DecoderPart]
    after: DecoderPart
    words: int
    """Size of the vocabulary: logits of one token."""
    word_bytes: int
    """Bytes of one logit."""
    lengths: Sequence[int] = ()
    """Tokens of the measured prompts."""
    note: str = ""
    """How it was measured, if not block by block."""

    def __repr__(self) -> str:
        step = LineFit.total(part.step for part in self.parts)
        at = max(self.lengths, default=0)
        weights = sum(part.weights_bytes for part in self.parts)
        takes = f"a token {duration(step.at(at))} after {at}"
        return summary_of(
            self, self.side, self.model_id, f"{len(self.blocks)} blocks", takes, f"weights {size(weights)}"
        )

    @property
    def parts(self) -> tuple[DecoderPart, ...]:
        """All parts in the order in which they run."""
        return (self.before, *self.blocks, self.after)

    def times(self, factor: float) -> DecodingProfile:
        """Return the profile on a machine that takes ``factor`` times as long."""
        return replace(
            self,
            before=self.before.times(factor),
            blocks=tuple(block.times(factor) for block in self.blocks),
            after=self.after.times(factor),
        )


# Decoding profiles as JSON.


FORMAT: Final = "isthmus-decoding-profile"
VERSION: Final = 1
MAX_BYTES: Final = 16 << 20
LEAST: Final = -1e15
"""Lower bound of a difference of measurements, which may be slightly negative."""
SIDES: Final = ("edge", "cloud")


def to_json(profile: DecodingProfile) -> dict[str, Any]:
    """Return JSON data."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "side": profile.side,
        "model_id": profile.model_id,
        "machine": dict(profile.machine),
        "before": _part(profile.before),
        "blocks": [_part(block) for block in profile.blocks],
        "after": _part(profile.after),
        "words": profile.words,
        "word_bytes": profile.word_bytes,
        "lengths": list(profile.lengths),
        "note": profile.note,
    }


def from_json(data: object, origin: str = "profile") -> DecodingProfile:
    """Read `to_json`. Raises SpecError that names the place and what is wrong there."""
    top = Fields(data, origin)
    if top.data.get("format") != FORMAT:
        raise SpecError(f'{origin}: no decoding profile: "format" is not "{FORMAT}"')
    if top.data.get("version") != VERSION:
        raise SpecError(f"{origin}.version: this Isthmus reads {VERSION}, found {top.data.get('version')!r:.40}")
    side: Literal["edge", "cloud"] = "edge" if top.choice("side", SIDES) == "edge" else "cloud"
    blocks = top.of("blocks", list, "a list")
    if not blocks:
        top.fail("blocks", "expected one at least")
    lengths = top.of("lengths", list, "a list")
    if not all(type(one) is int and one > 0 for one in lengths):
        top.fail("lengths", "expected whole numbers above 0")
    return DecodingProfile(
        side,
        top.text("model_id"),
        top.inner("machine").data,
        _read_part(top.inner("before")),
        tuple(_read_part(Fields(one, f"{top.place}.blocks[{at}]")) for at, one in enumerate(blocks)),
        _read_part(top.inner("after")),
        top.whole("words"),
        top.whole("word_bytes"),
        tuple(lengths),
        top.text("note"),
    )


def read(path: str | Path) -> DecodingProfile:
    """Read a file. Raises SpecError."""
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: larger than any decoding profile ({MAX_BYTES} bytes)")
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    return from_json(data, str(path))


def write(profile: DecodingProfile, path: str | Path) -> None:
    """Write a file. Raises SpecError if that fails."""
    write_json(path, to_json(profile))


def _part(part: DecoderPart) -> dict[str, Any]:
    return {
        "name": part.name,
        "step_ns": _line(part.step),
        "prefill_ns": _line(part.prefill),
        "weights_bytes": part.weights_bytes,
        "state_bytes": _line(part.state_bytes),
        "hidden_bytes": part.hidden_bytes,
    }


def _line(line: LineFit) -> dict[str, float]:
    return {"fixed": line.fixed, "per_token": line.slope}


def _read_part(fields: Fields) -> DecoderPart:
    return DecoderPart(
        fields.text("name"),
        _read_line(fields.inner("step_ns")),
        _read_line(fields.inner("prefill_ns")),
        fields.whole("weights_bytes"),
        _read_line(fields.inner("state_bytes")),
        fields.whole("hidden_bytes"),
    )


def _read_line(fields: Fields) -> LineFit:
    return LineFit(fields.number("fixed", LEAST), fields.number("per_token", LEAST))


# Everything of a reply but times: weights, state, what crosses.

LOOKED_TOKENS = 2


@dataclass(frozen=True)
class SeenSizes:
    """Sizes in bytes. Weights used at both ends (tied embeddings) count at both."""

    before_weights: int
    block_weights: Sequence[int]
    after_weights: int
    state: Sequence[LineFit]
    """Bytes of cache of each block, by the tokens so far."""
    hidden: Sequence[int]
    """Bytes of each block's output, for one token."""
    words: int
    word_bytes: int


def look(model: nn.Module, blocks: Sequence[Named], prompt: Prompt, lengths: Sequence[int]) -> SeenSizes:
    """Measure sizes with prompts of ``lengths``; two show what a token adds. Raises CutRefused for a model without
    logits.
    """
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
    return SeenSizes(
        _own_bytes(last.called["before"]),
        [weights_bytes(block) for _, block in blocks],
        _own_bytes(last.called["after"]),
        [LineFit.fit(one) for one in points],
        last.hidden,
        last.logits[0],
        last.logits[1],
    )


class _Look:
    """Observes one reply: its first forward for what blocks cache of the prompt, its last for a token's output."""

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
        """Observe until closed."""
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
        if self._first and not any(self.kept):  # made before or inside the forward: its growth by blocks is unknown
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


# One run of generate(), with the time of each part of each of its forwards.

Times = tuple[float, ...]
"""Nanoseconds before the blocks, of each block, and after them."""


class StepTimer:
    """Times the forwards of ``model`` by block. On the edge a forward's time before the blocks starts at the end of the
    previous forward: what generate() does in between runs there.
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


class DecodingMeasurement:
    """Rounds over prompts of all ``lengths``, run one by one, so that other measurements can alternate with them.

    ``prompt`` makes the arguments of generate() (random words); lengths beyond the model's positions are dropped. On
    the cloud's side the time of generate() between forwards does not count.

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
        """The blocks' paths, in order: the possible cuts."""
        return [name for name, _ in self._blocks]

    def round(self) -> None:
        """Measure one reply to a prompt of each length."""
        for tokens in self.lengths:
            self._found[tokens].append(self._timer.run(self.prompt, tokens, NEW_TOKENS))

    def result(self) -> DecodingProfile:
        """Return each number's median over all rounds."""
        seen, found = self._seen, self._found
        names = ["before", *self.blocks, "after"]
        weights = [seen.before_weights, *seen.block_weights, seen.after_weights]
        states, hidden = [LineFit(), *seen.state, LineFit()], [0, *seen.hidden, 0]
        parts = [
            DecoderPart(name, _steps(found, at), _prefills(found, at), weights[at], states[at], hidden[at])
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


def fitting_lengths(model: nn.Module, lengths: Sequence[int]) -> list[int]:
    """Return the lengths that leave positions for a reply. Raises SpecError if there are none."""
    most = longest(model)
    found = sorted({one for one in lengths if one > 0 and (most is None or one + NEW_TOKENS <= most)})
    if not found:
        raise SpecError(
            f"no prompt to measure with: the model has {most} positions, and the shortest of {min(lengths, default=0)} "
            f"tokens needs {NEW_TOKENS} more"
        )
    return found


def _steps(found: dict[int, list[list[Times]]], at: int) -> LineFit:
    """Return the median of all steps after prompts of one length, at the middle step's tokens."""
    return LineFit.fit(
        [
            (tokens + NEW_TOKENS / 2, statistics.median(times[at] for run in runs for times in run[1:]))
            for tokens, runs in found.items()
        ]
    )


def _prefills(found: dict[int, list[list[Times]]], at: int) -> LineFit:
    return LineFit.fit([(tokens, statistics.median(run[0][at] for run in runs)) for tokens, runs in found.items()])
