"""``edge-client doctor`` against real servers: how far one gets, what differs, and an answer that is compared."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography")

from cloud_server.access import Tls
from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.models import ServedModel
from cloud_server.transport import CloudServer
from edge_client.__main__ import main
from shared_hooks.models import load_spec
from tests import certificates
from tests.ports import free_port


def spec(folder: Path, name: str = "Residual", shape: str = "[1, 3, 16, 16]") -> str:
    """A small model, served as m, with an example."""
    file = folder / f"{name}.toml"
    factory = f"tests.edge_client.small_models:{name}"
    file.write_text(f'id = "m"\nfactory = "{factory}"\nexample.args = [{{shape = {shape}}}]\n')
    return str(file)


@contextmanager
def server(reference: str, tls: Tls | None = None, identities: Path | None = None) -> Iterator[str]:
    served = ServedModel(ModelEntry(load_spec(reference)), torch.device("cpu"))
    made = CloudServer(Core([served]), "127.0.0.1:0", tls, identities)
    made.start()
    try:
        yield f"127.0.0.1:{made.port}"
    finally:
        made.stop(grace=1)


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, list[str]]]:
    """Exit status; "about level": what it says."""
    status = main(["doctor", "--json", "-", "--threads", "1", "--device", "cpu", *words])
    said: dict[str, list[str]] = {}
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    for one in found:
        said.setdefault(f"{one['about']} {one['level']}", []).append(one["says"])
    return status, said


def test_all_is_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reference = spec(tmp_path)
    with server(reference) as address:
        status, said = doctor(capsys, address, "--model", reference)
    assert status == 0, said
    for step in ("name", "tcp", "tls", "http/2", "health", "clocks", "models", "server", "greeting"):
        assert f"{step} ok" in said, step
    assert "bit for bit" in said["request ok"][0] and "torch" in said["server ok"][0]


def test_differences_are_all_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reference = spec(tmp_path)
    with server(reference) as address:
        status, said = doctor(capsys, address, "--model", spec(tmp_path, "Branching", "[1, 4]"))
        assert status == 1
        named = said["agreement wrong"]
        assert any("class: client Branching" in text for text in named), named
        assert any(text.startswith("stem: class: client has none, server Conv2d") for text in named), named
        status, said = doctor(capsys, address, "--model", f"other={reference}")
        assert status == 1 and 'no model "other"' in said["greeting wrong"][0]


def test_tls_both_ways_and_a_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reference, ca = spec(tmp_path), str(certificates.ca_file(tmp_path))
    cert, key = certificates.client("edge-1", days=30).write(tmp_path, "edge")
    own = ["--cert", str(cert), "--key", str(key)]
    tls = certificates.tls(tmp_path, certificates.server(days=90), mutual=True)
    with server(reference, tls) as address:
        status, said = doctor(capsys, address, "--model", reference, "--ca", ca, *own)
        assert status == 0, said
        assert "90 days left" in said["tls ok"][0] and "30 days left" in said["own cert ok"][0]
        for words, says in (
            ([], "speaks TLS"),
            (
                ["--ca", str(certificates.ca_file(tmp_path, "another")), *own],
                "authority that this side does not know",
            ),
            (["--ca", ca], "wants a certificate of this side"),
            (["--ca", ca, *own, "--server-name", "elsewhere"], "does not hold"),
        ):
            status, said = doctor(capsys, address, "--model", reference, *words)
            assert status == 1 and says in said["tls wrong"][0], words
            assert "health ok" not in said  # it ends there


def test_an_expired_server_and_no_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reference, ca = spec(tmp_path), str(certificates.ca_file(tmp_path))
    with server(reference, certificates.tls(tmp_path, certificates.server(days=-1))) as address:
        status, said = doctor(capsys, address, "--model", reference, "--ca", ca)
    assert status == 1 and "expired" in said["tls wrong"][0]
    identities = tmp_path / "identities.toml"
    identities.write_text(f'[[tokens]]\nidentity = "alice"\nsha256 = "{"ab" * 32}"\n')
    with server(reference, identities=identities) as address:
        status, said = doctor(capsys, address, "--model", reference)
    assert status == 1 and "no token came" in said["models wrong"][0] and "greeting wrong" not in said


def test_dead_ports_and_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reference = spec(tmp_path)
    status, said = doctor(capsys, f"127.0.0.1:{free_port()}", "--model", reference)
    assert status == 1 and "no process listens" in said["tcp wrong"][0]
    status, said = doctor(capsys, "no-such-host.invalid:1", "--model", reference)
    assert status == 1 and "no-such-host.invalid" in said["name wrong"][0]


def test_a_port_that_speaks_something_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def answer(taken: socket.socket) -> None:
        while True:
            try:
                connection, _ = taken.accept()
            except OSError:
                return
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        threading.Thread(target=answer, args=(taken,), daemon=True).start()
        status, said = doctor(capsys, f"127.0.0.1:{taken.getsockname()[1]}", "--model", spec(tmp_path))
        taken.shutdown(socket.SHUT_RDWR)
    assert status == 1 and "does not speak it" in said["http/2 wrong"][0]
