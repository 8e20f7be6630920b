"""What the files for Compose, Kubernetes and systemd promise each other. Tools check their form: make manifests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloud_server.cli import GRACE_SECONDS
from cloud_server.limits import Limits
from deploy import manifests_check
from deploy.manifests_check import NotContent, edges_reach

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text(encoding="utf-8"))


def kubernetes(name: str) -> Any:
    return yaml.safe_load((DEPLOY / "kubernetes" / "base" / f"{name}.yaml").read_text(encoding="utf-8"))


def test_stopping_waits_for_the_drain() -> None:
    least = Limits().drain_seconds + GRACE_SECONDS
    pod = kubernetes("deployment")["spec"]["template"]["spec"]
    args = pod["containers"][0]["args"]
    assert float(args[args.index("--drain-seconds") + 1]) == Limits().drain_seconds
    assert least < pod["terminationGracePeriodSeconds"] <= least + 15
    unit = (DEPLOY / "cloud-server.service").read_text(encoding="utf-8")
    assert least < int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)[0])
    for service in ("cloud", "cloud-demo"):
        assert least < int(COMPOSE["services"][service]["stop_grace_period"].removesuffix("s"))


def test_containers_are_ordinary_users_on_read_only_file_systems() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only") or name == "grafana"
        assert service.get("cap_add") == (["NET_ADMIN"] if name.startswith("link-") else None)
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for side in ("cloud", "edge"):
        assert "\nUSER 10001\n" in (DEPLOY / f"Dockerfile.{side}").read_text(encoding="utf-8")
    pod = kubernetes("deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_compose_of_before_version_2_takes_the_file() -> None:
    assert not {"name", "version"} & COMPOSE.keys()


def test_base_images_are_build_arguments() -> None:
    for side in ("cloud", "edge"):
        arguments = re.findall(r"^ARG (\w+)", (DEPLOY / f"Dockerfile.{side}").read_text(encoding="utf-8"), re.M)
        assert COMPOSE["services"][side]["build"]["args"].keys() == set(arguments) - {"EXTRAS"}


def test_selectors_match_the_servers_only() -> None:
    """kustomize puts them into the Deployment's and the Service's; where they are written out, they are the same."""
    (made,) = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "kustomization.yaml").read_text())["labels"]
    assert made["includeSelectors"]
    pod = kubernetes("deployment")["spec"]["template"]["spec"]
    spread = pod["topologySpreadConstraints"][0]["labelSelector"]
    budget, network = kubernetes("disruption")["spec"]["selector"], kubernetes("network")["spec"]["podSelector"]
    assert spread == budget == network == {"matchLabels": made["pairs"]}


POLICY = """
kind: Service
---
kind: NetworkPolicy
spec: {ingress: [{from: [{podSelector: {SELECTOR}}], ports: [{port: grpc}]}, {ports: [{port: metrics}]}]}
"""


def test_edges_are_let_in_as_what_they_are() -> None:
    (edges,) = kubernetes("network")["spec"]["ingress"][0]["from"]
    assert edges == {
        "podSelector": {"matchExpressions": [{"key": "isthmus-edge", "operator": "In", "values": ["true"]}]}
    }
    edges_reach(POLICY.replace("SELECTOR", json.dumps(edges["podSelector"])[1:-1]))
    with pytest.raises(NotContent, match="no edge reaches the server"):  # what kustomize makes of matchLabels
        labels = 'matchLabels: {app.kubernetes.io/component: cloud, isthmus-edge: "true"}'
        edges_reach(POLICY.replace("SELECTOR", labels))


def test_a_choice_of_components_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubernetes").mkdir()
    (tmp_path / "kubernetes" / "kustomization.yaml").write_text("components: [gpu]\n")
    monkeypatch.setattr(manifests_check, "DEPLOY", tmp_path)
    (tmp_path / "made").mkdir()
    with pytest.raises(NotContent, match="no line `components: "):
        manifests_check._built(["tls"], tmp_path / "made")


def test_grafana_finds_the_dashboards_and_prometheus_where_compose_puts_them() -> None:
    grafana = DEPLOY / "grafana"
    (provider,) = yaml.safe_load((grafana / "provisioning" / "dashboards" / "isthmus.yml").read_text())["providers"]
    (source,) = yaml.safe_load((grafana / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    places = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    assert places["./grafana/dashboards"] == provider["options"]["path"]
    assert places["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSE["services"]
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert set(found["names"]) <= COMPOSE["services"].keys()
    for name in found["names"]:
        assert f"0.0.0.0:{found['port']}" in COMPOSE["services"][name]["command"]
