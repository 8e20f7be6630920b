"""A real gRPC server and a client that speaks the .proto alone."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cloud_server.core import Core
from cloud_server.limits import MIB, Limits
from cloud_server.transport.server import CloudServer
from protos.isthmus.v1 import split_pb2, split_pb2_grpc
from shared_hooks.errors import SpecError
from tests.cloud_server.fakes import FakeEngine, GrpcClient, chunk, header, hello, make_crossing, upload
from tests.waiting import PATIENCE, eventually

SMALL = Limits(
    max_request_bytes=8 * MIB,
    max_message_bytes=2 * MIB,
    max_clients=4,
    max_in_flight=16,
    hello_seconds=600,
    idle_seconds=600,
)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[CloudServer]:
    server = CloudServer(Core([engine], SMALL), "127.0.0.1:0")
    server.start()
    yield server
    server.stop(grace=1)


@pytest.fixture
def channel(server: CloudServer) -> Iterator[grpc.Channel]:
    with connect(server.port) as channel:
        yield channel


def connect(port: int, *options: tuple[str, int]) -> grpc.Channel:
    # A subchannel of its own: channels of one process otherwise share a connection.
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1), *options])


def still_serves(channel: grpc.Channel) -> None:
    client = GrpcClient(channel, hello("witness"))
    client.ask(1, b"good")
    assert bytes(client.answer(1).data) == b"doog"
    client.half_close()
    client.ended()


class TestAnswers:
    @pytest.mark.parametrize("chunk_bytes", [256 << 10, 1 << 20])
    def test_megabytes_both_ways(self, channel: grpc.Channel, chunk_bytes: int) -> None:
        client = GrpcClient(channel, hello())
        data = bytes(range(256)) * 12_501
        client.ask(1, data, chunk_bytes=chunk_bytes)
        assert bytes(client.answer(1).data) == data[::-1]

    def test_many_in_flight(self, channel: grpc.Channel) -> None:
        client = GrpcClient(channel, hello())
        for id in range(1, 17):
            client.ask(id, bytes([id]) * 5000, want_metrics=True)
        for id in range(1, 17):
            assert bytes(client.answer(id).data) == bytes([id]) * 5000

    def test_half_closed_stream_ends_well(self, channel: grpc.Channel) -> None:
        client = GrpcClient(channel, hello())
        client.ask(1, b"abc")
        client.half_close()
        assert client.ended() is None and bytes(client.answer(1).data) == b"cba"

    def test_lost_connection_computed_once(self, server: CloudServer, engine: FakeEngine) -> None:
        running, go_on = threading.Event(), threading.Event()

        def hold(payload: memoryview) -> None:
            running.set()
            assert go_on.wait(PATIENCE)

        engine.before = hold
        with connect(server.port) as channel:
            client = GrpcClient(channel, hello())
            client.ask(1, b"abc")
            assert running.wait(PATIENCE)
        assert server.core.wait_gone(PATIENCE)
        with connect(server.port) as channel:
            client = GrpcClient(channel, hello())
            client.ask(1, b"abc")
            client.other("welcome")
            go_on.set()
            assert bytes(client.answer(1).data) == b"cba" and engine.computed == 1

    def test_idle_stream_outlives_pings_of_the_client(
        self, server: CloudServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server with gRPC's own settings says GOAWAY to the fourth ping without data."""
        monkeypatch.setattr("cloud_server.transport.server.options", lambda *_: [])
        strict = CloudServer(Core([engine], SMALL), "127.0.0.1:0")
        strict.start()
        options = [("grpc.keepalive_time_ms", 600), ("grpc.keepalive_permit_without_calls", 1)]
        options += [("grpc.http2.max_pings_without_data", 0)]
        with connect(server.port, *options) as channel, connect(strict.port, *options) as other:
            client, sent_away = GrpcClient(channel, hello()), GrpcClient(other, hello())
            for one in (client, sent_away):
                one.ask(1, b"abc")
                one.answer(1)
            eventually(sent_away.call.done)
            client.ask(2, b"abc")
            assert bytes(client.answer(2).data) == b"cba"
        strict.stop(grace=0)


