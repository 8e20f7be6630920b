"""`EdgeClient.intervene`: what is changed is the model with the change, and what cannot be changed is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cloud_server.transport import CloudServer
from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from shared_hooks.errors import CutRefused, ModelFailed, UnknownLayer
from tests.cloud_server.inference.served import engine, serving
from tests.cloud_server.real import Residual

MODEL = Residual().eval()
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def server() -> Iterator[CloudServer]:
    with serving(engine()) as server:
        yield server


@pytest.fixture
def client(server: CloudServer) -> Iterator[EdgeClient]:
    choice = ModelChoice(Residual().eval(), model_id="residual", example=((X,), {}))
    with EdgeClient(f"127.0.0.1:{server.port}", choice, split="second") as client:
        yield client


def changed(name: str, factor: float) -> dict[str, torch.Tensor]:
    handle = MODEL.get_submodule(name).register_forward_hook(lambda module, inputs, output: output * factor)
    try:
        with torch.no_grad():
            found: dict[str, torch.Tensor] = MODEL(X)
        return found
    finally:
        handle.remove()


def test_an_answer_is_that_of_the_changed_model(client: EdgeClient) -> None:
    plain = client.infer(X)
    with client.intervene({"first": lambda output: output * 3}):
        answer = client.infer(X)
        whole = client.infer(X, split="edge-only")
    assert list(answer.transforms) == ["first"] and not plain.transforms
    wanted = changed("first", 3)
    for name, value in wanted.items():
        assert torch.equal(answer.output[name], value) and torch.equal(whole.output[name], value)
        assert not torch.equal(plain.output[name], value)
    assert torch.equal(client.infer(X).output["logits"], plain.output["logits"])


def test_nothing_stays_unchanged_in_silence(client: EdgeClient) -> None:
    plain = client.infer(X).output["logits"]
    with client.intervene({"second": lambda output: output}):
        for split in ("first", "input", "cloud-only", 0):
            with pytest.raises(CutRefused, match="intervene: second runs on the server"):
                client.infer(X, split=split)
        with pytest.raises(CutRefused, match="needs a cut that is given"):
            client.infer(X, split="auto")
    with client.intervene({"first": lambda output: output[:1]}), pytest.raises(ModelFailed, match="intervene, first"):
        client.infer(X)
    with client.intervene({"first": lambda output: 1 / 0}), pytest.raises(ModelFailed, match=r"ZeroDivision.*\.py:\d+"):
        client.infer(X)
    with pytest.raises(UnknownLayer, match="Did you mean first"), client.intervene({"frist": abs}):
        pass
    with client.intervene({"first": lambda output: None}):
        assert torch.equal(client.infer(X).output["logits"], plain)
    assert torch.equal(client.infer(X).output["logits"], plain)
