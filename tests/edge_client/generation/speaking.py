"""The example's language model, served by a process of its own, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from edge_client import EdgeClient, local_server
from edge_client.generation import Words

SPEC = str(Path(__file__).resolve().parents[3] / "examples" / "language_model.toml")
CUT = "model.layers.2"
TEXT = "the first layers run here"


@contextmanager
def connected() -> Iterator[EdgeClient]:
    with local_server(SPEC) as server, EdgeClient(server, SPEC) as client:
        yield client


def inputs(client: EdgeClient, *texts: str) -> dict[str, Any]:
    """Token ids of texts, of several with padding on the left."""
    tokenizer = Words.of(client.spec).tokenizer
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    return dict(tokenizer([*texts] or [TEXT], return_tensors="pt", padding=True, return_token_type_ids=False))


def whole(client: EdgeClient, seed: int = 0, **asked: Any) -> Any:
    """What the model writes without a cut."""
    torch.manual_seed(seed)
    return client.wrapped.model.generate(**asked)
