"""HTTP, attacked: what each bound of its own holds off, on a real server."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from cloud_server.access import Tls, hash_of, new_token
from cloud_server.access import entry as identity
from cloud_server.inference import InferenceResult, NamedElements
from cloud_server.inference.sending import AT_ONCE
from cloud_server.limits import MIB, Limits
from cloud_server.transport import CloudServer, active_calls, authentication
from cloud_server.transport.rest import messages
from deploy import certs
from shared_hooks.errors import BadFrame, InputMismatch, TooLarge
from shared_hooks.lifecycle import Stage
from shared_hooks.lifecycle.log import LogBounds
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
        one = NamedElements("x", "FP32", values.shape, memoryview(values.tobytes()))
        none = NamedElements("y", "INT8", (0,), memoryview(b""))
        head, behind = messages.answer(
            InferenceResult("m", "1", "id", (one, none), {"a": 1}), messages.WantedOutputs(False, {})
        )
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


def test_unexpected_errors_are_logged_within_the_callers_limit(
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


class TestMemory:
    """What JSON becomes is counted before it is read, and never less than it takes."""

    BODIES: ClassVar[dict[str, str]] = {
        "short texts": ",".join(['"ā"'] * 40_000),
        "short lists": ",".join(["[1]"] * 40_000),
        "objects and lists": ",".join(['{"a":1}'] * 8000 + ["[1]"] * 20_000),
        "long keys": "{" + ",".join(f'"{chr(256 + at % 128)}{chr(256 + at // 128)}":1' for at in range(1 << 14)) + "}",
    }

    @pytest.mark.parametrize("what", BODIES)
    def test_at_its_bounds(self, what: str) -> None:
        first = tensor(ONES, data=["here"])
        sent = memoryview(body(first, id="😀").replace(b'"here"', self.BODIES[what].encode()))
        tracemalloc.start()
        try:
            with contextlib.suppress(BadFrame, InputMismatch):
                messages.read("residual", "", sent, None)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < messages.MEMORY * sent.nbytes

    def test_beyond_them(self) -> None:
        with pytest.raises(TooLarge, match="9001 objects"):
            messages.read("residual", "", memoryview(b'{"a":[' + b",".join([b"{}"] * 9000) + b"]}"), None)


class TestPlaces:
    def test_one_account_cannot_exclude_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entered, opened = threading.Event(), threading.Event()
        served = engine()
        compute = served.compute

        def slow(*args: Any) -> Any:
            entered.set()
            assert opened.wait(PATIENCE)
            return compute(*args)

        monkeypatch.setattr(served, "compute", slow)
        limits = Limits(max_clients=2)
        with (
            serving(served, limits=limits, rest="127.0.0.1:0") as server,
            ThreadPoolExecutor(4) as threads,
        ):
            core = server.core
            greedy = [threads.submit(ask, server, INFER, GOOD) for _ in range(2)]
            try:
                assert entered.wait(PATIENCE)
                eventually(lambda: core.requests.pending() == 2)
                other = threads.submit(ask, server, INFER, GOOD, source_address=("127.0.0.2", 0))
                eventually(lambda: any(one.done() for one in greedy))
                (first,) = [one.result() for one in greedy if one.done()]
                assert first[0] == 503 and "its place was needed" in first[1]["error"]
            finally:
                opened.set()
            same(other.result(), ONES)

    def test_an_answer_that_is_fetched_too_slowly_is_given_up(self) -> None:
        x = torch.ones(200_000, 8)
        raw, given = x.numpy().tobytes(), tensor(torch.ones(0, 8), shape=[200_000, 8])
        del given["data"]
        given["parameters"] = {"binary_data_size": len(raw)}
        text = body(given, parameters={"binary_data_output": True})
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: {len(text)}\r\n"
        limits = Limits(answer_seconds=0.3)
        with serving(engine(), limits=limits, rest="127.0.0.1:0") as server, socket.socket() as lazy:
            assert server.rest is not None
            server.rest._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what it accepts inherits that
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect(("127.0.0.1", port_of(server)))
            lazy.sendall(f"{head}Content-Length: {len(text) + len(raw)}\r\n\r\n".encode() + text + raw)
            eventually(lambda: server.core.requests.kept()[1] > len(raw) // 2)
            fetched = 0
            with contextlib.suppress(ConnectionError):
                while some := lazy.recv(1000):
                    fetched += len(some)
                    time.sleep(0.002)
            assert 0 < fetched < len(raw)
            eventually(lambda: server.core.clients == 0 and server.inference.held.nbytes == 0)
            assert server.core.requests.kept() == (0, 0)


class TestHooks:
    def test_answer_sent_just_before_the_next_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hooks hear that an answer went; the end of its work does not touch the next request's."""
        sent: list[Any] = []
        heard, entered, opened = threading.Event(), threading.Event(), threading.Event()
        served = engine()
        compute = served.compute

        def slow(*args: Any) -> Any:
            if sent:
                entered.set()
                assert opened.wait(PATIENCE)
            return compute(*args)

        def hook(event: Any) -> None:
            sent.append(event)
            assert heard.wait(PATIENCE)

        monkeypatch.setattr(served, "compute", slow)
        with serving(served, rest="127.0.0.1:0") as server:
            assert server.rest is not None
            server.core.lifecycle.on(Stage.AFTER_SEND)(hook)
            waiting, connection = server.rest._waiting, http.client.HTTPConnection("127.0.0.1", port_of(server))
            try:
                connection.request("POST", INFER, GOOD)
                assert connection.getresponse().read()
                eventually(lambda: len(sent) == 1)
                connection.request("POST", INFER, GOOD)
                assert entered.wait(PATIENCE)
                eventually(lambda: len(waiting) == 0)  # it has its place
                heard.set()
                eventually(lambda: server.core.clients == 1)
                for _ in range(3):
                    assert ask(server, "/v2/health/live")[0] == 200
                eventually(lambda: len(waiting) == 0)
                opened.set()
                assert connection.getresponse().read()
                eventually(lambda: len(sent) == 2)
            finally:
                heard.set()
                opened.set()
                connection.close()


