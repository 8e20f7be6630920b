"""The metrics' own port: what it answers, and what readers of bad manners get."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from cloud_server import telemetry as page_module
from cloud_server.telemetry import MAX_READERS, MetricsPage
from shared_hooks.errors import SpecError
from tests.waiting import eventually


@pytest.fixture
def page() -> Iterator[MetricsPage]:
    registry = CollectorRegistry()
    Counter("beans", "Of a kind.", registry=registry).inc(3)
    with MetricsPage("127.0.0.1:0") as page:
        page.serve(registry)
        yield page


def ask(page: MetricsPage, path: str, **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(page.address, timeout=30)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    found = response.status, response.getheader("Content-Type", ""), response.read().decode()
    connection.close()
    return found


def test_text_for_prometheus(page: MetricsPage) -> None:
    status, kind, body = ask(page, "/metrics")
    assert status == 200 and kind.startswith("text/plain; version=0.0.4") and "beans_total 3.0" in body
    status, kind, body = ask(page, "/metrics?name=x", Accept="application/openmetrics-text")
    assert status == 200 and kind.startswith("application/openmetrics-text") and body.endswith("# EOF\n")


def test_nothing_else(page: MetricsPage) -> None:
    assert ask(page, "/")[0] == 404 and ask(page, "/metrics/../../etc/passwd")[0] == 404


def test_a_reader_that_dawdles_is_closed(page: MetricsPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "SECONDS", 0.2)
    host, _, port = page.address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as slow:
        slow.sendall(b"GET /met")
        assert slow.recv(100) == b""
    assert ask(page, "/metrics")[0] == 200


def test_no_more_readers_than_places(page: MetricsPage) -> None:
    host, _, port = page.address.rpartition(":")
    idle = [socket.create_connection((host, int(port)), 30) for _ in range(MAX_READERS)]
    with socket.create_connection((host, int(port)), 30) as late:
        assert late.recv(100) == b""
    for one in idle:
        one.close()

    def answered() -> bool:
        try:
            return ask(page, "/metrics")[0] == 200
        except OSError:
            return False

    eventually(answered)


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SpecError, match=f"metrics: {address} cannot be used"):
            MetricsPage(address)


def test_no_address_of_this_machine() -> None:
    with pytest.raises(SpecError, match=r"metrics: \[2001:db8::1\]:0 cannot be used"):
        MetricsPage("[2001:db8::1]:0")


def test_cross_origin_page_reads_no_metrics(page: MetricsPage) -> None:
    """By a name of its own that leads here, or from its own origin."""
    assert ask(page, "/metrics", Host="evil.example:9464")[0] == 403
    assert ask(page, "/metrics", Origin="http://evil.example")[0] == 403
    assert ask(page, "/metrics", Host="localhost:9464")[0] == 200
