"""The Open Inference Protocol by HTTP, on a real server: answers, refusals, and clients of bad manners."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cloud_server.access import Tls, hash_of, new_token
from cloud_server.access import entry as identity
from cloud_server.limits import MIB, Limits
from cloud_server.transport import CloudServer
from cloud_server.transport.rest import connections as connections_module
from shared_hooks.errors import QuotaExceeded
from tests import certificates
from tests.cloud_server.inference.rest import GOOD, INFER, ONES, ask, body, port_of, same, tensor
from tests.cloud_server.inference.served import crossing, engine, serving
from tests.cloud_server.real import Residual
from tests.waiting import PATIENCE, eventually

SMALL = Limits(max_request_bytes=MIB, max_message_bytes=MIB, max_clients=4, max_inference_bytes=32 * MIB)


@pytest.fixture(scope="module")
def server() -> Iterator[CloudServer]:
    with serving(engine(), limits=SMALL, rest="127.0.0.1:0") as server:
        yield server


def test_health_and_what_is_served(server: CloudServer) -> None:
    assert ask(server, "/v2/health/live")[:2] == (200, {"live": True})
    assert ask(server, "/v2/health/ready")[:2] == (200, {"ready": True})
    assert ask(server, "/v2")[1]["name"] == "isthmus"
    assert ask(server, "/v2/repository/index", b"{}")[1] == [{"name": "residual", "version": "1", "state": "READY"}]
    status, model, _ = ask(server, "/v2/models/residual/versions/1")
    assert status == 200 and model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
    assert ask(server, "/v2/models/residual/ready")[0] == 200
    assert ask(server, "/v2/models/residual/config")[1]["input"][0]["data_type"] == "TYPE_FP32"


@pytest.mark.parametrize("rows", [1, 3])
def test_the_whole_model_exactly(server: CloudServer, rows: int) -> None:
    x = torch.randn(rows, 8)
    same(ask(server, INFER, body(tensor(x))), x)
    same(ask(server, INFER, body(tensor(x, data=x.flatten().tolist()))), x)
    raw = x.numpy().tobytes()
    given = tensor(x, parameters={"binary_data_size": len(raw)})
    del given["data"]
    text = body(given, id="mine", parameters={"binary_data_output": True})
    status, message, behind = ask(
        server, INFER, text + raw, headers={"Inference-Header-Content-Length": str(len(text))}
    )
    same((status, message, behind), x)
    assert behind and message["id"] == "mine"
    wanted = [{"name": "logits", "parameters": {"binary_data": True}}, {"name": "hidden"}]
    answer = ask(server, INFER, body(tensor(x), outputs=wanted))
    same(answer, x)
    assert len(answer[2]) == rows * 12


def test_a_tail_exactly() -> None:
    x = torch.randn(2, 8)
    given = [{**tensor(value), "name": name} for name, value in crossing(Residual().eval(), "second", x).items()]
    with serving(engine(tails=("second",)), limits=SMALL, rest="127.0.0.1:0") as server:
        same(ask(server, "/v2/models/residual@second/infer", body(*given)), x)


def test_a_body_of_unknown_length(server: CloudServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=PATIENCE)
    pieces = [GOOD[at : at + 50] for at in range(0, len(GOOD), 50)]
    for _ in range(2):  # the connection is kept
        connection.request("POST", INFER, iter(pieces), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
        response = connection.getresponse()
        same((response.status, json.loads(response.read()), b""), ONES)
    connection.close()


REFUSALS: dict[str, tuple[str, bytes | None, int, str]] = {
    "no path": ("/", None, 404, "there are /v2"),
    "another path": ("/v2/models/residual/versions/1/../../../etc/passwd", None, 404, "of a model there are"),
    "GET": (INFER, None, 400, "by POST"),
    "unknown model": ("/v2/models/no%2Fmodel", None, 404, 'no model "no/model"'),
    "unknown version": ("/v2/models/residual/versions/9/infer", GOOD, 404, "no version"),
    "empty": (INFER, b"", 400, "not JSON"),
    "no JSON": (INFER, b"{", 400, "not JSON"),
    "no text": (INFER, b"\xff\xfe\x00", 400, "not JSON"),
    "a list": (INFER, b"[]", 400, "the request is an object"),
    "deep": (INFER, b"[" * 30_000 + b"]" * 30_000, 400, "BadFrame"),  # how deep JSON may be depends on Python
    "deeper": (INFER, b'{"a":' * 100_000, 413, "100000 objects"),
    "a deep tensor": (
        INFER,
        body(tensor(ONES, data=0)).replace(b": 0}", b": " + b"[" * 900 + b"]" * 900 + b"}"),
        400,
        "0 bytes",
    ),
    "NaN": (INFER, body(tensor(ONES, data=[float("nan")] * 16)), 400, "no NaN"),
    "infinite": (INFER, body(tensor(ONES, data=[float("inf")] * 16)), 400, "no Infinity"),
    "1e999": (INFER, GOOD.replace(b"1.0", b"1e999"), 400, "an element"),
    "beyond FP32": (INFER, GOOD.replace(b"1.0", b"1e39"), 400, "does not fit"),
    "a number of 5,000 digits": (INFER, GOOD.replace(b"1.0", b"1" * 5000, 1), 400, "not JSON"),
    "texts": (INFER, body(tensor(ONES, data=["a"] * 16)), 400, "an element is no FP32"),
    "truth": (INFER, body(tensor(ONES, data=[True] * 16)), 400, "an element is no FP32"),
    "no data": (INFER, body({"name": "x", "shape": [2, 8], "datatype": "FP32"}), 400, "data is a list"),
    "ragged": (INFER, body(tensor(ONES, data=[[1.0] * 8, 1.0])), 400, "mixes elements and lists"),
    "too few": (INFER, body(tensor(ONES, data=[1.0])), 400, "4 bytes came; FP32 of shape [2, 8] has 64"),
    "negative": (INFER, body(tensor(ONES, shape=[-2, -8])), 400, "not negative"),
    "shapes of texts": (INFER, body(tensor(ONES, shape=["2", "8"])), 400, "shape is a list of numbers"),
    "a shape of 10^30": (INFER, body(tensor(ONES, shape=[10**30, 0])), 400, "shape is a list of numbers"),
    "2 GB": (INFER, body(tensor(ONES, shape=[1 << 26, 8])), 413, "max_request_bytes"),
    "no name": (INFER, body({"shape": [1], "datatype": "FP32", "data": [1]}), 400, "name is a text"),
    "a parameter that is a list": (INFER, body(tensor(ONES, parameters={"a": []})), 400, "a truth value, a number"),
    "bytes that do not come": (INFER, body({**tensor(ONES), "parameters": {"binary_data_size": 9}}), 400, "exclude"),
    "shared memory": (INFER, body(tensor(ONES, parameters={"shared_memory_region": "x"})), 400, "not served"),
    "a million inputs": (INFER, b'{"inputs":[' + b"0," * 100_000 + b"0]}", 400, "at most 1024"),
    "too large": (INFER, b" " * (MIB + 1), 413, "at most"),
    "the model raises": (INFER, GOOD.replace(b"1.0", b"13.0"), 500, "ModelFailed: ValueError: thirteen"),
    "an output twice": (INFER, body(tensor(ONES), outputs=[{"name": "hidden"}] * 2), 400, "have one name"),
    "an input twice": (INFER, body(tensor(ONES), tensor(ONES)), 400, "have one name"),
    "all the time there is": (INFER, body(tensor(ONES), parameters={"timeout": 10**400}), 400, "timeout"),
    "more time than there is": (INFER, body(tensor(ONES), parameters={"timeout": 1000 << 32}), 400, "timeout"),
    "another output": (INFER, body(tensor(ONES), outputs=[{"name": "z"}]), 400, 'no output "z"'),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_each_refusal_has_its_own_words(server: CloudServer, what: str) -> None:
    path, sent, status, says = REFUSALS[what]
    found = ask(server, path, sent)
    assert (found[0], says in found[1]["error"]) == (status, True), found
    same(ask(server, INFER, GOOD), ONES)


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({"Content-Encoding": "gzip"}, 400, "as they are"),
        ({"Inference-Header-Content-Length": "-1"}, 400, "no number"),
        ({"Inference-Header-Content-Length": "99999"}, 400, "bytes came"),
        ({"Inference-Header-Content-Length": str(1 << 40)}, 413, "max_message_bytes"),
        ({"Content-Length": str(2 << 30)}, 413, "a body of 2147483648 bytes"),
    ],
)
def test_headers_that_lie(server: CloudServer, headers: dict[str, str], status: int, says: str) -> None:
    found = ask(server, INFER, GOOD, headers=headers)
    assert (found[0], says in found[1]["error"]) == (status, True), found


def test_nonsense_is_no_request(server: CloudServer) -> None:
    for nonsense in (
        b"\x16\x03\x01" * 50,
        b"GET " + b"a" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port_of(server)), PATIENCE) as stranger:
            stranger.sendall(nonsense)
            while data := stranger.recv(1000):
                assert b"200 OK" not in data
    same(ask(server, INFER, GOOD), ONES)


def test_slow_reader_is_evicted(server: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.rest is not None
    waiting = server.rest._waiting
    with socket.create_connection(("127.0.0.1", port_of(server)), PATIENCE) as slow:
        slow.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n{{".encode())
        eventually(lambda: server.inference.held.nbytes == 900_000)
        monkeypatch.setattr(waiting, "_seconds", 0.0)
        assert slow.recv(1) == b""
        monkeypatch.undo()
    monkeypatch.setattr(waiting, "_most", 3)
    idle = [socket.create_connection(("127.0.0.1", port_of(server)), PATIENCE) for _ in range(4)]
    assert idle[0].recv(1) == b""  # the oldest
    same(ask(server, INFER, GOOD), ONES)
    for one in idle:
        one.close()
    eventually(lambda: server.inference.held.nbytes == 0 and len(waiting) == 0)
    assert connections_module.MAX_WAITING_CONNECTIONS > 3


def test_client_that_disconnects_leaves_nothing(server: CloudServer) -> None:
    request = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port_of(server)), PATIENCE) as hasty:
            hasty.sendall(request)
    core = server.core
    eventually(lambda: core.clients == 0 and core.requests.kept() == (0, 0) and server.inference.held.nbytes == 0)
    eventually(lambda: ask(server, INFER, GOOD)[0] == 200)


def test_access_rules(tmp_path: Path) -> None:
    alice, bob = new_token(), new_token()
    path = tmp_path / "identities.toml"
    quota = '[identities.alice]\nrequests_per_minute = 6\n[identities.bob]\ncuts = ["second"]\n'
    tokens = [identity("alice", hash_of(alice), None), identity("bob", hash_of(bob), None)]
    path.write_text("\n".join([*tokens, quota]))
    with serving(engine(), rest="127.0.0.1:0", identities=path) as server:
        assert ask(server, "/v2/health/ready")[0] == 200
        for route in ("/v2", "/v2/models/residual", "/nowhere"):
            assert ask(server, route)[0] == 401
        assert ask(server, INFER, GOOD)[0] == 401
        assert ask(server, INFER, GOOD, headers={"Authorization": "Bearer nobody"})[0] == 401
        own = {"Authorization": f"Bearer {alice}"}
        same(ask(server, INFER, GOOD, headers=own), ONES)
        status, message, _ = ask(server, INFER, GOOD, headers=own)
        assert status == 429 and "QuotaExceeded" in message["error"]
        status, message, _ = ask(server, INFER, GOOD, headers={"Authorization": f"Bearer {bob}"})
        assert status == 403 and 'may not use the cut "input"' in message["error"]
        server.drain()
        assert ask(server, "/v2/health/ready")[0] == 503 and ask(server, "/v2/health/live")[0] == 200
        assert ask(server, INFER, GOOD, headers=own)[0] == 503


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="this system does not let two servers share a port")
def test_a_rolling_update() -> None:
    with serving(engine(), rest="127.0.0.1:0", reuse_port=True) as old:
        assert old.rest is not None
        with serving(engine(), rest=f"127.0.0.1:{old.rest.port}", reuse_port=True) as new:
            assert new.rest is not None and new.rest.port == old.rest.port
            eventually(lambda: ask(old, "/v2/health/live")[0] == 200)
            old.drain()

            def settled() -> bool:
                try:
                    return all(ask(new, "/v2/health/ready")[0] == 200 for _ in range(8))
                except ConnectionError:  # it was about to be taken by the one that goes
                    return False

            eventually(settled)
            same(ask(new, INFER, GOOD), ONES)


def test_tls_and_certificates(tmp_path: Path) -> None:
    ca = certificates.ca_file(tmp_path)
    tls = Tls(*certificates.server().write(tmp_path, "server"), ca)
    mine = certificates.client("edge-1").write(tmp_path, "client")
    path = tmp_path / "identities.toml"
    path.write_text("[identities.edge-1]\n[identities.edge-2]\nmodels = []\n")
    with serving(engine(), rest="127.0.0.1:0", tls=tls, identities=path) as server:
        trusting = ssl.create_default_context(cafile=str(ca))
        with pytest.raises(OSError):  # whichever of TLS's errors comes first
            ask(server, INFER, GOOD, context=trusting)
        trusting.load_cert_chain(*mine)
        same(ask(server, INFER, GOOD, context=trusting), ONES)
        other = ssl.create_default_context(cafile=str(ca))
        other.load_cert_chain(*certificates.client("edge-2").write(tmp_path, "other"))
        assert ask(server, INFER, GOOD, context=other)[0] == 404
        certificates.server("localhost", "127.0.0.1", ca="another").write(tmp_path, "server")
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server, INFER, GOOD, context=trusting)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example:8000"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 403),
        ({"Content-Type": "application/x-www-form-urlencoded; charset=x"}, 403),
        ({"Content-Type": "application/json"}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
    ],
)
def test_cross_origin_page_is_refused(server: CloudServer, headers: dict[str, str], status: int) -> None:
    assert ask(server, INFER, GOOD, headers=headers)[0] == status


def test_retry_after_is_rounded_up(server: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry-After is in whole seconds: rounded up."""
    error = QuotaExceeded("used up")
    error.retry_after_seconds = 1.2

    def refuses(*_: object) -> None:
        raise error

    assert server.rest is not None
    monkeypatch.setattr("cloud_server.inference.Inference.engine", refuses)
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)
    connection.request("POST", INFER, GOOD)
    response = connection.getresponse()
    assert (response.status, response.getheader("Retry-After")) == (429, "2")
    connection.close()


