"""What one side of a split generation takes. Times are nanoseconds, sizes bytes, tokens are counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.files import write_json
from shared_hooks.profiling.profile import Fields, Side
from shared_hooks.showing import duration, short, size, summary_of

# Prompts of any length, for measuring: words drawn at random.

Prompt = Callable[[int], dict[str, torch.Tensor]]
"""Keyword arguments of generate() for a prompt of so many tokens."""
LEAST_WORD = 3
"""Words below are often marks: padding, beginning, end."""


def words_at_random(model: nn.Module, rows: int = 1) -> Prompt:
    """Ids from the vocabulary of a model of transformers, the same ones every time. SpecError for another model."""
    check_generates(model)
    words = getattr(_text_config(model), "vocab_size", None)
    if not isinstance(words, int) or words <= LEAST_WORD:
        raise SpecError(f"{type(model).__name__}: its configuration does not say how many words it knows")
    device = next((one.device for one in model.parameters()), torch.device("cpu"))

    def prompt(tokens: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(tokens)
        ids = torch.randint(LEAST_WORD, words, (rows, tokens), generator=drawn).to(device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return prompt


def check_generates(model: nn.Module) -> None:
    """SpecError for a model that is not called step by step."""
    can = getattr(model, "can_generate", None)
    if not callable(getattr(model, "generate", None)) or (callable(can) and not can()):
        raise SpecError(f"{type(model).__name__} has no generate(): a generation is planned for language models")


def generated(model: nn.Module, inputs: dict[str, torch.Tensor], tokens: int, **more: Any) -> Any:
    """Exactly so many new tokens, greedily."""
    asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, **more}
    return model.generate(**inputs, **asked)  # type: ignore[operator]


def longest(model: nn.Module) -> int | None:
    """Tokens that the model has positions for; None where it does not say."""
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
    """Their paths, in order, seen in a second step of generate(). Of several lists the one with the most weights.

    Raises CutRefused where there is none.
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
    """Bytes of its parameters and buffers, shared ones once."""
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return sum(nbytes_of(one) for one in tensors.values())


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def _in_order(children: Sequence[Named], called: list[nn.Module]) -> bool:
    own = {child for _, child in children}
    return [one for one in called if one in own] == [child for _, child in children]


# A number that grows with the tokens: what is fixed, and what each token adds.


TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed + slope * tokens``; both at least 0 where it was fitted."""

    fixed: float = 0.0
    slope: float = 0.0

    def at(self, tokens: float) -> float:
        """Its value."""
        return self.fixed + self.slope * tokens

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed + other.fixed, self.slope + other.slope)

    def __sub__(self, other: Line) -> Line:
        return Line(self.fixed - other.fixed, self.slope - other.slope)

    def times(self, factor: float) -> Line:
        """All of it so many times."""
        return Line(self.fixed * factor, self.slope * factor)

    @classmethod
    def total(cls, lines: Iterable[Line]) -> Line:
        """Their sum."""
        found = cls()
        for line in lines:
            found += line
        return found

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Through (tokens, value), values at least 0: with the least squares of relative errors, since a
        millisecond off counts more at few tokens than at many. Neither part is negative. Raises
        ValueError for no points.
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
class Part:
    """A block of the decoder, or all that runs before or after the blocks.

    ``step``: a decode step of one token, by the tokens before it. ``prefill``: a prompt, by its tokens.
    ``state_bytes``: what is kept for the next step (keys and values, recurrent states), by the tokens so far.
    """

    name: str
    step: Line
    prefill: Line
    weights_bytes: int = 0
    state_bytes: Line = field(default_factory=Line)
    hidden_bytes: int = 0
    """Bytes that a block gives for one token: what crosses after it."""

    def chunk_ns(self, tokens: int, before: float) -> float:
        """``tokens`` new ones at once: the first costs a step, each further one what it costs in a prompt. Weights and
        what is kept are read once for all of them.
        """
        return self.step.at(before) + (tokens - 1) * self.prefill.slope

    def times(self, factor: float) -> Part:
        """On a machine that takes ``factor`` times as long."""
        return replace(self, step=self.step.times(factor), prefill=self.prefill.times(factor))


@dataclass(frozen=True)
class DecodingProfile:
    """One side of one model on one machine. ``before``: from the call to the first block (embeddings, masks, an
    encoder); ``after``: from the last block to the logits.
    """

    side: Side
    model_id: str
    machine: Mapping[str, Any]
    before: Part
    blocks: Sequence[Part]
    after: Part
    words: int
    """Size of the vocabulary: logits of one token."""
    word_bytes: int
    """Bytes of one logit."""
    lengths: Sequence[int] = ()
    """Tokens of the prompts that were measured."""
    note: str = ""
    """How it was measured, where it was not block by block."""

    def __repr__(self) -> str:
        step = Line.total(part.step for part in self.parts)
        at = max(self.lengths, default=0)
        weights = sum(part.weights_bytes for part in self.parts)
        takes = f"a token {duration(step.at(at))} after {at}"
        return summary_of(
            self, self.side, self.model_id, f"{len(self.blocks)} blocks", takes, f"weights {size(weights)}"
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order in which they run."""
        return (self.before, *self.blocks, self.after)

    def times(self, factor: float) -> DecodingProfile:
        """As on a machine that takes ``factor`` times as long."""
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
"""What is left of a measurement when others are taken off may be a little below 0."""
SIDES: Final = ("edge", "cloud")


def to_json(profile: DecodingProfile) -> dict[str, Any]:
    """JSON-able."""
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
    """The reverse. Raises SpecError that names the place and what is wrong there."""
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
    """From a file. Raises SpecError."""
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
    """As a file. Raises SpecError where it cannot be written."""
    write_json(path, to_json(profile))


def _part(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "step_ns": _line(part.step),
        "prefill_ns": _line(part.prefill),
        "weights_bytes": part.weights_bytes,
        "state_bytes": _line(part.state_bytes),
        "hidden_bytes": part.hidden_bytes,
    }


def _line(line: Line) -> dict[str, float]:
    return {"fixed": line.fixed, "per_token": line.slope}


def _read_part(fields: Fields) -> Part:
    return Part(
        fields.text("name"),
        _read_line(fields.inner("step_ns")),
        _read_line(fields.inner("prefill_ns")),
        fields.whole("weights_bytes"),
        _read_line(fields.inner("state_bytes")),
        fields.whole("hidden_bytes"),
    )


def _read_line(fields: Fields) -> Line:
    return Line(fields.number("fixed", LEAST), fields.number("per_token", LEAST))
