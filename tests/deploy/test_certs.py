"""Certificates for trying: names, dates, and who may read the keys."""

from __future__ import annotations

import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509

from deploy.certs import main


def test_generated_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    assert main([str(folder)]) == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        **dict.fromkeys(("ca.pem", "server.pem", "edge-1.pem"), 0o644),
        **dict.fromkeys(("ca.key", "server.key", "edge-1.key"), 0o600),
    }
    server = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    left = server.not_valid_after_utc - datetime.now(timezone.utc)
    assert timedelta(days=89) < left < timedelta(days=91)
    ca = (folder / "ca.pem").read_bytes()
    assert main([str(folder), "--server", "cloud.example", "--server", "10.0.0.5", "--client", "edge-2"]) == 0
    assert (folder / "ca.pem").read_bytes() == ca
    names = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["cloud.example"]
    for name in ("server", "edge-1", "edge-2"):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    assert "cloud.example, 10.0.0.5; until" in capsys.readouterr().out
