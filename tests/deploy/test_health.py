"""deploy/health.py against a server that serves, and against none."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "health.py"


def ask(address: str) -> tuple[int, str]:
    found = subprocess.run(
        [sys.executable, str(SCRIPT), address], capture_output=True, text=True, timeout=60, check=False
    )
    return found.returncode, found.stdout.strip()


def test_health() -> None:
    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert ask(f"127.0.0.1:{port}") == (0, "SERVING")
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert ask(f"127.0.0.1:{port}") == (1, "NOT_SERVING")
    finally:
        server.stop(None).wait()
    assert ask(f"127.0.0.1:{port}") == (1, "UNAVAILABLE")
