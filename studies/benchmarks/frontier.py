"""A frontier of 3.2 MB over loopback, against a bare gRPC echo of the same chunks.

Ours is one whole `EdgeClient.infer` of a model that does next to nothing (an Identity before the cut; an in-place ReLU
and a maximum after it, which must read every byte) less the model's own time on both sides: packing, checksums,
framing, hand-overs between threads, placing the frontier and unpacking the answer remain. The echo is the least that
gRPC can do: a process of its own, the same channel options, a standing stream, the same chunks (made beforehand, sent
without serializers); nobody looks at the bytes. Judged twice: against an echo that sends the chunks back, as the word
says, and against one that answers as little as ours does (two small messages), which is the stricter comparison. In
the notes: a tail that answers all 3.2 MB against the former, and, on lines of their own, the same through the socket
alone, as to another machine (`ConnectionOptions(area_bytes=0)`). Interleaved, wall-clock.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc
import torch

from edge_client import ConnectionOptions, EdgeClient, KeepAlive
from edge_client.model_choice import ModelChoice
from edge_client.transport.wire import CHUNK_BYTES
from protos.frames import cut, serialize_client_frame
from studies.benchmarks.echo_server import METHOD, SERVICE
from studies.benchmarks.processes import cloud, echo, target
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread, interleave, spreads, wall_ns

ELEMENTS = 64 * 112 * 112
"""Floats of the frontier: 3.2 MB, what ResNet's first convolution makes of a 224 x 224 image."""

ALL_LIMIT, SMALL_LIMIT = 1.2, 1.3
HEADER_BYTES, REPLY_BYTES, ANSWER_BYTES = 220, 250, 64
"""About what ours are: the request's header, the reply's, the answer's payload."""


class EchoClient:
    """One standing stream to an `echo_server` that answers with ``answers`` messages."""

    def __init__(self, address: str, answers: int) -> None:
        self._answers = answers
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # those of edge_client.dial
        options: list[tuple[str, Any]] = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.max_send_message_length", -1),
            *KeepAlive().options(),
        ]
        self._channel = grpc.insecure_channel(address, options=options)
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call: Iterator[bytes] = iter(method(iter(self._out.get, None)))

    def __enter__(self) -> EchoClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._out.put(None)
        self._channel.close()

    def send(self, messages: list[bytes]) -> None:
        """One request and its answer."""
        for message in messages:
            self._out.put(message)
        for _ in range(self._answers):
            next(self._call)


def measure(options: Options) -> Row:
    x = torch.randn(1, ELEMENTS, generator=torch.Generator().manual_seed(1))
    payload = memoryview(x.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    chunks = [bytes(serialize_client_frame(chunk)) for chunk in cut(1, [payload], CHUNK_BYTES)]
    messages = [bytes(HEADER_BYTES), *chunks]
    count = str(len(messages))
    shape = tuple(x.shape)
    with (
        cloud("Bare", "BareBack", shape=shape, threads=options.threads) as address,
        echo(count, str(REPLY_BYTES), str(ANSWER_BYTES)) as small_echo,
        echo(count, "0") as full_echo,
        EdgeClient(address, ModelChoice(target("Bare"), device="cpu", threads=options.threads), "before") as small,
        EdgeClient(address, ModelChoice(target("BareBack"), device="cpu", threads=options.threads), "before") as full,
        EdgeClient(
            address,
            ModelChoice(target("Bare"), device="cpu", threads=options.threads),
            "before",
            connection=ConnectionOptions(area_bytes=0),
        ) as apart,
        EchoClient(small_echo, 2) as small_bare,
        EchoClient(full_echo, len(messages)) as full_bare,
    ):
        times: dict[str, list[dict[str, int]]] = {"small": [], "full": [], "apart": []}
        run = {
            "small": lambda: times["small"].append(small.infer(x).times.as_dict()),
            "small echo": lambda: small_bare.send(messages),
            "full": lambda: times["full"].append(full.infer(x).times.as_dict()),
            "full echo": lambda: full_bare.send(messages),
        }
        measured = interleave(run, options.repeats(200), wall_ns, warm_up=10)
        # by itself: what runs in turns shares the caches
        run = {
            "apart": lambda: times["apart"].append(apart.infer(x).times.as_dict()),
            "echo beside it": lambda: full_bare.send(messages),
        }
        measured |= interleave(run, options.repeats(200), wall_ns, warm_up=10)
    without = {
        name: [
            whole - one["edge_compute"] - one["server_compute"]
            for whole, one in zip(measured[name], own[10:], strict=True)
        ]
        for name, own in times.items()
    }
    found = spreads({**measured, **{f"{name} without model": values for name, values in without.items()}}, 1e-6)

    def against(ours: str, bare: str) -> float:
        return found[ours].median / found[bare].median

    bare_ms = (
        f"{found['small without model'].median:.2f} ms (with the model's work {found['small'].median:.2f}) against"
    )
    what = "3.2 MB frontier over loopback / bare echo"
    lines = (
        Line(
            f"{what} of all chunks",
            against("small without model", "full echo"),
            "x",
            ALL_LIMIT,
            f"{bare_ms} {found['full echo'].median:.2f} ms; when ours answers 3.2 MB, too, "
            f"{against('full without model', 'full echo'):.2f} x",
        ),
        Line(
            f"{what} with a small answer",
            against("small without model", "small echo"),
            "x",
            SMALL_LIMIT,
            f"{bare_ms} {found['small echo'].median:.2f} ms; lower quartiles "
            f"{found['small without model'].low / found['small echo'].low:.2f} x; {len(without['small'])} rounds",
        ),
        Line(
            "... without shared memory / bare echo of all chunks",
            against("apart without model", "echo beside it"),
            "x",
            None,
            f"{found['apart without model'].median:.2f} ms against {found['echo beside it'].median:.2f} ms",
        ),
    )
    where = {
        kind: {name: Spread.of([one[name] for one in own[10:]]).scaled(1e-6).as_dict() for name in own[0]}
        for kind, own in times.items()
    }
    details = {
        "payload_bytes": payload.nbytes,
        "ms": {name: one.as_dict() for name, one in found.items()},
        "where_ms": where,
    }
    return Row(lines, details)
