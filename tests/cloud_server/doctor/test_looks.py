"""``cloud-server doctor``: what is wrong with a configuration, before it serves."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

import torch

import cloud_server.doctor
from cloud_server import CloudServer, Core, ModelEntry, ServedModel
from cloud_server.__main__ import main
from shared_hooks.models import load_spec
from tests import certificates
from tests.cloud_server.real import Residual
from tests.ports import free_port

RESIDUAL = (f"--model=residual={Residual.__module__}:Residual", "--example=2,8", "--threads=1")


@pytest.fixture(autouse=True)
def same_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets up the log of its process, which here is everybody's."""
    monkeypatch.setattr(cloud_server.doctor, "show", lambda *given: None)


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    status = main(["doctor", "--json", *RESIDUAL, "--listen=127.0.0.1:0", *words])
    return status, json.loads(capsys.readouterr().out)["findings"]


def said(found: list[dict[str, Any]], about: str, level: str) -> str:
    return " ".join(one["says"] for one in found if (one["about"], one["level"]) == (about, level))


def test_nothing_is_wrong_with_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capsys)
    assert status == 0, found
    assert "residual" in said(found, "model", "ok") and "in the clear" in said(found, "tls", "ok")
    assert {"versions", "config", "listen", "processor", "memory", "clock"} <= {one["about"] for one in found}


def test_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *RESIDUAL, "--listen=127.0.0.1:0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 wrong, ")


def test_tls_and_identities(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = certificates.tls(tmp_path, certificates.server(days=90), mutual=True)
    identities = tmp_path / "identities.toml"
    digits = "ab" * 32
    identities.write_text(f'[[tokens]]\nidentity = "alice"\nsha256 = "{digits}"\nexpires = 2020-01-01\n')
    words = [f"--cert={made.certificate}", f"--key={made.key}", f"--client-ca={made.client_ca}"]
    status, found = doctor(capsys, *words, f"--identities={identities}")
    assert status == 0, found
    assert "90 days left" in said(found, "tls", "ok") and said(found, "client ca", "ok")
    assert "a token of alice expired" in said(found, "identities", "warning")
    assert "0 of 1 tokens hold" in said(found, "identities", "ok")


@pytest.mark.parametrize(
    ("words", "about", "says"),
    [
        (["--listen=0.0.0.0:0"], "tls", "open to other machines"),
        (["--weights=nowhere.safetensors"], "model", "nowhere.safetensors"),
        (["--listen=192.0.2.1:5"], "listen", "cannot be used"),
        (["--device=cuda:77"], "device", "cuda"),
    ],
)
def test_problems_are_named(capsys: pytest.CaptureFixture[str], words: list[str], about: str, says: str) -> None:
    status, found = doctor(capsys, *words)
    assert status == 1 and says in said(found, about, "wrong"), found


def test_an_expired_certificate_and_a_port_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = certificates.tls(tmp_path, certificates.server(days=-2))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [f"--listen=127.0.0.1:{port}", f"--cert={made.certificate}", f"--key={made.key}"]
        status, found = doctor(capsys, *words)
    assert status == 1 and "expired 2 days ago" in said(found, "tls", "wrong")
    assert "in use" in said(found, "listen", "warning")


def test_a_file_of_no_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("[models\n")
    status, found = doctor(capsys, str(file))
    assert status == 1 and str(file) in said(found, "config", "wrong")


def test_next_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = CloudServer(Core([ServedModel(ModelEntry(load_spec("digits")), torch.device("cpu"))]), "127.0.0.1:0")
    server.start()
    there, gone = f"127.0.0.1:{server.port}", f"127.0.0.1:{free_port()}"
    try:
        status, found = doctor(capsys, f"--next=gpu={there}", f"--next=gone={gone}")
        assert status == 1 and "no process listens there" in said(found, "next gone", "wrong")
        assert "SERVING" in said(found, "next gpu", "ok") and "server's own" in said(found, "next gpu", "ok")
        config = tmp_path / "server.toml"
        config.write_text(f'[next.gpu]\naddress = ["{gone}", "{there}"]\n')
        status, found = doctor(capsys, str(config))
        assert status == 0 and "no process listens there" in said(found, "next gpu", "warning")
        config.write_text(f'[next.gpu]\naddress = "{there}"\ntoken_file = "missing"\n')
        status, found = doctor(capsys, str(config))
        assert status == 1 and "missing" in said(found, "next gpu", "wrong")
    finally:
        server.stop(grace=1)
