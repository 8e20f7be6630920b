"""More models than memory: those that are asked for come back, exact, on the streams that stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cloud_server.config import read_config
from cloud_server.core import Core
from cloud_server.fleet import Fleet, Processes, ThisProcess, hosts
from shared_hooks.errors import SpecError
from tests.cloud_server.fakes import CoreClient
from tests.cloud_server.fleet.served import edge_of, entry, write_weights
from tests.cloud_server.real import ask, greet, value
from tests.waiting import eventually

X = torch.arange(16.0).reshape(2, 8)


def test_two_models_in_the_room_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A greeting is answered while weights are away; a broken file is reported, and read again once it is mended."""
    monkeypatch.setattr(hosts, "STAYS_SECONDS", 0.0)
    monkeypatch.setattr(hosts, "STAYS", 0.0)
    monkeypatch.setattr(hosts, "TURNS", 0.0)
    monkeypatch.setattr("cloud_server.fleet.version.AGAIN_SECONDS", 0.0)
    file, weights = tmp_path / "server.toml", tmp_path / "two.safetensors"
    write_weights(weights, 1)
    file.write_text(
        entry("one") + entry("two", weights) + "[limits]\nmax_model_bytes = 700\nmodel_turn_seconds = 0.01\n"
    )
    config = read_config(file)
    fleet = Fleet(ThisProcess(config), config.models, limits=config.limits)
    assert [version.is_resident for version in fleet.values()] == [False, True]
    with Core(fleet, config.limits) as core, edge_of("one") as one, edge_of("two", weights) as two:
        clients = {}
        for name, edge in (("one", one), ("two", two)):
            clients[name] = CoreClient(core, greet=False, identity=name)
            clients[name].send(greet(edge, name))
            clients[name].other("welcome")
        for id in range(1, 4):
            for name, edge in (("one", one), ("two", two)):
                ask(clients[name], id, edge.head("first", X + id))
                assert torch.equal(value(clients[name], id), edge.forward(X + id))
                assert [version.is_resident for version in fleet.values()].count(True) == 1
        assert fleet.loads["one"] == 4 and fleet.evictions["two"] >= 3
        ask(clients["one"], 9, one.head("first", X))
        value(clients["one"], 9)
        weights.rename(tmp_path / "away")
        ask(clients["two"], 8, two.head("first", X))
        failed = clients["two"].answer(8).failed
        assert failed is not None and "could not be loaded again" in failed.message
        (tmp_path / "away").rename(weights)
        ask(clients["two"], 10, two.head("first", X))
        assert torch.equal(value(clients["two"], 10), two.forward(X))
        eventually(lambda: core.requests.empty)
        write_weights(weights, 2)  # while it is away it becomes another
        ask(clients["one"], 11, one.head("first", X))
        value(clients["one"], 11)
        ask(clients["two"], 11, two.head("first", X))
        failed = clients["two"].answer(11).failed
        assert failed is not None and failed.error == "Disagreement" and "differ in weights" in failed.message
    fleet.close()


def test_model_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(entry("one") + "[limits]\nmax_model_bytes = 100\n")
    config = read_config(file)
    with pytest.raises(SpecError, match='weights of "one" take .* bytes on cpu; max_model_bytes is 100'):
        Fleet(ThisProcess(config), config.models, limits=config.limits)
    with Processes(config, [str(file)]) as host, pytest.raises(SpecError, match="max_model_bytes: not with worker"):
        Fleet(host, config.models, limits=config.limits)
