"""The server's certificate: files that cannot be used are named before anything else begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_server.access import Tls
from cloud_server.arguments import parser
from cloud_server.config import configure
from shared_hooks.errors import SpecError
from tests import certificates


def test_files_that_hold_what_they_should(tmp_path: Path) -> None:
    tls = certificates.tls(tmp_path, mutual=True)
    assert tls.read().chain == tls.certificate.read_bytes()


def test_files_that_do_not(tmp_path: Path) -> None:
    tls, other = certificates.tls(tmp_path), certificates.server("another").write(tmp_path, "other")
    for wrong, says in (
        (Tls(tls.certificate, other[1]), "the key is not that of the certificate"),
        (Tls(tls.certificate, tmp_path / "none"), "none: cannot be read: No such file"),
        (Tls(tls.key, tls.key), "cannot be used"),
        (Tls(tls.certificate, tls.key, tls.key), "tls.client_ca: .* cannot be used"),
    ):
        with pytest.raises(SpecError, match=says):
            wrong.read()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--listen", "0.0.0.0:0"], "is open to other machines without encryption.*and use the models.*--insecure"),
        (["--listen", "[::]:0"], "is open to other machines"),
        (["--listen", "cloud.example:0"], "is open to other machines"),
        (["--listen", "0.0.0.0:0", "--identities", "FILE"], "tokens included"),
        (["--cert", "server.pem"], "the one needs the other"),
        (["--client-ca", "ca.pem"], "the one needs the other"),
        (["--cert", "none.pem", "--key", "none.key"], "none.key: cannot be read"),
        (["--identities", "none.toml"], "none.toml: cannot be read"),
    ],
)
def test_invalid_tls_settings(tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "identities.toml").write_text("")
    words = [str(tmp_path / "identities.toml") if word == "FILE" else word for word in words]
    with pytest.raises(SpecError, match=says):
        configure(parser().parse_args(words))


def test_valid_tls_settings(tmp_path: Path) -> None:
    tls = certificates.tls(tmp_path)
    for words in (
        ["--listen", "0.0.0.0:0", "--insecure"],
        ["--listen", "127.0.0.2:0"],
        ["--listen", "[::1]:0"],
        ["--listen", "localhost:0"],
        ["--listen", "0.0.0.0:0", "--cert", f"{tls.certificate}", "--key", f"{tls.key}"],
    ):
        configure(parser().parse_args(words))
    file = tmp_path / "server.toml"
    file.write_text('listen = "0.0.0.0:0"\n[tls]\ncertificate = "server.pem"\nkey = "server.key"\n')
    assert configure(parser().parse_args([str(file)])).tls == tls
    file.write_text('listen = "0.0.0.0:0"\n')
    assert configure(parser().parse_args([str(file), "--insecure"])).insecure
