"""Calls without credentials that hold what others need: a thread, a lock, a name kept for good."""

from __future__ import annotations

import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.transport import CloudServer, authentication
from cloud_server.transport.authentication import MAX_WAITING
from protos.isthmus.v1 import split_pb2, split_pb2_grpc
from studies.attacks.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, Connection, frame, headers, message
from tests.cloud_server.fakes import FakeEngine, GrpcClient, hello
from tests.waiting import PATIENCE, eventually

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
UNREAD = struct.pack(">HI", 4, 0)
"""SETTINGS: a client to whom nothing may be sent."""


@pytest.fixture
def server() -> Iterator[CloudServer]:
    server = CloudServer(Core([FakeEngine()], Limits(max_clients=8)), "127.0.0.1:0", reflection=True)
    server.start()
    yield server
    server.stop(grace=1)


@pytest.fixture
def address(server: CloudServer) -> str:
    return f"127.0.0.1:{server.port}"


def answers(address: str) -> None:
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        models = split_pb2_grpc.SplitStub(channel).ListModels(split_pb2.ListModelsRequest(), timeout=PATIENCE)
        assert models.models


def still_serves(address: str) -> None:
    answers(address)
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        client = GrpcClient(channel, hello("witness"))
        client.ask(1, b"good")
        assert bytes(client.answer(1).data) == b"doog"
        client.call.cancel()


@pytest.mark.parametrize("method", [CHECK, WATCH, REFLECTION, "ListModels", "Profile"])
def test_200_calls_whose_message_never_comes(server: CloudServer, address: str, method: str) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            connection = Connection(address)
            stack.callback(connection.close)
            block = headers(method)
            connection.send(b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1, block) for n in range(50)))
        eventually(lambda: len(server._auth._waiting) == MAX_WAITING)
        still_serves(address)


@pytest.mark.parametrize("method", [CHECK, WATCH])
def test_answers_that_nobody_reads(server: CloudServer, address: str, method: str) -> None:
    with ExitStack() as stack:
        connection = Connection(address, settings=UNREAD)
        stack.callback(connection.close)
        for n in range(50):
            connection.send(frame(HEADERS, END_HEADERS, 2 * n + 1, headers(method)))
            connection.send(frame(DATA, END_STREAM, 2 * n + 1, message(b"")))
        still_serves(address)
        server.drain()  # tells all who watch
        with grpc.insecure_channel(address) as channel:
            status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_message_that_does_not_come_is_waited_for_some_seconds(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "MESSAGE_SECONDS", 0.1)
    over = threading.Event()

    def never() -> Iterator[bytes]:
        over.wait(PATIENCE)
        yield from ()

    server = CloudServer(Core([FakeEngine()]), "127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        assert channel.stream_unary(CHECK).future(never(), timeout=PATIENCE).code() is grpc.StatusCode.CANCELLED
        over.set()
    server.stop(grace=1)


def test_invalid_messages_of_strangers(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        for data, code in (
            ([], grpc.StatusCode.INVALID_ARGUMENT),
            ([b"\xff"], grpc.StatusCode.INVALID_ARGUMENT),
            ([bytes(1 << 20)], grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            assert channel.stream_unary(CHECK).future(iter(data), timeout=PATIENCE).code() is code


def test_longest_watch_of_the_busiest_address_is_evicted(server: CloudServer, address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        first = stub.Watch(health_pb2.HealthCheckRequest())
        next(first)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=uuid.uuid4().hex)) for _ in range(64)]
        assert next(watches[-1]).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        eventually(lambda: first.code() is grpc.StatusCode.CANCELLED)


def test_four_connections_of_as_many_sessions_as_they_may_have(server: CloudServer, address: str) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            connection = Connection(address)
            stack.callback(connection.close)
            connection.send(b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1, headers("Session")) for n in range(60)))
        eventually(lambda: server.core.clients == 8)
        answers(address)


def test_a_probe_whose_answer_nobody_fetches(
    server: CloudServer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep its place as long as it likes; a profile, everybody's turn."""
    monkeypatch.setattr(authentication, "FETCH_SECONDS", 0.1)
    with ExitStack() as stack:
        connection = Connection(address, settings=UNREAD)
        stack.callback(connection.close)
        ask = split_pb2.ProbeFrame(last=True, answer_bytes=4 << 20).SerializeToString()
        connection.send(frame(HEADERS, END_HEADERS, 1, headers("Probe")) + frame(DATA, 0, 1, message(ask)))
        eventually(lambda: server.core._probes)
        eventually(lambda: not server.core._probes)
