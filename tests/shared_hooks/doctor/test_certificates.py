"""Certificates in files: what is wrong with each is found, and named."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from shared_hooks.doctor import CheckLevel, Finding, authorities, pair
from tests import certificates


def wrongs(found: Iterator[Finding]) -> list[str]:
    return [one.line for one in found if one.level is not CheckLevel.OK]


def files(folder: Path, made: certificates.Pair) -> tuple[Path, Path]:
    return made.write(folder, "server")


def test_a_sound_pair_says_whose_it_is_and_for_how_long(tmp_path: Path) -> None:
    (found,) = pair("tls", *files(tmp_path, certificates.server("cloud.example", days=90)), server=True)
    assert found.level is CheckLevel.OK and "cloud.example, 90 days left" in found.says


@pytest.mark.parametrize(
    ("made", "server", "says"),
    [
        (certificates.server(days=-3), True, "expired 3 days ago"),
        (certificates.server(days=0.5), True, "expires in 1"),
        (certificates.client("edge-1", days=90), True, "not for servers"),
        (certificates.server(days=90), False, "not for clients"),
    ],
)
def test_dates_and_purpose(tmp_path: Path, made: certificates.Pair, server: bool, says: str) -> None:
    (line,) = wrongs(pair("tls", *files(tmp_path, made), server=server))
    assert says in line


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    certificate, _ = files(tmp_path, certificates.server(days=90))
    _, other = certificates.client("edge-1").write(tmp_path, "other")
    (line,) = wrongs(pair("tls", certificate, other, server=True))
    assert "do not belong together" in line


def test_a_chain_in_the_wrong_order(tmp_path: Path) -> None:
    certificate, key = files(tmp_path, certificates.server(days=90))
    certificate.write_bytes(certificate.read_bytes() + certificates.client("edge-1", days=90).certificate)
    assert any("chain is broken" in line for line in wrongs(pair("tls", certificate, key, server=True)))
    good = certificates.server(days=90).certificate + certificates.ca_file(tmp_path).read_bytes()
    certificate.write_bytes(good)
    assert not wrongs(pair("tls", certificate, key, server=True))


def test_a_key_that_everybody_reads(tmp_path: Path) -> None:
    certificate, key = files(tmp_path, certificates.server(days=90))
    key.chmod(stat.S_IRUSR | stat.S_IROTH)
    (line,) = wrongs(pair("tls", certificate, key, server=True))
    assert f"chmod 600 {key}" in line


@pytest.mark.parametrize(("which", "says"), [("certificate", "no PEM certificate"), ("key", "no PEM private key")])
@pytest.mark.parametrize("holds", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_files_that_hold_something_else(tmp_path: Path, which: str, says: str, holds: bytes) -> None:
    certificate, key = files(tmp_path, certificates.server(days=90))
    (certificate if which == "certificate" else key).write_bytes(holds)
    (line,) = wrongs(pair("tls", certificate, key, server=True))
    assert says in line


def test_files_that_are_not_there(tmp_path: Path) -> None:
    certificate, key = files(tmp_path, certificates.server(days=90))
    certificate.unlink()
    (line,) = wrongs(pair("tls", certificate, key, server=True))
    assert "No such file" in line
    (line,) = wrongs(authorities("ca", certificate))
    assert "No such file" in line


def test_authorities(tmp_path: Path) -> None:
    certificate, _ = files(tmp_path, certificates.server(days=90))
    own, other = certificates.ca_file(tmp_path), certificates.ca_file(tmp_path, "another")
    assert not wrongs(authorities("ca", own, certificate))
    (line,) = wrongs(authorities("ca", other, certificate))
    assert "is not signed by" in line
