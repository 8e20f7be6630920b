"""Who is let in and who is not: a real server, the edge's own connection, and each refusal's own reason at the edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cloud_server.access import Tls
from cloud_server.access.token_command import entry
from cloud_server.access.tokens import hash_of, new_token
from cloud_server.core import Core
from cloud_server.transport import CloudServer
from edge_client.credentials import Credentials
from edge_client.transport.connection import Connection
from edge_client.transport.options import ConnectionOptions
from shared_hooks.errors import AccessRefused, Disagreement, IsthmusError, NotAuthenticated
from tests import certificates
from tests.cloud_server.fakes import FakeEngine, hello
from tests.waiting import PATIENCE

ALICE, BOB = new_token(), new_token()
TOKENS = entry("alice", hash_of(ALICE), None) + entry("bob", hash_of(BOB), None)


@contextmanager
def serving(
    tls: Tls | None = None, identities: str | None = None, folder: Path | None = None, **options: Any
) -> Iterator[str]:
    path = None
    if identities is not None:
        assert folder is not None
        path = folder / "identities.toml"
        path.write_text(identities)
    server = CloudServer(Core([FakeEngine()]), "127.0.0.1:0", tls, path, **options)
    server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.stop(grace=0.5)


@contextmanager
def connected(address: str, credentials: Credentials) -> Iterator[Connection]:
    connection = Connection(address, hello(), ConnectionOptions(patience=PATIENCE, credentials=credentials))
    try:
        yield connection
    finally:
        connection.close()


def refused(address: str, **shown: Any) -> IsthmusError:
    """What the edge's client says; it must not wait for its patience to end."""
    with connected(address, Credentials(**shown)) as connection, pytest.raises(IsthmusError) as error:
        connection.open(PATIENCE)
    assert connection.counters.attempts == 1
    return error.value


def welcomed(address: str, **shown: Any) -> None:
    with connected(address, Credentials(**shown)) as connection:
        assert connection.open(PATIENCE).protocol_version


class TestTls:
    def test_both_sides_prove_who_they_are(self, tmp_path: Path) -> None:
        certificate, key = certificates.client("edge-1").write(tmp_path, "edge")
        with serving(certificates.tls(tmp_path, mutual=True)) as address:
            ca = certificates.ca_file(tmp_path)
            welcomed(address, ca=ca, certificate=certificate, key=key)
            error = refused(address, ca=ca)
        assert isinstance(error, NotAuthenticated) and "wants a certificate of this side" in str(error)

    @pytest.mark.parametrize(
        ("pair", "reason"),
        [
            (lambda: certificates.client("edge-1", ca="another"), "does not know the authority"),
            (lambda: certificates.client("edge-1", days=-1), "this side's certificate has expired"),
        ],
        ids=["wrong CA", "expired"],
    )
    def test_a_clients_certificate_that_does_not_hold(
        self, tmp_path: Path, pair: Callable[[], certificates.Pair], reason: str
    ) -> None:
        certificate, key = pair().write(tmp_path, "edge")
        with serving(certificates.tls(tmp_path, mutual=True)) as address:
            error = refused(address, ca=certificates.ca_file(tmp_path), certificate=certificate, key=key)
        assert isinstance(error, NotAuthenticated) and reason in str(error)

    @pytest.mark.parametrize(
        ("pair", "ca", "reason"),
        [
            (lambda: certificates.server(), "another", "signed by an authority that this side does not know"),
            (lambda: certificates.server(days=-1), "for tests", "its certificate has expired"),
            (lambda: certificates.server("cloud.example"), "for tests", "not valid for '127.0.0.1'"),
        ],
        ids=["wrong CA", "expired", "wrong name"],
    )
    def test_a_servers_certificate_that_does_not_hold(
        self, tmp_path: Path, pair: Callable[[], certificates.Pair], ca: str, reason: str
    ) -> None:
        with serving(certificates.tls(tmp_path, pair())) as address:
            error = refused(address, ca=certificates.ca_file(tmp_path, ca))
        assert isinstance(error, NotAuthenticated) and reason in str(error)

    def test_by_another_name(self, tmp_path: Path) -> None:
        with serving(certificates.tls(tmp_path, certificates.server("cloud.example"))) as address:
            welcomed(address, ca=certificates.ca_file(tmp_path), server_name="cloud.example")

    def test_only_one_side_speaks_it(self, tmp_path: Path) -> None:
        with serving(certificates.tls(tmp_path)) as address:
            error = refused(address)
            assert isinstance(error, Disagreement) and "speaks TLS" in str(error)
        with serving(certificates.tls(tmp_path, mutual=True)) as address:
            assert "speaks TLS" in str(refused(address))
        with serving() as address:
            error = refused(address, ca=certificates.ca_file(tmp_path))
            assert isinstance(error, Disagreement) and "does not speak TLS" in str(error)

    def test_new_certificates_while_it_runs(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        ca = certificates.ca_file(tmp_path)
        with serving(certificates.tls(tmp_path, certificates.server(days=-1))) as address:
            assert "expired" in str(refused(address, ca=ca))
            (tmp_path / "server.pem").write_text("nothing")
            assert "expired" in str(refused(address, ca=ca))
            assert "what was read before stays" in caplog.text
            certificates.server().write(tmp_path, "server")
            welcomed(address, ca=ca)


class TestTokens:
    def test_each_refusal_has_its_reason(self, tmp_path: Path) -> None:
        revoked, expired, disabled = new_token(), new_token(), new_token()
        text = (
            TOKENS
            + entry("carol", hash_of(revoked), None)
            + "\nrevoked = true"
            + entry("carol", hash_of(expired), None)
            + "\nexpires = 2020-01-01"
            + entry("dave", hash_of(disabled), None)
            + "\n[identities.dave]\ndisabled = true\n"
        )
        with serving(None, text, tmp_path) as address:
            welcomed(address, token=ALICE)
            for token, kind, reason in (
                (None, NotAuthenticated, "no token came"),
                (new_token(), NotAuthenticated, "the token is not known here"),
                (revoked, NotAuthenticated, 'this token of "carol" was revoked'),
                (expired, NotAuthenticated, 'this token of "carol" expired at 2020-01-01'),
                (disabled, AccessRefused, 'identity "dave" is disabled'),
            ):
                error = refused(address, token=token)
                assert type(error) is kind and reason in str(error)
