"""Observers on both sides of a cut of the real service, each side with its own."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.models.served_model import ServedModel
from cloud_server.transport.server import CloudServer
from edge_client import EdgeClient
from shared_hooks import WrappedModel
from shared_hooks.models import load_spec
from shared_hooks.observers import (
    ActivationStats,
    AttentionCapture,
    Custom,
    MemoryUse,
    NonFiniteGuard,
    TopTokens,
)
from tests.shared_hooks.observers.left import hooks_left
from tests.shared_hooks.observers.small import gpt2, image

GPT2 = "m=tests.shared_hooks.observers.small:gpt2"
RESIDUAL = "m=tests.shared_hooks.observers.small:Residual"


@contextlib.contextmanager
def service(spec: str, split: str) -> Iterator[tuple[EdgeClient, WrappedModel]]:
    """A client, and the model of the server that it talks to."""
    served = ServedModel(ModelEntry(load_spec(spec)), torch.device("cpu"))
    server = CloudServer(Core([served], Limits()), "127.0.0.1:0")
    server.start()
    try:
        with EdgeClient(f"127.0.0.1:{server.port}", spec, split) as client:
            yield client, served._wrapped
    finally:
        server.stop(grace=1)


@pytest.mark.parametrize("split", ["input", "stem", "body.1", "classifier"])
def test_each_observer_on_both_sides(split: str) -> None:
    def observers() -> list[Any]:
        return [
            ActivationStats(), MemoryUse(), NonFiniteGuard(action="raise"), Custom(lambda *given: given[3]),
            TopTokens(),
        ]  # fmt: skip

    with service(RESIDUAL, split) as (client, cloud):
        expected = client.infer(image()).output
        with contextlib.ExitStack() as stack:
            here, there = observers(), observers()
            for side, wrapped in ((here, client.wrapped), (there, cloud)):
                for observer in side:
                    stack.enter_context(observer.attach(wrapped))
            assert torch.equal(client.infer(image()).output, expected)
        names = ["stem", "body.0", "body.1", "body.2", "classifier"]
        for kind in (0, 1, 3):
            assert [record.name for record in (*here[kind].records, *there[kind].records)] == names
        end = 0 if split == "input" else names.index(split) + 1
        assert len(here[0].records) == end
        # the answer is given by the server
        assert not here[4].records and [list(record.ids) for record in there[4].records] == expected.topk(5)[1].tolist()
        assert not any(observer.failures for observer in (*here, *there))
        assert torch.equal(client.infer(image()).output, expected)
        models = client.wrapped.model, cloud.model
    assert not hooks_left(models[0])
    cloud.detach()
    assert not hooks_left(models[1])


def test_both_sides_are_observed_while_text_is_generated_through_the_service() -> None:
    prompt = torch.tensor([[3, 1, 4]])
    whole = gpt2()
    expected = whole.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False)
    with service(GPT2, "transformer.h.0.ln_2") as (client, cloud):

        def forward(*args: Any, **kwargs: Any) -> Any:
            return client.infer(*args, **kwargs).output

        model = gpt2()
        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
        model.forward = forward
        heads, tails = AttentionCapture(), AttentionCapture()
        first, last, tokens = ActivationStats("*.ln_1"), ActivationStats("*.ln_1"), TopTokens(k=1)
        with (
            heads.attach(client.wrapped), first.attach(client.wrapped), tails.attach(cloud), last.attach(cloud),
            tokens.attach(cloud),
        ):  # fmt: skip
            found = model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False)
    assert torch.equal(found, expected)
    assert [record.ids[0] for record in tokens.records] == expected[0, 3:].tolist()
    for records, block in (((*heads.records,), 0), ((*tails.records,), 1)):
        assert [(record.name, record.step, record.shape[-1]) for record in records] == [
            (f"transformer.h.{block}.attn", step, 3 + step) for step in range(3)
        ]
    assert [record.shape[1] for record in first.records] == [record.shape[1] for record in last.records] == [3, 4, 5]
