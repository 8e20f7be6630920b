"""What cannot be had behind Ray Serve, or is not a number of replicas, is refused by name before anything starts."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cloud_server import cli
from cloud_server.access import entry
from cloud_server.cluster import front, passport, replica
from cloud_server.config import ModelEntry, Scale, ServerConfig, read_config
from cloud_server.limits import GIB, Limits
from shared_hooks.errors import SpecError
from shared_hooks.models import load_spec
from tests.ports import free_port

DIGITS = ModelEntry(load_spec("digits"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"worker_processes": True}, "worker_processes"),
        ({"reuse_port": True}, "reuse_port"),
        ({"rest": "127.0.0.1:8000"}, "rest: fronts"),
        ({"limits": Limits(max_worker_bytes=GIB)}, "limits.max_worker_bytes"),
        ({"limits": Limits(max_worker_requests=9)}, "limits.max_worker_requests"),
        ({"device": "cuda:0"}, "gpus = 1"),
        ({"listen": "127.0.0.1:0", "scale": Scale(fronts=2)}, "port 0"),
        ({"metrics": "127.0.0.1:0", "scale": Scale(fronts=2)}, "metrics: port 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unavailable_resources_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match="--on ray") as error:
        passport.check(ServerConfig(**options))
    assert named in str(error.value)


def test_all_unavailable_resources_are_reported_at_once() -> None:
    with pytest.raises(SpecError, match=r"worker_processes.*reuse_port"):
        passport.check(ServerConfig(worker_processes=True, reuse_port=True))


def test_quotas_are_counted_by_one_models_replicas_only(tmp_path: Path) -> None:
    file = tmp_path / "identities.toml"
    file.write_text(entry("edge-1", bytes(32), None) + "\n[identities.edge-1]\nrequests_per_minute = 60\n")
    passport.check(ServerConfig(identities=file, models=(DIGITS,)))
    with pytest.raises(SpecError, match=r"edge-1 has requests_per_minute, and 2 models"):
        passport.check(ServerConfig(identities=file, models=(DIGITS, DIGITS)))
    file.write_text(entry("edge-1", bytes(32), None) + '\n[identities.edge-1]\nmodels = ["digits"]\nweight = 2\n')
    passport.check(ServerConfig(identities=file, models=(DIGITS, DIGITS)))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("replicas = 0", "ray.min_replicas"),
        ("min_replicas = 3\nmax_replicas = 2", "ray.max_replicas"),
        ("replicas = 2\nmax_replicas = 4", "give either"),
        ('replicas = "two"', "ray.replicas"),
        ("target_pending = 0", "ray.target_pending"),
        ("target_pending = nan", "ray.target_pending"),
        ("gpus = -1", "ray.gpus"),
        ("fronts = 0", "ray.fronts"),
        ("replica = 2", "replica"),
    ],
)
def test_a_table_that_cannot_work_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f"[ray]\n{text}\n")
    with pytest.raises(SpecError, match="server.toml") as error:
        read_config(file)
    assert named in str(error.value)


def test_the_table_and_several_versions_of_a_model_are_read(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[ray]\nmin_replicas = 1\nmax_replicas = 4\n[models]\ndigits = ["digits", "digits"]\n')
    config = read_config(file)
    assert config.scale == Scale(1, 4) and config.scale.varies
    assert [entry.spec.model_id for entry in config.models] == ["digits", "digits"]
    file.write_text("[ray]\nreplicas = 3\n")
    assert read_config(file).scale == Scale(3, 3)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--replicas", "2"], "--replicas: only with --on ray"),
        (["--on", "ray", "--replicas", "0"], "at least 1"),
        (["--on", "ray", "--replicas", "4-2"], "at least min_replicas"),
        (["--on", "ray", "--replicas", "many"], "MIN-MAX"),
        (["--on", "ray", "--model", "/nowhere.toml"], "nowhere.toml"),
        (["--on", "ray", "--listen", "0.0.0.0:1"], "open to other machines"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_line_that_cannot_work_says_why(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == cli.USAGE
    said = capsys.readouterr().err
    assert named in said and len(said.splitlines()) == 1


def test_without_ray_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["--on", "ray", "--listen", "127.0.0.1:0"]) == cli.USAGE
    assert capsys.readouterr().err == 'cloud-server: --on ray needs Ray Serve: pip install "isthmus[ray]"\n'


def test_a_cluster_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # restored
    monkeypatch.setenv("RAY_SERVE_LOG_TO_STDERR", "0")
    assert cli.main(["--on", "ray", "--listen", "127.0.0.1:0"]) == cli.USAGE
    assert "no cluster is there" in capsys.readouterr().err


class Context:
    """What Ray Serve tells a policy."""

    def __init__(self, pending: dict[str, float], target: int = 1) -> None:
        self.aggregated_metrics = {replica.PENDING: pending} if pending else {}
        self.target_num_replicas = target
        self.config = type("Config", (), {"target_ongoing_requests": 2.0})


@pytest.mark.parametrize(
    ("pending", "wanted"), [({"a": 0.0}, 1), ({"a": 2.0}, 1), ({"a": 7.0, "b": 0.0}, 4), ({}, 3)], ids=str
)
def test_as_many_replicas_as_the_work_wants(pending: dict[str, float], wanted: int) -> None:
    assert replica.by_pending(Context(pending, target=3))[0] == wanted


class TestRaysPort:
    """Ray Serve's replicas would run what strangers send to it (`ray_port`)."""

    def _ray(self, monkeypatch: pytest.MonkeyPatch, **names: object) -> types.ModuleType:
        monkeypatch.delenv("RAY_USE_TLS", raising=False)
        replica = types.ModuleType("ray.serve._private.replica")
        vars(replica).update(names)
        for name in ("ray", "ray.serve", "ray.serve._private"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules["ray"])["__version__"] = "9.9"
        vars(sys.modules["ray.serve._private"])["replica"] = replica
        monkeypatch.setitem(sys.modules, replica.__name__, replica)
        return replica

    def test_it_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replica: Any = self._ray(monkeypatch, add_port_to_grpc_server=lambda server, address: 1)
        front.close()
        assert replica.add_port_to_grpc_server(object(), "[::]:0") == 0

    def test_with_another_ray_nothing_is_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ray(monkeypatch)
        with pytest.raises(SpecError, match=r"Ray 9\.9: its replicas accept connections"):
            front.close()
        monkeypatch.setenv("RAY_USE_TLS", "1")  # which asks for a certificate there
        front.close()