class TestHandshake:
    def test_welcome(self, channel: grpc.Channel) -> None:
        welcome = GrpcClient(channel, hello()).other("welcome").welcome
        assert welcome.max_request_bytes == 8 * MIB and welcome.chunk_bytes == 512 << 10

    @pytest.mark.parametrize(
        ("changes", "status", "says"),
        [
            ({"weights_hash": "w2"}, "FAILED_PRECONDITION", 'weights: client "w2", server "w1"'),
            ({"protocol_version": 1}, "FAILED_PRECONDITION", "protocol version: client 1, server 3"),
            ({"model_id": "other"}, "NOT_FOUND", 'no model "other"'),
            ({"model_id": "../../etc/passwd"}, "NOT_FOUND", "there is: fake"),
            ({"model_id": "os:system"}, "NOT_FOUND", "there is: fake"),
            ({"model_id": "ungew\u00f6hnlich" * 90, "weights_hash": "\U0001f642"}, "NOT_FOUND", "ungew\u00f6hnlich"),
            ({"weights_hash": "\U0001f642" * 900}, "FAILED_PRECONDITION", "weights"),
            ({"client_id": ""}, "INVALID_ARGUMENT", "client_id"),
            ({"environment": {str(n): "x" * 999 for n in range(50)}}, "FAILED_PRECONDITION", "differ"),
            ({"environment": {str(n): "x" * 9999 for n in range(100)}}, "RESOURCE_EXHAUSTED", "hello: 10"),
        ],
    )
    def test_refused_by_name(self, channel: grpc.Channel, changes: dict[str, object], status: str, says: str) -> None:
        code, details = GrpcClient(channel, hello(**changes)).refusal()
        assert code == status and says in details
        still_serves(channel)

    def test_silence(self, engine: FakeEngine) -> None:
        server = CloudServer(Core([engine], dataclasses.replace(SMALL, hello_seconds=0.5)), "127.0.0.1:0")
        server.start()
        with connect(server.port) as channel:
            assert GrpcClient(channel).refusal()[0] == "DEADLINE_EXCEEDED"
        server.stop(grace=1)

    def test_too_many_clients(self, server: CloudServer, channel: grpc.Channel) -> None:
        clients = [GrpcClient(channel, hello(str(number))) for number in range(4)]
        for client in clients:
            client.other("welcome")
        status, details = GrpcClient(channel, hello()).refusal()
        assert status == "UNAVAILABLE" and "the server has 4 clients, its limit (max_clients)" in details
        clients[0].call.cancel()
        clients[0].ended()
        eventually(lambda: len(server.core._sessions) == 3)
        still_serves(channel)


