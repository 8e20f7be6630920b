"""``EdgeClient(server, model, split="auto")``: one line, with any model, and wherever the server is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from edge_client import AutoOptions, ConnectionOptions, EdgeClient, ModelChoice
from edge_client.planning.objective import Constraints
from shared_hooks.errors import InputMismatch, SpecError
from tests.edge_client.served import Served, Small, served
from tests.ports import free_port
from tests.shared_hooks.shown import check

QUICK = AutoOptions(profile_seconds=0.3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as one:
        yield one


def value(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))


def whole(*inputs: torch.Tensor) -> list[torch.Tensor]:
    model = Small().eval()
    with torch.no_grad():
        return [model(one) for one in inputs]


@pytest.mark.parametrize("kind", ["spec", "module", "no example"])
def test_one_line_chooses(server: Served, kind: str) -> None:
    model = {
        "spec": server.spec,
        "module": ModelChoice(Small().eval(), model_id="small", example=server.spec.example()),
        "no example": replace(server.spec, _example=None),
    }[kind]
    heard: list[str] = []
    options = AutoOptions(profile_seconds=0.3, on_decision=lambda entry: heard.append(entry["kind"]))
    with EdgeClient(server.address, model, split="auto", auto=options) as client:
        assert (client._auto is None) == (kind == "no example")  # it is measured with the first input then
        items = [value(seed) for seed in range(4)]
        answers = [client.infer(items[0]), *client.infer_many(items[1:])]
        assert all(map(torch.equal, [one.output for one in answers], whole(*items)))
        here = client.infer(value(), split="edge-only")
        assert here.split == "edge-only" and heard.count("choice") == 4 == len(
            [entry for entry in client.decisions if entry["kind"] == "choice"]
        )
        client.split = "first"
        assert client.infer(value()).split == "first"
        with pytest.raises(InputMismatch, match="is not taken"):
            client.infer(object(), split="auto")
        assert client._auto is not None
        check(client, client._auto, options)
        monitor = client._auto.monitor._thread
    assert not monitor.is_alive()


def test_without_a_server_everything_runs_here_and_it_is_reported(server: Served) -> None:
    said: list[str] = []
    options = replace(QUICK, say=said.append)
    address = f"127.0.0.1:{free_port()}"
    with EdgeClient(
        address, server.spec, split="auto", auto=options, connection=ConnectionOptions(patience=0.3)
    ) as client:
        answer = client.infer(value())
    assert answer.split == "edge-only" and torch.equal(answer.output, whole(value())[0])
    assert any("no server yet, everything runs here" in line for line in said)


def test_impossible_options_are_reported_before_loading() -> None:
    with pytest.raises(SpecError, match='split="auto" chooses between here and a server'):
        EdgeClient(None, "digits", split="auto")
    with pytest.raises(SpecError, match='split="auto" runs the whole model here'):
        EdgeClient("127.0.0.1:1", ModelChoice("digits", only_head=3), split="auto")
    for wrong, says in (
        ({"objective": "speed"}, "objective 'speed': one of latency"),
        ({"partitioner": "best"}, "no such partitioner"),
        ({"profile_seconds": 0}, "profile_seconds=0: expected seconds"),
    ):
        with pytest.raises(SpecError, match=says):
            AutoOptions(**wrong)  # type: ignore[arg-type]
    assert "Constraints" in repr(AutoOptions(constraints=Constraints(max_edge_memory=1.0)))
