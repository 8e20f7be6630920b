"""Versions of a model, "NAME:VERSION": clients of each, a rolling change under load, the Open Inference Protocol."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from cloud_server.models import newest_first
from edge_client import EdgeClient
from shared_hooks.errors import Disagreement, SpecError, UnknownModel
from shared_hooks.models import load_spec
from tests.cloud_server.fleet.served import Small, edge_of, entry, fleet_of, write_weights
from tests.cloud_server.inference.rest import ask, body, tensor
from tests.cloud_server.inference.served import crossing
from tests.waiting import eventually

X = torch.arange(16.0).reshape(2, 8)


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Path]:
    files = {version: tmp_path / f"v{version}.safetensors" for version in ("1", "2")}
    for version, file in files.items():
        write_weights(file, int(version))
    return files


def client_of(port: int, name: str, weights: Path) -> EdgeClient:
    return EdgeClient(f"127.0.0.1:{port}", load_spec(f"{name}={Small.__module__}:Small", weights=weights), "first")


def test_the_newest_comes_first() -> None:
    assert newest_first(["net:9", "net", "net:10", "other:1", "net:1.2"], "net") == [
        "net:10",
        "net:9",
        "net:1.2",
        "net",
    ]
    with pytest.raises(SpecError, match="VERSION"):
        load_spec("net:1:2=digits")


def test_a_client_gets_the_version_that_it_has(tmp_path: Path, weights: dict[str, Path]) -> None:
    """By its weights where it names the model alone; a version that it names is that one and no other."""
    file = tmp_path / "server.toml"
    file.write_text(entry("net:1", weights["1"]) + entry("net:2", weights["2"]))
    with fleet_of(file) as (_, server):
        for version in "12":
            with edge_of("net", weights[version]) as edge:
                for name in ("net", f"net:{version}"):
                    with client_of(server.port, name, weights[version]) as client:
                        assert torch.equal(client.infer(X).output, edge.forward(X))
        with (
            pytest.raises(Disagreement, match='"net:1": .*weights'),
            client_of(server.port, "net:1", weights["2"]) as it,
        ):
            it.infer(X)
        with pytest.raises(UnknownModel, match="net:1, net:2"), client_of(server.port, "net:3", weights["2"]) as c:
            c.infer(X)


def test_a_rolling_change_under_load(tmp_path: Path, weights: dict[str, Path]) -> None:
    """The second version comes beside the first; clients of both are served until the first one goes."""
    file = tmp_path / "server.toml"
    file.write_text(entry("net:1", weights["1"]))
    wrong: list[object] = []
    counts = {"1": 0, "2": 0}
    ended = {version: threading.Event() for version in "12"}

    def load(port: int, version: str) -> None:
        with edge_of("net", weights[version]) as edge, client_of(port, "net", weights[version]) as client:
            wanted = edge.forward(X)
            while not ended[version].is_set():
                try:
                    if not torch.equal(client.infer(X).output, wanted):
                        wrong.append(version)
                    counts[version] += 1
                except Exception as error:
                    wrong.append(error)

    with fleet_of(file) as (fleet, server):
        threads = [threading.Thread(target=load, args=(server.port, version)) for version in "12"]
        threads[0].start()
        eventually(lambda: counts["1"] > 5)
        file.write_text(entry("net:1", weights["1"]) + entry("net:2", weights["2"]))
        assert str(fleet.reload()) == "loaded: net:2; as they were: net:1"
        threads[1].start()
        eventually(lambda: counts["2"] > 5)
        before = counts["1"]
        eventually(lambda: counts["1"] > before + 5)
        ended["1"].set()
        threads[0].join()
        file.write_text(entry("net:2", weights["2"]))
        assert str(fleet.reload()) == "unloaded: net:1; as they were: net:2"
        before = counts["2"]
        eventually(lambda: counts["2"] > before + 5)
        ended["2"].set()
        threads[1].join()
        with pytest.raises(Disagreement, match="weights"), client_of(server.port, "net", weights["1"]) as late:
            late.infer(X)
    assert not wrong


def test_versions_by_the_open_inference_protocol(tmp_path: Path, weights: dict[str, Path]) -> None:
    file = tmp_path / "server.toml"
    tails = 'tails = ["first"]'
    file.write_text(entry("net:1", weights["1"], more=tails) + entry("net:2", weights["2"], more=tails))
    with fleet_of(file) as (fleet, server), edge_of("net", weights["1"]) as one, edge_of("net", weights["2"]) as two:
        status, index, _ = ask(server, "/v2/repository/index", method="GET")
        assert [(each["name"], each["version"]) for each in index if "@" not in each["name"]] == [
            ("net", "1"),
            ("net", "2"),
        ]
        status, metadata, _ = ask(server, "/v2/models/net")
        assert metadata["name"] == "net" and metadata["versions"] == ["2", "1"]
        for path, version, edge in (("", "2", two), ("/versions/1", "1", one), ("/versions/2", "2", two)):
            status, answer, _ = ask(server, f"/v2/models/net{path}/infer", body(tensor(X)))
            assert status == 200 and answer["model_version"] == version
            assert torch.equal(torch.tensor(answer["outputs"][0]["data"]).reshape(2, 8), edge.forward(X))
        status, stats, _ = ask(server, "/v2/models/net/stats")
        assert [(each["version"], each["inference_count"]) for each in stats["model_stats"]] == [("2", 2), ("1", 1)]
        status, stats, _ = ask(server, "/v2/models/net/versions/1/stats")
        assert [each["inference_count"] for each in stats["model_stats"]] == [1]
        status, answer, _ = ask(server, "/v2/models/net/versions/7/infer", body(tensor(X)))
        assert status == 404 and 'no version "7"; there is: 2, 1' in answer["error"]
        given = [{**tensor(value), "name": name} for name, value in crossing(one.model, "first", X).items()]
        parameters = {"isthmus_weights": one.weights_hash()}
        status, answer, _ = ask(server, "/v2/models/net@first/infer", body(*given, parameters=parameters))
        assert status == 200 and answer["model_version"] == "1", answer
        assert torch.equal(torch.tensor(answer["outputs"][0]["data"]).reshape(2, 8), one.forward(X))
        status, answer, _ = ask(server, "/v2/models/net@first/versions/2/infer", body(*given, parameters=parameters))
        assert status >= 400 and "weights" in answer["error"]
        fleet.unload("net")
        assert not fleet
