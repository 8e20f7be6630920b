"""What one side of a split generation takes. Times are nanoseconds, sizes bytes, tokens are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shared_hooks.profiling.decoding.line import Line
from shared_hooks.profiling.profile import Side
from shared_hooks.showing import duration, short, size, summary_of


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
