"""Who is let in and who is not: a real server, the edge's own connection, and each refusal's own reason at the edge."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, ResponseReceived, StreamReset, TrailersReceived

from cloud_server import access
from cloud_server.access import CallCredentials, Caller, Register, Tls, entry, hash_of, new_token
from cloud_server.core import Core
from cloud_server.transport import CloudServer
from cloud_server.transport.active_calls import ActiveCalls
from cloud_server.transport.authentication import AuthInterceptor
from edge_client.credentials import Credentials
from edge_client.dial import _Headers
from edge_client.probing import LinkProber, fetch_profile
from edge_client.transport.connection import Connection
from edge_client.transport.options import ConnectionOptions, State
from protos.isthmus.v1 import split_pb2, split_pb2_grpc
from shared_hooks.errors import AccessRefused, Disagreement, IsthmusError, NotAuthenticated, UnknownModel
from tests import certificates
from tests.cloud_server.fakes import (
    FakeEngine,
    GrpcClient,
    acknowledge,
    cancel,
    chunk,
    header,
    hello,
    make_crossing,
    upload,
)
from tests.cloud_server.transport.test_authentication import CALLS
from tests.ports import free_port
from tests.waiting import PATIENCE, eventually

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

    def test_probes_and_profiles_say_why_too(self, tmp_path: Path) -> None:
        with serving(None, TOKENS, tmp_path) as address:
            for shown, reason in ((Credentials(), "no token came"), (Credentials(token=new_token()), "not known")):
                with LinkProber(address, credentials=shown) as prober, pytest.raises(NotAuthenticated, match=reason):
                    prober.round(0)
                with pytest.raises(NotAuthenticated, match=reason):
                    fetch_profile(address, "fake", credentials=shown)
            with LinkProber(address, credentials=Credentials(token=ALICE)) as prober:
                assert prober.round(10).nbytes == 10

    def test_revoked_caller_loses_its_stream(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with (
            serving(None, TOKENS, tmp_path) as address,
            connected(address, Credentials(token=ALICE)) as alice,
            connected(address, Credentials(token=BOB)) as bob,
        ):
            alice.open(PATIENCE)
            bob.open(PATIENCE)
            file = tmp_path / "identities.toml"
            file.write_text("tokens = 5")
            eventually(lambda: "what was read before stays" in caplog.text)
            assert alice.state is State.READY
            file.write_text(
                TOKENS.replace('\n[[tokens]]\nidentity = "bob"', '\nrevoked = true\n[[tokens]]\nidentity = "bob"')
            )
            eventually(lambda: 'this token of "alice" was revoked' in alice.last_reason)
            assert bob.state is State.READY and bob.counters.streams == 1
            with pytest.raises(NotAuthenticated, match="was revoked"):
                alice.open(PATIENCE)

    def test_rights_are_looked_at_again_after_a_look_that_failed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        refresh, failed = Register.refresh, threading.Event()

        def failing(self: Register) -> bool:
            if not failed.is_set():
                failed.set()
                raise RuntimeError("a bug")
            return refresh(self)

        monkeypatch.setattr(Register, "refresh", failing)
        with serving(None, TOKENS, tmp_path) as address, connected(address, Credentials(token=ALICE)) as alice:
            alice.open(PATIENCE)
            assert failed.wait(PATIENCE)
            (tmp_path / "identities.toml").write_text("")
            eventually(lambda: alice.state is not State.READY)
        assert "looking for changed rights failed" in caplog.text

    def test_calls_that_only_listen_are_cut(self, tmp_path: Path) -> None:
        with serving(None, TOKENS, tmp_path) as address, grpc.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), metadata=bearer(ALICE), timeout=PATIENCE
            )
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            (tmp_path / "identities.toml").write_text("")
            with pytest.raises(grpc.RpcError) as error:
                next(watch)
            assert error.value.code() is grpc.StatusCode.CANCELLED

    def test_a_server_that_comes_back_with_another_certificate(self, tmp_path: Path) -> None:
        """What held once is doubted, too, when nothing else explains it."""
        tls, port = certificates.tls(tmp_path), free_port()
        server = CloudServer(Core([FakeEngine()]), f"127.0.0.1:{port}", tls)
        server.start()
        with connected(f"127.0.0.1:{port}", Credentials(ca=certificates.ca_file(tmp_path))) as connection:
            connection.open(PATIENCE)
            server.stop(grace=0.1)
            server = CloudServer(
                Core([FakeEngine()]), f"127.0.0.1:{port}", certificates.tls(tmp_path, certificates.server(days=-1))
            )
            server.start()
            eventually(lambda: connection.state is State.UNOPENED)
            with pytest.raises(NotAuthenticated, match="has expired"):
                connection.open(PATIENCE)
            server.stop(grace=0.1)

    def test_a_caller_whose_rights_change_begins_again(self, tmp_path: Path) -> None:
        with serving(None, TOKENS, tmp_path) as address, connected(address, Credentials(token=ALICE)) as alice:
            alice.open(PATIENCE)
            (tmp_path / "identities.toml").write_text(TOKENS + "\n[identities.alice]\nmodels = []\n")
            eventually(lambda: "may do was changed" in alice.last_reason)
            with pytest.raises(UnknownModel, match="there is: $"):
                alice.open(PATIENCE)

    def test_every_hash_is_compared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compared, compare = [], hmac.compare_digest
        monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or compare(a, b))
        path = tmp_path / "identities.toml"
        path.write_text(TOKENS)
        register = Register(path)
        register.check(access.CallCredentials(hash_of(ALICE)))
        with pytest.raises(NotAuthenticated):
            register.check(access.CallCredentials(hash_of("")))
        assert compared == 2 * [hash_of(ALICE), hash_of(BOB)]

    def test_health_is_public_but_watching_is_not(self, tmp_path: Path) -> None:
        with serving(None, TOKENS, tmp_path, reflection=True) as address, grpc.insecure_channel(address) as channel:
            for name, call in CALLS.items():
                if name == "Check":
                    call(channel, ())
                    continue
                with pytest.raises(grpc.RpcError) as error:
                    call(channel, ())
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
            with pytest.raises(StopIteration):  # admitted, it reads on
                next(split_pb2_grpc.SplitStub(channel).Probe(iter([]), metadata=bearer(ALICE)))


def bearer(token: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {token}"),)


class TestStrangeHeaders:
    @pytest.fixture
    def address(self, tmp_path: Path) -> Iterator[str]:
        with serving(None, TOKENS, tmp_path) as address:
            yield address

    @pytest.mark.parametrize(
        ("metadata", "reason"),
        [
            ((("authorization", ""),), "not of the form"),
            ((("authorization", "Bearer"),), "not of the form"),
            ((("authorization", "Bearer  "),), "not of the form"),
            ((("authorization", f"Basic {ALICE}"),), "not of the form"),
            ((("authorization", ALICE),), "not of the form"),
            (bearer(ALICE) * 2, "2 authorization headers"),
            (bearer(ALICE) + bearer(BOB), "2 authorization headers"),
            (bearer("x" * 2000), "a token of 2000 characters"),
            (bearer(f"{ALICE} {BOB}"), "not known"),
            (bearer(ALICE[:-1]), "not known"),
            (bearer(ALICE.swapcase()), "not known"),
            (bearer(hash_of(ALICE).hex()), "not known"),
            ((("authorization-bin", ALICE.encode()),), "no token came"),
        ],
    )
    def test_is_refused_by_name(self, address: str, metadata: Any, reason: str) -> None:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as error:
            split_pb2_grpc.SplitStub(channel).ListModels(split_pb2.ListModelsRequest(), metadata=metadata)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED and reason in error.value.details()

    def test_the_scheme_may_be_written_in_any_case(self, address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            models = split_pb2_grpc.SplitStub(channel).ListModels(
                split_pb2.ListModelsRequest(), metadata=(("authorization", f"bEARER {ALICE}"),)
            )
        assert len(models.models) == 1

    def test_a_megabyte(self, address: str) -> None:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            split_pb2_grpc.SplitStub(channel).ListModels(
                split_pb2.ListModelsRequest(), metadata=(*bearer(ALICE), ("more", "x" * (1 << 20)))
            )
        welcomed(address, token=ALICE)

    def test_bytes_that_are_no_text(self, address: str) -> None:
        """Refused by gRPC or by the door, and the next one is served."""
        for value in (b"Bearer \xff\xfe\x80", "Bearer t\u00f6ken".encode(), b"Bearer \x00", b"\xff" * 64):
            assert raw_status(address, value) != b"0"
        assert raw_status(address, f"Bearer {ALICE}".encode()) == b"0"
        welcomed(address, token=ALICE)


def raw_status(address: str, value: bytes) -> bytes | None:
    """gRPC's status of a call whose header holds what no gRPC client sends; None where the connection just ends."""
    host, _, port = address.rpartition(":")
    config = H2Configuration(header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False)
    connection = H2Connection(config)
    connection.initiate_connection()
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/isthmus.v1.Split/ListModels"),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        (b"authorization", value),
    ]
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as sock:
        try:
            connection.send_headers(1, headers)
            connection.send_data(1, bytes(5), end_stream=True)
            sock.sendall(connection.data_to_send())
            while data := sock.recv(65536):
                for event in connection.receive_data(data):
                    if isinstance(event, (ResponseReceived, TrailersReceived)):
                        found = dict(event.headers).get(b"grpc-status")
                        if found is not None:
                            return bytes(found)
                    if isinstance(event, (StreamReset, ConnectionTerminated)):
                        return b"reset"
                sock.sendall(connection.data_to_send())
        except OSError:
            pass
    return None


