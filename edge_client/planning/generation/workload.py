"""What is to be generated: so many tokens after so many, what comes back of the logits, and what is drafted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from shared_hooks.errors import SpecError

TOKEN_BYTES: Final = 8
"""Bytes of a token id, where the answer is the token alone."""
PLACE_BYTES: Final = 4
"""Bytes of a token id beside its logit."""


@dataclass(frozen=True)
class Drafting:
    """``tokens`` are guessed on the edge before each round trip, ``token_ns`` each (0: looked up in the text), and each
    is right with ``acceptance`` where those before it are.
    """

    tokens: int = 0
    acceptance: float = 0.0
    token_ns: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise SpecError(f"drafting {self.tokens} tokens: expected 0 or more")
        if not 0 <= self.acceptance <= 1:  # which rejects NaN, too
            raise SpecError(f"acceptance {self.acceptance}: expected a share from 0 to 1")
        if not 0 <= self.token_ns < math.inf:
            raise SpecError(f"a drafted token takes {self.token_ns} ns: expected 0 or more")

    @property
    def tokens_per_round(self) -> float:
        """Expected of a round trip: the accepted ones, and the one that the model gives after them."""
        a, k = self.acceptance, self.tokens
        return sum(a**at for at in range(k + 1))


@dataclass(frozen=True)
class Workload:
    """``answer``: what comes back of the logits: None for all, ("top", k), ("token",)."""

    prompt_tokens: int = 128
    new_tokens: int = 128
    answer: tuple[str] | tuple[str, int] | None = None
    drafting: Drafting = field(default_factory=Drafting)

    def __post_init__(self) -> None:
        for name, tokens in (("prompt", self.prompt_tokens), ("reply", self.new_tokens)):
            if tokens < 1:
                raise SpecError(f"a {name} of {tokens} tokens: expected 1 at least")
        if self.answer is not None and not (
            self.answer == ("token",) or (self.answer[0] == "top" and len(self.answer) == 2 and self.answer[1] > 0)
        ):
            raise SpecError(f"no such answer: {self.answer!r:.60}")

    @property
    def middle(self) -> float:
        """Tokens before the middle one of those that are steps: as times grow evenly, the mean step is that one's."""
        return self.prompt_tokens + self.new_tokens / 2

    @property
    def last(self) -> int:
        """Tokens whose state is kept at the end."""
        return self.prompt_tokens + self.new_tokens

    def answer_bytes(self, tokens: int, words: int, word_bytes: int) -> float:
        """Bytes of the logits of so many tokens."""
        if self.answer is None:
            return float(tokens * words * word_bytes)
        if len(self.answer) == 2:
            return float(tokens * min(self.answer[1], words) * (word_bytes + PLACE_BYTES))
        return float(tokens * TOKEN_BYTES)
