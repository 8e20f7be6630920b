"""HTTP, attacked: what each bound of its own holds off, on a real server."""

from __future__ import annotations

import io
import json
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.access import Tls
from cloud_server.inference import Named, Result
from cloud_server.inference.datatypes import AT_ONCE
from cloud_server.limits import MIB, Limits
from cloud_server.transport import CloudServer
from cloud_server.transport.rest import messages
from deploy import certs
from shared_hooks.lifecycle.log_bounds import LogBounds
from tests import certificates
from tests.cloud_server.inference.rest import GOOD, INFER, ONES, ask, body, port_of, same, tensor
from tests.cloud_server.inference.served import engine, serving
from tests.waiting import PATIENCE, eventually

SMALL = Limits(max_request_bytes=MIB, max_message_bytes=MIB, max_clients=4, max_inference_bytes=64 * MIB)


@pytest.fixture(scope="module")
def server() -> Iterator[CloudServer]:
    with serving(engine(), limits=SMALL, rest="127.0.0.1:0") as server:
        yield server


class TestAnswers:
    def test_in_pieces(self) -> None:
        """Each is one call that no other thread can interrupt."""
        values = np.arange(2 * AT_ONCE + 1, dtype="<f4") / 3
        one = Named("x", "FP32", values.shape, memoryview(values.tobytes()))
        none = Named("y", "INT8", (0,), memoryview(b""))
        head, behind = messages.answer(Result("m", "1", "id", (one, none), {"a": 1}), messages.Wanted(False, {}))
        found = json.loads(b"".join(head))
        assert found["outputs"][0]["data"] == values.tolist() and found["outputs"][1]["data"] == [] and not behind
        assert (found["id"], found["parameters"]) == ("id", {"a": 1})
        assert sum(len(piece) > 1000 for piece in head) == 2 and max(map(len, head)) < 26 * AT_ONCE

    def test_elements_are_counted_together_and_first(
        self, server: CloudServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(messages, "MAX_VALUES", 20)  # of 6 and 16
        status, message, _ = ask(server, INFER, GOOD)
        assert status == 413 and "more than 20 elements together" in message["error"]
        same(ask(server, INFER, body(tensor(ONES), parameters={"binary_data_output": True})), ONES)
        monkeypatch.setattr(messages, "MAX_VALUES", 22)
        same(ask(server, INFER, GOOD), ONES)
        monkeypatch.setattr(messages, "VALUE_BYTES", 4 * MIB)
        status, message, _ = ask(server, INFER, GOOD)
        assert status == 413 and "max_inference_bytes" in message["error"]


def test_what_nobody_foresaw_is_logged_within_what_its_caller_may(
    server: CloudServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.addFilter(LogBounds(handler, each=1))
    monkeypatch.setattr(logging.getLogger("cloud_server"), "handlers", [handler])

    def fails(*_: Any) -> None:
        raise OverflowError("unforeseen")

    monkeypatch.setattr(server.inference, "infer", fails)
    for _ in range(5):
        assert ask(server, INFER, GOOD)[0] == 500
    assert written.getvalue().count("OverflowError: unforeseen") == 1


class TestTls:
    """With certificates of clients."""

    @pytest.fixture
    def tls(self, tmp_path: Path) -> Tls:
        return Tls(*certificates.server().write(tmp_path, "server"), certificates.ca_file(tmp_path))

    @pytest.fixture
    def mine(self, tls: Tls, tmp_path: Path) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(tls.client_ca))
        context.load_cert_chain(*certificates.client("edge-1").write(tmp_path, "client"))
        return context

    def test_a_closed_connection_leaves_nothing(self, tls: Tls, mine: ssl.SSLContext) -> None:
        with serving(engine(), rest="127.0.0.1:0", tls=tls) as server:
            for _ in range(3):
                same(ask(server, INFER, GOOD, context=mine), ONES)
            assert server.rest is not None
            waiting = server.rest._waiting
            eventually(lambda: len(waiting) == 0)

    def test_an_older_handshake_lets_nobody_in(self, tls: Tls, mine: ssl.SSLContext) -> None:
        def visit(session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
            with socket.create_connection(("127.0.0.1", port_of(server)), PATIENCE) as plain:
                try:
                    with mine.wrap_socket(plain, server_hostname="localhost", session=session) as visitor:
                        visitor.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
                        return visitor.recv(1000), visitor.session
                except OSError:
                    return b"", None

        assert tls.client_ca is not None
        with serving(engine(), rest="127.0.0.1:0", tls=tls) as server:
            answer, session = visit(None)
            assert answer.startswith(b"HTTP/1.1 200")
            tls.client_ca.write_bytes(certs.pem(certificates.authority("another")[0]))
            assert visit(session)[0] == b""
        mine.maximum_version = ssl.TLSVersion.TLSv1_2
        tls.client_ca.write_bytes(certs.pem(certificates.authority()[0]))
        with serving(engine(), rest="127.0.0.1:0", tls=tls) as server:
            assert visit(None)[0] == b""
