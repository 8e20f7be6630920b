"""Models that are loaded, replaced and unloaded under clients."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import grpc
import pytest
import torch

from cloud_server.access import entry as identity
from cloud_server.access import hash_of, new_token
from cloud_server.fleet import Fleet, ThisProcess
from cloud_server.telemetry import counted
from edge_client import EdgeClient
from protos.inference import inference_pb2 as pb
from shared_hooks.errors import Disagreement, IsthmusError, SpecError, UnknownModel
from shared_hooks.models import load_spec
from tests.cloud_server.fakes import FakeEngine
from tests.cloud_server.fleet.served import Small, edge_of, entry, fleet_of, write_weights
from tests.cloud_server.inference.rest import ask as ask_rest
from tests.cloud_server.inference.served import Asker
from tests.cloud_server.small import Gate
from tests.waiting import eventually

X = torch.arange(16.0).reshape(2, 8)


def client_of(port: int, name: str, weights: Path | None = None) -> EdgeClient:
    return EdgeClient(f"127.0.0.1:{port}", load_spec(f"{name}={Small.__module__}:Small", weights=weights))


def test_unloaded_by_name_and_back(tmp_path: Path) -> None:
    """A client that stays hears NOT_FOUND by name, and continues when the model is back, on the stream it has."""
    file = tmp_path / "server.toml"
    file.write_text(entry("one") + entry("two"))
    with fleet_of(file) as (fleet, server), client_of(server.port, "one") as client, edge_of("one") as edge:
        wanted = edge.forward(X)
        assert torch.equal(client.infer(X, split="first").output, wanted)
        fleet.unload("one")
        with pytest.raises(UnknownModel, match='"one" was unloaded'):
            client.infer(X, split="first")
        with pytest.raises(UnknownModel, match="there is: two"), client_of(server.port, "one") as late:
            late.infer(X, split="first")
        assert fleet.states() == {"one": ("UNAVAILABLE", "unloaded"), "two": ("READY", "")}
        fleet.load("one")
        assert torch.equal(client.infer(X, split="first").output, wanted)
        assert client.counters.streams == 1
        with pytest.raises(UnknownModel, match='"three" is in the server'):
            fleet.load("three")


def test_new_weights_are_another_model(tmp_path: Path) -> None:
    """Whoever holds the old ones hears of both; what the server says of itself is of the new ones, and true."""
    file, weights = tmp_path / "server.toml", tmp_path / "one.safetensors"
    file.write_text(entry("one", weights))
    write_weights(weights, 1)
    with (
        fleet_of(file) as (fleet, server),
        edge_of("one", weights) as before,
        client_of(server.port, "one", weights) as old,
    ):
        assert torch.equal(old.infer(X, split="first").output, before.forward(X))
        facts = fleet["one"].manifest()
        write_weights(weights, 2)
        assert str(fleet.reload()) == "loaded: one"
        with pytest.raises(Disagreement, match="was replaced on this server: client and server differ in weights"):
            old.infer(X, split="first")
        assert fleet["one"].manifest() != facts
        with client_of(server.port, "one", weights) as new, edge_of("one", weights) as after:
            assert torch.equal(new.infer(X, split="first").output, after.forward(X))
            assert not torch.equal(after.forward(X), before.forward(X))
        write_weights(weights, 1)
        fleet.reload()
        assert torch.equal(old.infer(X, split="first").output, before.forward(X))


def test_a_reload_does_what_the_file_says_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(entry("one") + entry("two"))
    with fleet_of(file) as (fleet, _):
        first = fleet["one"]
        file.write_text(entry("one") + entry("three"))
        assert str(fleet.reload()) == "loaded: three; unloaded: two; as they were: one"
        assert fleet["one"] is first and fleet.loads["one"] == 1 and sorted(fleet) == ["one", "three"]
        for broken in (entry("four") + "factory = 1", entry("four").replace("Small", "Missing")):
            file.write_text(entry("one") + broken)
            with pytest.raises(IsthmusError):
                fleet.reload()
            assert sorted(fleet) == ["one", "three"]


def test_unload_answers_running_requests_then_frees_weights(tmp_path: Path) -> None:
    """Also where the collector was asked to look at the model no more."""
    file = tmp_path / "server.toml"
    file.write_text(entry("one"))
    with fleet_of(file) as (fleet, _):
        version, gate = fleet["one"], Gate()
        model = weakref.ref(version._engine()._wrapped.model)  # type: ignore[attr-defined]
        held = version.enter("alice", lambda: gate.entered.release)
        fleet.unload("one")
        assert version._engine() is not None, "what was put finishes"
        with pytest.raises(UnknownModel):
            version.admit_step(b"", 0, 0)
        held()
        held()  # a second time it does nothing
        eventually(lambda: gc.collect() >= 0 and model() is None)


def test_parked_requests_are_cancelled_or_continue() -> None:
    """Who waits for weights holds no worker, and may leave."""
    from cloud_server.config import ModelEntry
    from cloud_server.fleet.version import ModelInMemory, Version

    loaded = ModelInMemory(ModelEntry(load_spec("digits")), FakeEngine())
    asked: list[str] = []
    version = Version(loaded, wanted=lambda _, account: asked.append(account))
    assert version.leave("it gave way") and not version.is_resident
    puts: list[str] = []
    left: list[str] = []

    def put(name: str) -> object:
        puts.append(name)
        return lambda: left.append(name)

    leaves = {name: version.enter(name, lambda name=name: put(name)) for name in ("alice", "bob")}  # type: ignore[misc, return-value]
    assert asked == ["alice", "bob"] and not puts and version.waiting == 2
    leaves["bob"]()
    version.arrive(loaded)
    assert puts == ["alice"] and not left
    assert not version.leave("it is evicted again", seconds=0.01), "alice needs it"
    leaves["alice"]()
    assert left == ["alice"] and version.leave("now")


POLICIES = """
[identities.admin]
manage = true
models = ["one", "two"]
[identities.edge]
"""


def test_only_permitted_callers_change_models(tmp_path: Path) -> None:
    """By Triton's own calls, of gRPC and HTTP; nothing but a name is taken."""
    file, identities = tmp_path / "server.toml", tmp_path / "identities.toml"
    file.write_text(entry("one") + entry("two") + entry("secret"))
    admin, edge = new_token(), new_token()
    tokens = [identity("admin", hash_of(admin), None), identity("edge", hash_of(edge), None)]
    identities.write_text("\n".join([*tokens, POLICIES]))
    unload, load = pb.RepositoryModelUnloadRequest(model_name="one"), pb.RepositoryModelLoadRequest(model_name="one")
    with fleet_of(file, identities=identities) as (fleet, server):
        with Asker(server.port, edge) as asker, pytest.raises(grpc.RpcError, match="may not load or unload"):
            asker.call("RepositoryModelUnload", unload)
        with Asker(server.port, admin) as asker:
            asker.call("RepositoryModelUnload", unload)
            assert sorted(fleet) == ["secret", "two"]
            states = {one.name: (one.state, one.reason) for one in asker.call("RepositoryIndex").models}
            assert states == {"one": ("UNAVAILABLE", "unloaded"), "two": ("READY", "")}
            load.parameters["config"].string_param = '{"factory": "os:system"}'
            with pytest.raises(grpc.RpcError, match="'config' is not served"):
                asker.call("RepositoryModelLoad", load)
            load.parameters.clear()
            asker.call("RepositoryModelLoad", load)
            assert "one" in fleet
            for name in ("secret", "../etc/passwd"):
                with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
                    asker.call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name))
        path, who = "/v2/repository/models/one/", {"Authorization": f"Bearer {admin}"}
        assert ask_rest(server, f"{path}unload", b"{}", headers=who)[0] == 200 and "one" not in fleet
        assert ask_rest(server, f"{path}unload", b"{}", headers=who)[0] == 404
        assert ask_rest(server, f"{path}load", b'{"parameters": {"config": "x"}}', headers=who)[0] == 400
        assert ask_rest(server, f"{path}load", b"", headers={"Authorization": f"Bearer {edge}"})[0] == 403
        assert ask_rest(server, f"{path}load", b"", headers=who, method="POST")[0] == 200 and "one" in fleet


def test_two_of_one_name(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(entry("one"))
    from cloud_server.config import read_config

    config = read_config(file)
    with pytest.raises(SpecError, match='two are called "one"'):
        Fleet(ThisProcess(config), [*config.models, *config.models])


def test_later_loads_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(entry("one"))
    with fleet_of(file) as (fleet, server), counted(server.core, {}) as registry:
        file.write_text(entry("one") + entry("later"))
        fleet.reload()
        with client_of(server.port, "later") as client:
            client.infer(X, split="first")
        labels = {"model": "later", "identity": ""}
        eventually(lambda: registry.get_sample_value("isthmus_request_success_total", labels) == 1)
        assert registry.get_sample_value("isthmus_batch_size_count", {"model": "later"}) == 1
        assert registry.get_sample_value("isthmus_model_resident_bytes", {"model": "later", "device": "cpu"}) == 576
        fleet.unload("one")
        samples = [sample for metric in registry.collect() for sample in metric.samples]
        assert {one.labels["model"] for one in samples if one.name == "isthmus_model_info"} == {"later"}
