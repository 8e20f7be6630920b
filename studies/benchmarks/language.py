"""Language models that are measured: of transformers' Llama, from configurations, with random weights."""

from __future__ import annotations

from typing import Any

import torch

WORDS = 8000


def _llama(layers: int, width: int, heads: int, words: int = WORDS) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


class Blocks:
    """Blocks ``first`` to ``end`` of such a model, called by hand: what a half takes with nothing around it."""

    def __init__(self, model: Any, first: int, end: int) -> None:
        self._model, self._blocks = model.model, model.model.layers[first:end]
        self._begin()

    def _begin(self) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)

    @torch.no_grad()
    def step(self, hidden: torch.Tensor, position: int) -> torch.Tensor:
        """One token's hidden state (1, 1, width), at ``position``; 0 begins another text."""
        if position == 0:
            self._begin()
        places = torch.tensor([[position]])
        rotary = self._model.rotary_emb(hidden, places)
        for block in self._blocks:
            hidden = block(
                hidden,
                position_ids=places,
                past_key_values=self._cache,
                use_cache=True,
                position_embeddings=rotary,
            )
        return hidden


def language_16x768() -> Any:
    """Some 40 ms a token on one core."""
    return _llama(16, 768, 12)


def language_8x256() -> Any:
    """A few milliseconds a token."""
    return _llama(8, 256, 4)


def language_8x64() -> Any:
    """Small enough to count calls."""
    return _llama(8, 64, 4, words=100)


def language_24x64() -> Any:
    """As that, and longer: what a layer adds."""
    return _llama(24, 64, 4, words=100)


def language_wide() -> Any:
    """Two blocks of width 4096, in bfloat16: for the bytes of its hidden state."""
    return _llama(2, 4096, 32, words=1000).to(torch.bfloat16)