class TestPolicies:
    TEXT = (
        TOKENS
        + """
[identities.alice]
models = ["fake"]
cuts = ["layer"]
observers = ["activation"]
profile = false
probe = false
"""
    )

    @pytest.fixture
    def address(self, tmp_path: Path) -> Iterator[str]:
        path = tmp_path / "identities.toml"
        path.write_text(self.TEXT)
        core = Core(
            [FakeEngine(), FakeEngine(model_id="secret")], observers=["activation", "debug", "activation:Other"]
        )
        server = CloudServer(core, "127.0.0.1:0", None, path)
        server.start()
        yield f"127.0.0.1:{server.port}"
        server.stop(grace=0.5)

    def test_the_welcome_tells_which_cuts(self, address: str) -> None:
        for token, names in ((ALICE, ["layer"]), (BOB, None)):
            with connected(address, Credentials(token=token)) as connection:
                welcome = connection.open(PATIENCE)
                assert (list(welcome.cuts.names) if welcome.HasField("cuts") else None) == names

    def test_models(self, address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            stub = split_pb2_grpc.SplitStub(channel)
            for token, names in ((ALICE, ["fake"]), (BOB, ["fake", "secret"])):
                models = stub.ListModels(split_pb2.ListModelsRequest(), metadata=bearer(token)).models
                assert [model.model_id for model in models] == names
        said = []
        for model_id in ("secret", "nothing"):
            connection = Connection(
                address, hello(model_id=model_id), ConnectionOptions(credentials=Credentials(token=ALICE))
            )
            with pytest.raises(UnknownModel) as error:
                connection.open(PATIENCE)
            said.append(str(error.value).replace(model_id, "X"))
            connection.close()
        assert said[0] == said[1] and "there is: fake" in said[0]

    def test_profiles_and_probes(self, address: str) -> None:
        shown = Credentials(token=ALICE)
        with LinkProber(address, credentials=shown) as prober, pytest.raises(AccessRefused, match="may not probe"):
            prober.round(0)
        with pytest.raises(AccessRefused, match="may not ask for profiles"):
            fetch_profile(address, "fake", credentials=shown)
        with pytest.raises(UnknownModel):
            fetch_profile(address, "nothing", credentials=Credentials(token=BOB))

    def test_cuts_and_observers(self, address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            alice = as_identity(channel, ALICE)
            other, mine = make_crossing(3, "secret layer"), make_crossing(3)
            alice.send(hello(), upload(other), upload(mine))
            alice.send(header(1, other), chunk(1, 0, b"abc"))
            failed = alice.answer(1).failed
            assert failed is not None and failed.error == "AccessRefused" and not failed.retry
            assert failed.message == 'identity "alice" may not use the cut "secret layer"; it may use: layer'
            for number, hook in ((2, "debug"), (3, "activation:Other")):  # a class is no version of an observer
                alice.send(header(number, mine, hooks=[hook]), chunk(number, 0, b"abc"))
                failed = alice.answer(number).failed
                assert failed is not None and failed.error == "ObserverRefused"
                assert "allowed: activation. " in failed.message
            alice.send(header(4, mine), chunk(4, 0, b"abc"))
            assert bytes(alice.answer(4).data) == b"cba"

    def test_requests_of_others_cannot_be_fetched_or_cancelled(self, tmp_path: Path) -> None:
        running, go_on = threading.Event(), threading.Event()

        def before(payload: memoryview) -> None:
            running.set()
            assert go_on.wait(PATIENCE)

        path = tmp_path / "identities.toml"
        path.write_text(TOKENS)
        server = CloudServer(Core([FakeEngine(before)]), "127.0.0.1:0", None, path)
        server.start()
        options = [("grpc.use_local_subchannel_pool", 1)]
        with (
            grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as first,
            grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as second,
        ):
            alice, bob = as_identity(first, ALICE), as_identity(second, BOB)
            alice.send(hello("same"))
            bob.send(hello("same"))
            alice.ask(1, b"alice's")
            assert running.wait(PATIENCE)
            bob.send(cancel(1), acknowledge(1))
            bob.ask(1, b"bob's own")
            go_on.set()
            assert bytes(alice.answer(1).data) == b"s'ecila" and bytes(bob.answer(1).data) == b"nwo s'bob"
        server.stop(grace=0.5)


def as_identity(channel: grpc.Channel, token: str) -> GrpcClient:
    return GrpcClient(grpc.intercept_channel(channel, _Headers([("authorization", f"Bearer {token}")])))


def test_ended_call_has_no_rights(tmp_path: Path) -> None:
    """Between the door and the work a call may end: then it has no rights, not those of a server that asks nobody."""
    path = tmp_path / "identities.toml"
    path.write_text(TOKENS)
    with Core([FakeEngine()]) as core:
        auth = AuthInterceptor(core, Register(path))
        with pytest.raises(NotAuthenticated):
            auth.caller(Left())  # type: ignore[arg-type]
        assert AuthInterceptor(core).caller(Left()).identity == ""  # type: ignore[arg-type]


class Left:
    """The context of a call that is over."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"


class TestCertificatesAsIdentities:
    TEXT = TOKENS + "\n[identities.edge-1]\nmodels = []\n[identities.edge-2]\ndisabled = true\n"

    @pytest.mark.parametrize(
        ("name", "token", "kind", "reason"),
        [
            ("edge-1", None, UnknownModel, "no model"),
            ("edge-2", None, AccessRefused, 'identity "edge-2" is disabled'),
            ("edge-2", ALICE, AccessRefused, 'identity "edge-2" is disabled'),
            ("edge-3", None, NotAuthenticated, 'the certificate of "edge-3" is of no identity here, and no token came'),
            ("alice", None, NotAuthenticated, "has one to show beside its certificate"),
            ("edge-1", ALICE, NotAuthenticated, 'of several identities: "alice", "edge-1"'),
            ("alice", new_token(), NotAuthenticated, "not known"),
        ],
        ids=["model", "disabled", "disabled, with a token", "nobody", "without its token", "two", "unknown token"],
    )  # tokens are new in every process, and so no names for tests
    def test_refused(self, tmp_path: Path, name: str, token: str | None, kind: type, reason: str) -> None:
        certificate, key = certificates.client(name).write(tmp_path, "edge")
        with serving(certificates.tls(tmp_path, mutual=True), self.TEXT, tmp_path) as address:
            ca = certificates.ca_file(tmp_path)
            error = refused(address, ca=ca, certificate=certificate, key=key, token=token)
        assert type(error) is kind and reason in str(error)

    @pytest.mark.parametrize("name", ["alice", "edge-3"])
    def test_a_token_beside_a_certificate(self, tmp_path: Path, name: str) -> None:
        certificate, key = certificates.client(name).write(tmp_path, "edge")
        with serving(certificates.tls(tmp_path, mutual=True), self.TEXT, tmp_path) as address:
            welcomed(address, ca=certificates.ca_file(tmp_path), certificate=certificate, key=key, token=ALICE)


def test_callers_that_are_revoked_leave_at_once_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rules:
        known = True

        def caller(self, peer: str, shown: object) -> Caller:
            if not self.known:
                raise NotAuthenticated("revoked")
            return Caller(peer)

    def failing(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    rules, ended, reasons = Rules(), threading.Event(), list[str]()
    calls = ActiveCalls(rules)  # type: ignore[arg-type]
    calls.enter("a call", "peer", CallCredentials(), ended.set)
    calls.when_sent_away("a call", lambda error: reasons.append(str(error)))
    rules.known = False
    monkeypatch.setattr(threading.Thread, "start", failing)
    calls.look_again()
    assert ended.is_set() and reasons == ["revoked"]
