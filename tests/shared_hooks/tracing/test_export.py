"""Whether spans go anywhere: by a table, by OpenTelemetry's variables, or not at all."""

from __future__ import annotations

import builtins
import logging
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from shared_hooks import tracing
from shared_hooks.config import Table
from shared_hooks.errors import SpecError
from shared_hooks.tracing import VARIABLES, endpoint_of, exporting
from tests.ports import free_port


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_off_unless_asked_for() -> None:
    assert exporting("edge") is None


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "ftp://there:1", "http://", ""])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(SpecError, match=r'tracing.endpoint: expected "http://HOST:PORT"'):
        endpoint_of(Table({"endpoint": endpoint}, "file.toml", "tracing"))


@pytest.mark.parametrize("name", VARIABLES)
def test_without_a_collector_spans_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(tracing, "LAST_SECONDS", 0.1)
    made = exporting("edge")
    assert made is not None
    for number in range(2000):
        made.provider.get_tracer("test").start_span(f"{number}").end()
    made.close()
    made.close()
    assert len(caplog.records) <= 1  # and not a line for each batch


@pytest.mark.parametrize("said", ["table", "variable"])
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: str) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError("No module named 'opentelemetry'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    if said == "table":
        with pytest.raises(SpecError, match=r'pip install "isthmus\[otel\]"'):
            exporting("edge", "http://127.0.0.1:4317")
        return
    monkeypatch.setenv(VARIABLES[0], "http://127.0.0.1:4317")
    with caplog.at_level(logging.WARNING, "shared_hooks"):
        assert exporting("edge") is None
    assert "isthmus[otel]" in caplog.text
