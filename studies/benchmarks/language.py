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
