"""Prompts of any length, for measuring: words drawn at random, and generate() called with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import SpecError

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