def test_statistics_count_what_was_answered_and_what_failed() -> None:
    with serving(engine(), rest="127.0.0.1:0") as server:
        path = "/v2/models/residual/stats"

        def counted(where: str = path) -> dict[str, Any]:
            (one,) = ask(server, where)[1]["model_stats"]
            return dict(one)

        before = counted()
        assert before["name"] == "residual" and before["version"] == "1" and before["last_inference"] == 0
        assert {part["count"] for part in before["inference_stats"].values()} == {0}
        for _ in range(3):
            same(ask(server, INFER, GOOD), ONES)
        assert ask(server, INFER, body(tensor(torch.full((2, 8), 13.0))))[0] == 500
        eventually(lambda: counted()["inference_stats"]["fail"]["count"] == 1)
        found = counted("/v2/models/stats")
        assert found == counted("/v2/models/residual/versions/1/stats")
        parts = found["inference_stats"]
        assert found["inference_count"] == found["execution_count"] == parts["success"]["count"] == 3
        assert abs(found["last_inference"] / 1000 - time.time()) < 60
        inside = ("queue", "compute_input", "compute_infer", "compute_output")
        assert all(parts[name]["count"] == 3 for name in inside)
        assert 0 < sum(parts[name]["ns"] for name in inside) <= parts["success"]["ns"]
        assert ask(server, "/v2/models/nowhere/stats")[0] == 404
