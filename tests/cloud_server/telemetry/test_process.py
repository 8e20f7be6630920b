"""A real server's metrics, asked for as Prometheus asks."""

from __future__ import annotations

import re
import signal
import urllib.request
from pathlib import Path

import grpc
import torch
from prometheus_client.parser import text_string_to_metric_families

from shared_hooks import WrappedModel
from tests.cloud_server.fakes import GrpcClient
from tests.cloud_server.real import Process, Residual, ask, greet, value
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]


def test_metrics_of_a_process() -> None:
    process = Process(f"--model=residual={Residual.__module__}:Residual", "--example=2,8", "--metrics=0", cwd=ROOT)
    try:
        eventually(lambda: "metrics on" in process.log)
        found = re.search(r"metrics on (http://127\.0\.0\.1:\d+/metrics)", process.log)
        assert found, process.log

        def scrape() -> dict[tuple[str, str], float]:
            text = urllib.request.urlopen(found[1], timeout=60).read().decode()
            families = text_string_to_metric_families(text)
            return {(one.name, one.labels.get("le", "")): one.value for family in families for one in family.samples}

        assert scrape()["isthmus_request_success_total", ""] == 0
        with WrappedModel(Residual().eval()) as edge, grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
            client = GrpcClient(channel, greet(edge, "residual"))
            for id in (1, 2, 3):
                ask(client, id, edge.forward(torch.ones(2, 8), end="second"))
                value(client, id)
            eventually(lambda: scrape()["isthmus_request_success_total", ""] == 3)
            seen = scrape()
            assert seen["isthmus_compute_duration_seconds_bucket", "+Inf"] == 3
            assert (
                0 < seen["isthmus_compute_duration_seconds_sum", ""] < seen["isthmus_request_duration_seconds_sum", ""]
            )
            assert seen["isthmus_sessions", ""] == 1 and seen["process_resident_memory_bytes", ""] > 0
        process.signal(signal.SIGTERM)
        assert process.wait() == 0, process.log
    finally:
        process.close()