def test_revoked_caller_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(active_calls, "LEAVE_SECONDS", 0.1)
    alice, opened, entered = new_token(), threading.Event(), threading.Event()
    path = tmp_path / "identities.toml"
    path.write_text(identity("alice", hash_of(alice), None))
    served = engine()

    def slow(*args: Any) -> Any:
        entered.set()
        assert opened.wait(PATIENCE)
        raise ValueError

    monkeypatch.setattr(served, "compute", slow)
    own = {"Authorization": f"Bearer {alice}"}
    with (
        serving(served, rest="127.0.0.1:0", identities=path) as server,
        socket.create_connection(("127.0.0.1", port_of(server)), PATIENCE) as uploading,
        ThreadPoolExecutor(1) as threads,
    ):
        try:
            waits = threads.submit(ask, server, INFER, GOOD, headers=own)
            head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {alice}\r\n"
            uploading.sendall(f"{head}Content-Length: 900000\r\n\r\n".encode())
            assert entered.wait(PATIENCE)
            eventually(lambda: server.inference.held.nbytes >= 900_000)
            path.write_text(path.read_text() + "\nrevoked = true\n")
            status, message, _ = waits.result(PATIENCE)
            assert status == 401 and "was revoked" in message["error"]
            with contextlib.suppress(ConnectionError):
                assert uploading.recv(1) == b""
        finally:
            opened.set()


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

    def test_earlier_handshake_grants_nothing(self, tls: Tls, mine: ssl.SSLContext) -> None:
        def visit(session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
            with socket.create_connection(("127.0.0.1", port_of(server)), PATIENCE) as plain:
                try:
                    with mine.wrap_socket(plain, server_hostname="localhost", session=session) as visitor:
                        visitor.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
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
