"""Ways to bring a payload from one process to another on this machine: what docs/decisions/0019-the-pipe.md weighs.

Each has a server process of its own (`pipe_server`), which takes the payload into memory of its own and answers with
300 bytes. Interleaved, wall-clock, divided by gRPC with a header and chunks of 1 MiB. Flight is measured where pyarrow
is installed (it is none of this project's packages), and said to be missing elsewhere.
"""

from __future__ import annotations

import os
import queue
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from studies.benchmarks.pipe_server import AREA, CHUNK, HEADER, METHOD, SERVICE, SHARED
from studies.benchmarks.processes import pipe
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import interleave, spreads, wall_ns

SIZES = (1_000, 173_056, 3_211_264)
CHUNK_BYTES = 1 << 20
AREA_BYTES = 8 << 20
Send = Callable[[memoryview], Any]
BEFORE = "gRPC, a header and chunks"


@contextmanager
def grpc_stream(kind: str, folder: str, *, unix: bool = False, first: int = 0, kept: bool = False) -> Iterator[Send]:
    """``first``: bytes of the payload in the header's message."""
    with _grpc(kind, folder, unix, kept) as exchange:

        def send(payload: memoryview) -> None:
            messages = [_message(HEADER, payload.nbytes, payload[:first])]
            for offset in range(min(first, payload.nbytes), payload.nbytes, CHUNK_BYTES):
                messages.append(_message(CHUNK, 0, payload[offset : offset + CHUNK_BYTES]))
            exchange(messages)

        yield send


@contextmanager
def grpc_and_area(folder: str) -> Iterator[Send]:
    """The payload in a memfd, its header by gRPC."""
    with _grpc("grpc", folder, False, True) as exchange:
        file = os.memfd_create("pipe")
        os.ftruncate(file, AREA_BYTES)
        memory = np.memmap(os.fdopen(file, "r+b", closefd=False), np.uint8)
        exchange([_message(AREA, 0, memoryview(f"/proc/{os.getpid()}/fd/{file}".encode()))])

        def send(payload: memoryview) -> None:
            memory[: payload.nbytes] = payload
            exchange([_message(SHARED, payload.nbytes, memoryview(b""))])

        yield send
        os.close(file)


@contextmanager
def _grpc(kind: str, folder: str, unix: bool, kept: bool) -> Iterator[Callable[[list[bytes]], None]]:
    """Some messages and one answer, on a standing stream."""
    place = f"unix:{_socket(folder)}" if unix else "127.0.0.1:0"
    out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with pipe(kind, place, *(["kept"] if kept else [])) as address:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(place if unix else address, options) as channel:
            method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            answers = iter(method(iter(out.get, None)))

            def exchange(messages: list[bytes]) -> None:
                for message in messages:
                    out.put(message)
                next(answers)

            yield exchange
            out.put(None)


@contextmanager
def bare_socket(folder: str) -> Iterator[Send]:
    """A Unix socket and nothing else: what the rest is measured by."""
    place = _socket(folder)
    with pipe("socket", place), socket.socket(socket.AF_UNIX) as stream:
        stream.connect(place)

        def send(payload: memoryview) -> None:
            stream.sendall(_message(HEADER, payload.nbytes, memoryview(b"")))
            stream.sendall(payload)
            left = 300
            while left:
                left -= len(stream.recv(left))

        yield send


@contextmanager
def flight_stream(folder: str, *, unix: bool = False) -> Iterator[Send]:
    """A standing exchange of Arrow's Flight, whose payloads are record batches of one column."""
    import pyarrow
    from pyarrow import flight

    place = f"grpc+unix://{_socket(folder)}" if unix else "grpc://127.0.0.1:0"
    with pipe("flight", place) as address, flight.connect(place if unix else f"grpc://{address}") as client:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"pipe"))
        begun = False

        def send(payload: memoryview) -> None:
            nonlocal begun
            array = pyarrow.Array.from_buffers(pyarrow.uint8(), payload.nbytes, [None, pyarrow.py_buffer(payload)])
            batch = pyarrow.record_batch([array], names=["payload"])
            if not begun:
                writer.begin(batch.schema)
                begun = True
            writer.write_batch(batch)
            reader.read_chunk()

        yield send
        writer.close()


def _message(kind: bytes, number: int, data: memoryview) -> bytes:
    return b"".join((kind, number.to_bytes(8, "little"), data))


def _socket(folder: str) -> str:
    return str(Path(folder, f"{len(os.listdir(folder))}.sock"))


def _ways(folder: str) -> dict[str, AbstractContextManager[Send]]:
    stream = partial(grpc_stream, "grpc", folder)
    ways: dict[str, AbstractContextManager[Send]] = {
        BEFORE: stream(),
        "gRPC, a header with the first chunk": stream(first=CHUNK_BYTES),
        "gRPC, a header with all of it": stream(first=AREA_BYTES),
        "gRPC, freed memory kept": stream(first=CHUNK_BYTES, kept=True),
        "gRPC, freed memory kept, Unix socket": stream(first=CHUNK_BYTES, kept=True, unix=True),
        "gRPC, freed memory kept, asyncio server": grpc_stream("asyncio", folder, first=CHUNK_BYTES, kept=True),
        "gRPC and shared memory": grpc_and_area(folder),
        "a bare Unix socket": bare_socket(folder),
    }
    if find_spec("pyarrow") is not None:
        ways["Flight"] = flight_stream(folder)
        ways["Flight, Unix socket"] = flight_stream(folder, unix=True)
    return ways


def measure(options: Options) -> Row:
    if find_spec("pyarrow") is None:
        options.say("  without Flight: pyarrow is not installed")
    lines: list[Line] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways = {name: stack.enter_context(way) for name, way in _ways(folder).items()}
        found: dict[int, Any] = {}
        for nbytes in SIZES:
            data = np.random.default_rng(1).integers(0, 255, nbytes, dtype=np.uint8)
            run = {name: partial(send, memoryview(data)) for name, send in ways.items()}  # type: ignore[arg-type]
            found[nbytes] = spreads(interleave(run, options.repeats(200), wall_ns, warm_up=10), 1e-6)
        for name in ways:
            times = ", ".join(f"{found[nbytes][name].median:.2f}" for nbytes in SIZES)
            against = found[SIZES[-1]][name].median / found[SIZES[-1]][BEFORE].median
            lines.append(Line(f"3.2 MB: {name}", against, "x", None, f"1 kB, 173 kB, 3.2 MB: {times} ms"))
        details = {str(nbytes): {name: one.as_dict() for name, one in row.items()} for nbytes, row in found.items()}
    return Row(tuple(lines), {"ms": details})
