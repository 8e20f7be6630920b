"""What the server has against a greeting: refusals that are final, and the facts that it asks for first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from edge_client.transport.options import State
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    BadFrame,
    Disagreement,
    IsthmusError,
    SpecError,
    UnknownModel,
)
from tests.edge_client import fake_server as fake
from tests.edge_client.fake_server import FakeServer
from tests.edge_client.transport.connections import connected, exchange, send
from tests.waiting import PATIENCE, eventually


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, Disagreement),
        (grpc.StatusCode.NOT_FOUND, UnknownModel),
        (grpc.StatusCode.INVALID_ARGUMENT, BadFrame),
    ],
)
def test_a_refusal_is_final_and_names_address_and_reason(code: grpc.StatusCode, error: type[IsthmusError]) -> None:
    script = fake.refuse(code, "weights: client 1, server 3")
    with FakeServer(script) as server, connected(server.address) as connection:
        with pytest.raises(error, match=f"{server.address}.*weights: client 1, server 3"):
            connection.open(PATIENCE)
        with pytest.raises(error, match="weights"):
            send(connection, exchange(1, b"x"))
        assert len(server.seen.hellos) == 2  # one each: no second try for what time does not heal
        assert connection.state is State.UNOPENED


@pytest.mark.parametrize(
    ("codec", "offered", "message"),
    [
        ("int4", ["raw", "lz4", "int8"], "has no codec int4: it has raw, lz4, int8"),
        ("int4", [], "has no codec int4: it has raw, lz4"),  # an older server
        ("lz4", [], None),
        ("int8", ["raw", "lz4", "int8"], None),
    ],
)
def test_a_codec_that_the_server_lacks_is_reported_at_the_greeting(
    codec: str, offered: list[str], message: str | None
) -> None:
    with (
        FakeServer(welcome={"codecs": offered}) as server,
        connected(server.address, codec=codec) as connection,
    ):
        if message is None:
            connection.open(PATIENCE)
            assert send(connection, exchange(1, b"x")) == b"x"
        else:
            with pytest.raises(Disagreement, match=f"{server.address} {message}"):
                connection.open(PATIENCE)
            assert len(server.seen.hellos) == 1


DIFFER = "model m: client and server differ in weights: client 1, server 3"


def test_facts_are_asked_for_once_and_go_with_every_greeting() -> None:
    asked: list[int] = []

    def describe() -> bytes:
        asked.append(1)
        return b"facts"

    code = grpc.StatusCode.FAILED_PRECONDITION
    with (
        FakeServer(fake.refuse(code, DIFFER, wants_facts=True), fake.refuse(code, "in eps"), fake.echo) as server,
        connected(server.address, describe=describe) as connection,
    ):
        with pytest.raises(Disagreement, match="in eps"):
            connection.open(PATIENCE)
        connection.open(PATIENCE)
        assert [hello.manifest for hello in server.seen.hellos] == [b"", b"facts", b"facts"] and asked == [1]


@pytest.mark.parametrize("patience", [PATIENCE, 0.2])
def test_facts_that_cannot_be_made_leave_the_refusal_as_it_was(
    patience: float, caplog: pytest.LogCaptureFixture
) -> None:
    """And the connection: whoever asks later is answered."""

    def describe() -> bytes:
        raise SpecError("w.safetensors was changed")

    script = fake.refuse(grpc.StatusCode.FAILED_PRECONDITION, DIFFER, wants_facts=True)
    with (
        FakeServer(script, script, fake.echo) as server,
        connected(server.address, describe=describe, patience=patience) as connection,
    ):
        for _ in range(2):
            with pytest.raises(Disagreement, match="weights: client 1, server 3"):
                connection.open(PATIENCE)
        assert "w.safetensors was changed" in caplog.text
        connection.open(PATIENCE)
        assert all(not hello.manifest for hello in server.seen.hellos)


def test_refusal_reaches_requests_that_wait_for_facts() -> None:
    """Whenever they run out of time: while it lasts, and while the server compares."""
    made, compared = threading.Event(), threading.Event()

    def describe() -> bytes:
        assert made.wait(PATIENCE)
        return b"facts"

    def comparing(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        server.seen.hellos.append(next(frames).hello)
        assert compared.wait(PATIENCE)
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "in eps")
        yield split_pb2.ServerFrame()

    script = fake.refuse(grpc.StatusCode.FAILED_PRECONDITION, DIFFER, wants_facts=True)
    with (
        FakeServer(script, comparing) as server,
        connected(server.address, describe=describe, patience=0.3) as connection,
    ):
        for _ in range(2):
            with pytest.raises(Disagreement, match="weights: client 1, server 3"):
                connection.open(0.3)
        one = exchange(1, b"x")
        connection.submit(one)
        made.set()
        with pytest.raises(Disagreement, match="weights: client 1, server 3"):
            assert one.wait() and one.error is not None
            raise one.error
        compared.set()
        eventually(lambda: connection.state is State.UNOPENED)
        with pytest.raises(Disagreement, match="in eps"):
            connection.open(PATIENCE)


@pytest.mark.parametrize(
    "script",
    [
        fake.refuse(grpc.StatusCode.FAILED_PRECONDITION, "protocol version: client 3, server 9"),
        fake.refuse(grpc.StatusCode.UNIMPLEMENTED, "Method not found"),
        fake.refuse(grpc.StatusCode.NOT_FOUND, "no model", wants_facts=True),
    ],
)
def test_useless_facts_are_not_gathered(script: fake.Script) -> None:
    asked: list[int] = []
    with (
        FakeServer(script) as server,
        connected(server.address, describe=lambda: asked.append(1) or b"x") as connection,
        pytest.raises(IsthmusError),
    ):
        connection.open(PATIENCE)
    assert len(server.seen.hellos) == 1 and not asked


def test_another_kind_of_grpc_server_is_named() -> None:
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with connected(f"127.0.0.1:{port}") as connection, pytest.raises(Disagreement, match="Method not found"):
            connection.open(PATIENCE)
    finally:
        server.stop(0).wait()


def test_another_protocol_version_is_named() -> None:
    with (
        FakeServer(welcome={"protocol_version": 9}) as server,
        connected(server.address) as connection,
        pytest.raises(Disagreement, match="version 9"),
    ):
        connection.open(PATIENCE)
