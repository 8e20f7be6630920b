"""Where drafts come from. Each is one of transformers' own; a source says how it is asked for, and for how much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from edge_client.generation.drafting.early_exit import EarlyExit


class Source(Protocol):
    """One kind of drafts."""

    def ready(self, model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
        """While it lasts the model can be drafted for; gives the arguments by which ``generate()`` drafts so."""

    def set_length(self, candidates: Any, tokens: int) -> None:
        """Have transformers' generator of candidates draft so many tokens at most, at least 1."""


@dataclass(frozen=True)
class Lookup:
    """What followed the last few tokens when they came before, in the prompt or in the answer. ``ngram``: how many
    tokens must be the same, at most.
    """

    ngram: int = 3

    @contextmanager
    def ready(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """As `Source` says."""
        yield {"prompt_lookup_num_tokens": 1, "max_matching_ngram_size": self.ngram}

    def set_length(self, candidates: Any, tokens: int) -> None:
        """As `Source` says."""
        candidates.num_output_tokens = tokens


@dataclass(frozen=True)
class Assistant:
    """A small model on this side, with the same vocabulary."""

    model: nn.Module

    @contextmanager
    def ready(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """As `Source` says."""
        yield {"assistant_model": self.model}

    def set_length(self, candidates: Any, tokens: int) -> None:
        """As `Source` says."""
        candidates.num_assistant_tokens = tokens


@dataclass(frozen=True)
class FirstLayers:
    """The model's own layers up to the block ``last``, with its own norm and output head (`EarlyExit`). They have a
    cache of their own, so the head of a step is computed twice for each token that is drafted.
    """

    last: str

    @contextmanager
    def ready(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """As `Source` says. Raises as `EarlyExit` does."""
        with EarlyExit(model, self.last) as early:
            yield {"assistant_model": early.twin}

    def set_length(self, candidates: Any, tokens: int) -> None:
        """As `Source` says."""
        candidates.num_assistant_tokens = tokens
