"""One trace for a request, across both sides; and what a stranger can say of his."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.models import ServedModel
from cloud_server.telemetry import ServerTraces as CloudTraces
from cloud_server.transport import CloudServer
from edge_client import EdgeClient
from edge_client.tracing import Traces as EdgeTraces
from shared_hooks.errors import ModelFailed
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.models import load_spec
from tests.cloud_server.fakes import CoreClient, FakeEngine, cancel, header, make_crossing
from tests.cloud_server.real import Process
from tests.edge_client.test_chain import chained
from tests.starts import Started
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
MOODY = "moody=tests.edge_client.small_models:Moody"


class Memory(InMemorySpanExporter):
    """Finished spans of one side."""

    def __init__(self) -> None:
        super().__init__()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.get_finished_spans() if span.name == name]

    def within(self, of: ReadableSpan) -> list[ReadableSpan]:
        return [span for span in self.get_finished_spans() if span.parent and span.parent.span_id == id_of(of)]


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


@contextmanager
def both(edge: Memory, cloud: Memory) -> Iterator[EdgeClient]:
    there, here = Lifecycle("cloud"), Lifecycle("edge")
    there.register(CloudTraces(cloud.provider))
    here.register(EdgeTraces(edge.provider))
    served = ServedModel(ModelEntry(load_spec(MOODY)), torch.device("cpu"), there)
    server = CloudServer(Core([served], lifecycle=there), "127.0.0.1:0")
    server.start()
    try:
        with EdgeClient(f"127.0.0.1:{server.port}", MOODY, "first", lifecycle=here) as client:
            yield client
    finally:
        server.stop(grace=1)


def test_one_trace_across_both_sides() -> None:
    edge, cloud = Memory(), Memory()
    with both(edge, cloud) as client:
        with edge.provider.get_tracer("app").start_as_current_span("application") as mine:
            answer = client.infer(torch.ones(1, 4))
        eventually(lambda: cloud.named("serve"))
    (infer,), (serve,) = edge.named("infer"), cloud.named("serve")
    assert trace_of(infer) == trace_of(serve) == mine.get_span_context().trace_id
    assert infer.parent is not None and infer.parent.span_id == mine.get_span_context().span_id
    assert serve.parent is not None and serve.parent.is_remote and serve.parent.span_id == id_of(infer)
    assert [span.name for span in cloud.within(serve)] == ["receive", "queue", "decode", "inject", "compute", "encode"]
    names = [span.name for span in edge.within(infer)]
    assert [name for name in names if name in ("head", "encode", "wait for the answer", "decode")] == [
        "head", "encode", "wait for the answer", "decode",
    ]  # fmt: skip
    # What the spans last is what the answer says, and none is longer than the request.
    assert lasted(*edge.within(infer)) == answer.times.end_to_end
    assert lasted(*cloud.within(serve)) <= lasted(serve)
    assert infer.attributes is not None and serve.attributes is not None
    assert infer.attributes["isthmus.cut"] == serve.attributes["isthmus.cut"] == "first"
    assert infer.attributes["isthmus.request"] == serve.attributes["isthmus.request"]


def lasted(*spans: ReadableSpan) -> int:
    return sum((span.end_time or 0) - (span.start_time or 0) for span in spans)


def test_a_failure_is_an_error_on_both_sides() -> None:
    edge, cloud = Memory(), Memory()
    with both(edge, cloud) as client:
        client.infer(torch.ones(1, 4))
        with pytest.raises(ModelFailed):
            client.infer(torch.full((1, 4), 101.0))
        eventually(lambda: len(cloud.named("serve")) == 2)
    for span in (edge.named("infer")[1], cloud.named("serve")[1]):
        assert span.status.status_code.name == "ERROR" and span.attributes is not None
        assert span.attributes["error.type"] == "ModelFailed"


def test_the_next_servers_span_is_within_the_one_that_handed_on() -> None:
    edge, memories = Memory(), (Memory(), Memory())
    lifecycle = Lifecycle("edge")
    lifecycle.register(EdgeTraces(edge.provider))
    spec = load_spec(MOODY)
    with chained(spec, 2) as stations:
        for station, memory in zip(stations, memories, strict=True):
            station.core.lifecycle.register(CloudTraces(memory.provider))
        with EdgeClient([stations[0].address, "next"], MOODY, ["first", "first"], lifecycle=lifecycle) as client:
            client.infer(torch.ones(1, 4))
        eventually(lambda: all(memory.named("serve") for memory in memories))
    (infer,), ((gateway,), (last,)) = edge.named("infer"), (memory.named("serve") for memory in memories)
    assert gateway.parent is not None and gateway.parent.span_id == id_of(infer)
    assert last.parent is not None and last.parent.span_id == id_of(gateway)
    assert trace_of(infer) == trace_of(gateway) == trace_of(last)
    assert "wait for the next server" in [span.name for span in memories[0].within(gateway)]
    assert lasted(*memories[0].within(gateway)) <= lasted(gateway)


def test_whole_models_have_a_trace_without_a_server() -> None:
    memory, lifecycle = Memory(), Lifecycle("edge")
    lifecycle.register(EdgeTraces(memory.provider))
    with EdgeClient(None, MOODY, "edge-only", lifecycle=lifecycle) as client:
        client.infer(torch.ones(1, 4))
    (infer,) = memory.named("infer")
    assert "head" in [span.name for span in memory.within(infer)]


class TestStrangers:
    @pytest.fixture
    def cloud(self) -> Memory:
        return Memory()

    @pytest.fixture
    def client(self, cloud: Memory) -> Iterator[CoreClient]:
        lifecycle = Lifecycle("cloud")
        lifecycle.register(CloudTraces(cloud.provider))
        with Core([FakeEngine()], lifecycle=lifecycle) as core:
            yield CoreClient(core)

    @pytest.mark.parametrize(
        "said",
        [
            "",
            "x" * 55,
            "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
            "00-" + "g" * 32 + "-" + "1" * 16 + "-01",
            "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
            "00-" + "1" * 32 + "-" + "1" * 16 + "-0\n",
            "00-" + "1" * 32 + "-" + "1" * 16 + "-01-" + "x" * 100_000,
        ],
    )
    def test_garbage_is_no_trace(self, client: CoreClient, cloud: Memory, said: str) -> None:
        client.ask(1, b"abc", traceparent=said)
        assert client.answer(1).reply
        eventually(lambda: cloud.named("serve"))
        assert cloud.named("serve")[0].parent is None

    def test_valid_trace_context_is_continued(self, client: CoreClient, cloud: Memory) -> None:
        client.ask(1, b"abc", traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01")
        assert client.answer(1).reply
        eventually(lambda: cloud.named("serve"))
        assert trace_of(cloud.named("serve")[0]) == int("1" * 32, 16)

    def test_refused_and_cancelled_requests(self, client: CoreClient, cloud: Memory) -> None:
        said = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
        client.ask(1, b"abc", payload_bytes=5, traceparent=said)
        client.send(header(2, make_crossing(3), traceparent=said), cancel(2))
        assert client.answer(1).failed and client.answer(2).failed
        eventually(lambda: len(cloud.named("serve")) == 2)
        assert [span.status.status_code.name for span in cloud.named("serve")] == ["ERROR", "UNSET"]
        assert {trace_of(span) for span in cloud.named("serve")} == {int("1" * 32, 16)}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for one in request.resource_spans:
            service = {each.key: each.value.string_value for each in one.resource.attributes}["service.name"]
            self.spans += [(service, span) for scope in one.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, *names: str) -> list[Any]:
        return [span for service, span in self.spans if (service, span.name) == names]

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


def run_edge(words: Sequence[str], **environment: str) -> str:
    run = ["run", "--no-progress", "--threads", "1", *words]
    done = Started("edge_client", run, cwd=ROOT, env={**os.environ, **environment})
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, out + err
    return out + err


def test_two_processes_and_a_collector(tmp_path: Path) -> None:
    image = ROOT / "shared_hooks" / "models" / "digits" / "images"
    with Collector() as collector:
        file = tmp_path / "server.toml"
        file.write_text(f'[tracing]\nendpoint = "{collector.address}"\n')
        process = Process(str(file), cwd=ROOT)
        try:
            words = ["--server", f"127.0.0.1:{process.port}", "--split", "stage2.0.conv1", "--input"]
            run_edge([*words, str(sorted(image.glob("*.png"))[0])], OTEL_EXPORTER_OTLP_ENDPOINT=collector.address)
            process.signal(signal.SIGTERM)
            assert process.wait() == 0, process.log
        finally:
            process.close()
        (infer,), (serve,) = collector.named("isthmus-edge", "infer"), collector.named("isthmus-cloud", "serve")
        assert infer.trace_id == serve.trace_id and serve.parent_span_id == infer.span_id
        within = {span.name for _, span in collector.spans if span.parent_span_id == serve.span_id}
        assert within >= {"decode", "inject", "compute", "encode"}
