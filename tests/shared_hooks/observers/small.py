"""Small models for the tests of observers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """(n, 3, 8, 8) -> (n, 5); its ReLU works in place."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.stem = nn.Conv2d(3, 4, 3, padding=1)
            self.body = nn.Sequential(
                nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)
            )
            self.classifier = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = self.classifier((self.body(x) + x).mean((2, 3)))
        return out


def image(seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


class Functional(nn.Module):
    """Attention without a module for it: (n, 6, 8) -> (n, 6, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return out


def gpt2(**config: Any) -> Any:
    """A GPT-2 with random weights, a vocabulary of 40 and two blocks, in eval mode."""
    return _hub("GPT2LMHeadModel", vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, **config)


def reader() -> Any:
    """The GPT-2 without a cache in its output: (n, tokens) -> logits (n, tokens, 40)."""
    return gpt2(use_cache=False)


def bert(**config: Any) -> Any:
    """A BERT with random weights and two layers, in eval mode."""
    return _hub(
        "BertModel", vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        **config,
    )  # fmt: skip


def _hub(name: str, **config: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return cls(cls.config_class(bos_token_id=0, eos_token_id=None, pad_token_id=0, **config)).eval()
