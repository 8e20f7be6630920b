"""Settings of every test: one thread (kernels may choose by it), seeded, nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", database=None, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def clean_torch() -> Iterator[None]:
    """The global generator starts the same, and global switches end where they were."""
    torch.manual_seed(0)
    before = _switches()
    yield
    assert _switches() == before, "a test changed a global switch of torch"


def _switches() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
    )