class TestHostileBytes:
    @pytest.fixture(autouse=True)
    def continues(self, channel: grpc.Channel) -> Iterator[None]:
        yield
        still_serves(channel)

    @pytest.mark.parametrize(
        "data", [b"\xff" * 50, b"\x22\x05abc", b"\x0a\xff\xff\xff\xff\x0f", b"\x22\x02\x08\x01\x00"]
    )
    def test_bytes_that_are_no_frame(self, channel: grpc.Channel, data: bytes) -> None:
        client = GrpcClient(channel, hello())
        client.send_bytes(data)
        assert client.refusal() == ("INVALID_ARGUMENT", "BadFrame: a message that is no ClientFrame")

    @pytest.mark.parametrize("data", [b"", b"\x9a\x06\x03abc"])
    def test_a_frame_of_no_known_kind(self, channel: grpc.Channel, data: bytes) -> None:
        client = GrpcClient(channel, hello())
        client.send_bytes(data)
        assert client.refusal()[0] == "INVALID_ARGUMENT"

    def test_message_beyond_the_limit(self, channel: grpc.Channel) -> None:
        client = GrpcClient(channel, hello())
        client.send(chunk(1, 0, bytes(3 * MIB)))
        assert client.refusal()[0] == "RESOURCE_EXHAUSTED"

    def test_request_before_hello(self, channel: grpc.Channel) -> None:
        client = GrpcClient(channel, header(1, make_crossing(1)))
        assert client.refusal()[0] == "INVALID_ARGUMENT"

    def test_absurd_sizes_allocate_nothing(self, channel: grpc.Channel) -> None:
        client, crossing = GrpcClient(channel, hello()), make_crossing(5)
        client.send(upload(crossing), header(1, crossing, payload_bytes=2**64 - 1))
        failed = client.answer(1).failed
        assert failed is not None and (failed.error, failed.code) == ("TooLarge", 8)

    def test_altered_cut(self, channel: grpc.Channel) -> None:
        client, frame = GrpcClient(channel, hello()), upload(make_crossing(5))
        frame.cut.data = frame.cut.data[:-1] + b" "
        client.send(frame)
        assert client.refusal()[0] == "INVALID_ARGUMENT"

    def test_gap_fails_the_request_and_not_the_stream(self, channel: grpc.Channel) -> None:
        client, crossing = GrpcClient(channel, hello()), make_crossing(5)
        client.send(upload(crossing), header(1, crossing), chunk(1, 1, b"x"), chunk(1, 2, b"y"))
        failed = client.answer(1).failed
        assert failed is not None and failed.error == "BadFrame"
        client.ask(2, b"abc")
        assert bytes(client.answer(2).data) == b"cba"

    def test_a_stream_that_breaks_in_an_upload(self, server: CloudServer, channel: grpc.Channel) -> None:
        client, crossing = GrpcClient(channel, hello()), make_crossing(MIB)
        client.send(upload(crossing), header(1, crossing), chunk(1, 0, b"x"))
        eventually(lambda: server.core.requests.held_bytes > MIB)  # its header counts, too
        client.call.cancel()
        eventually(lambda: server.core.requests.held_bytes == 0)


class TestStandardServices:
    def test_list_of_models(self, channel: grpc.Channel) -> None:
        reply = split_pb2_grpc.SplitStub(channel).ListModels(split_pb2.ListModelsRequest())
        (model,) = reply.models
        assert (model.model_id, model.weights_hash, model.layers) == ("fake", "w1", 3)

    def test_health(self, server: CloudServer, channel: grpc.Channel) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "isthmus.v1.Split"):
            assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == serving
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == serving
        server.drain()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()

    def test_reflection_is_off_until_it_is_asked_for(self, channel: grpc.Channel) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    def test_reflection(self) -> None:
        server = CloudServer(Core([FakeEngine()]), "127.0.0.1:0", reflection=True)
        server.start()
        with connect(server.port) as channel:
            self.reflects(channel)
        server.stop(grace=1)

    def reflects(self, channel: grpc.Channel) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="isthmus.v1.Split"),
        ]
        services, file = stub.ServerReflectionInfo(iter(requests))
        names = {service.name for service in services.list_services_response.service}
        assert {"isthmus.v1.Split", "grpc.health.v1.Health"} <= names
        assert b"ClientFrame" in file.file_descriptor_response.file_descriptor_proto[0]


def test_drain(server: CloudServer, channel: grpc.Channel) -> None:
    client = GrpcClient(channel, hello())
    client.other("welcome")
    server.drain()
    client.other("draining")
    assert GrpcClient(channel, hello("late")).refusal()[0] == "UNAVAILABLE"
    client.ask(1, b"abc")
    failed = client.answer(1).failed
    assert failed is not None and failed.retry
    server.core.dismiss()
    assert client.refusal()[0] == "UNAVAILABLE"


@pytest.mark.parametrize("address", ["256.1.1.1:0", "127.0.0.1:PORT"])
def test_address_that_cannot_be_used(server: CloudServer, address: str) -> None:
    with pytest.raises(SpecError, match="listen"):
        CloudServer(Core([FakeEngine()]), address.replace("PORT", str(server.port)))


@pytest.mark.parametrize("name", ["isthmus-grpc", "isthmus-receive"])
def test_a_system_without_a_free_thread_delays_or_fails_calls_and_the_server_stays(
    name: str, server: CloudServer, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def failing(self: threading.Thread) -> None:
        if self.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", failing)
        with pytest.raises(grpc.RpcError):
            next(split_pb2_grpc.SplitStub(channel).Session(iter([hello("early")]), timeout=2))
    still_serves(channel)
