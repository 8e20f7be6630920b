"""Surroundings in which models of the zoo run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def slow_attention() -> Iterator[None]:
    """Without the fast path of nn.MultiheadAttention, which PyTorch leaves by itself as soon as hooks are present."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def bfloat16_autocast() -> Iterator[None]:
    """CPU autocast to bfloat16 around the whole model."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def seeded_random() -> Iterator[None]:
    """The global generator in a fixed state; each half of a cut model starts from it, as two processes would."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        yield
