"""OpenTelemetry's exporter of both processes against a port that takes OTLP as a collector does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from studies.doors.process import ROOT, Server

SECONDS = 120.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The port, as a context manager; ``spans``: (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                names = {one.key: one.value.string_value for one in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(names.get("service.name", ""), span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(1).wait()


def collect(server: Server, collector: Collector) -> dict[str, Any]:
    """An edge client asks; one trace for each image must join both sides: the server exports to ``collector``, too."""
    images = ROOT / "shared_hooks" / "models" / "digits" / "images"
    wanted = len(list(images.glob("*.png")))
    words = ["run", "--server", server.grpc, "--split", "stage2.0.conv2", "--input", str(images)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address}
    asked = [sys.executable, "-m", "edge_client", *words]
    subprocess.run(asked, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=SECONDS)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        joined = _joined(collector.spans)
        edges = {one.trace_id for name, one in list(collector.spans) if name == "isthmus-edge"}
        if len(joined) == len(edges) == wanted:
            names = sorted({f"{name}: {span.name}" for name, span in collector.spans})
            return {"spans": len(collector.spans), "traces across both sides": len(joined), "names": names}
        time.sleep(0.1)
    raise RuntimeError(f"{len(_joined(collector.spans))} traces have spans of both sides, not {wanted}")


def _joined(spans: list[tuple[str, Any]]) -> set[bytes]:
    """Traces with spans of both services."""
    of: dict[str, set[bytes]] = {"isthmus-edge": set(), "isthmus-cloud": set()}
    for name, span in list(spans):
        of.setdefault(name, set()).add(span.trace_id)
    return of["isthmus-edge"] & of["isthmus-cloud"]
