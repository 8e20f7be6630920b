"""`LinkProber`: rounds of so many bytes there and so many back on a standing stream, beside the requests' own.

A round's frames are cut, serialized and received as a request's are (a small one for the header, then chunks; one
thread sends, one receives, a third waits), so that it costs what a request of its size costs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import grpc

from edge_client.credentials import Credentials
from edge_client.dial import check_address, dial
from edge_client.load import Load
from edge_client.transport import KeepAlive, verdict, wire
from protos import padding
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError, RemoteError, ServerUnavailable

METHOD: Final = "/isthmus.v1.Split/Probe"
HEADER_BYTES: Final = 1 << 10  # a request's header goes in a frame of its own
KEEP_ALIVE: Final = KeepAlive(every=5.0, timeout=10.0)  # a ping waits behind the bytes of a slow link


@dataclass(frozen=True, slots=True)
class Round:
    """One answered round (ns)."""

    nbytes: int
    answer_bytes: int
    total_ns: int
    server_ns: int
    receive_ns: int
    download_ns: int
    """First byte of the answer here -> last."""
    load: Load

    @property
    def network_ns(self) -> int:
        """The round less the server's own time."""
        return max(0, self.total_ns - self.server_ns)


class LinkProber:
    """Measures the link to one server. Opened with the first round, and again after one that failed; one round at a
    time (others wait for their turn). Use as a context manager, or call `close`.
    """

    def __init__(
        self, server: str, chunk_bytes: int = wire.CHUNK_BYTES, credentials: Credentials | None = None
    ) -> None:
        self.server = check_address(server)
        self._credentials = credentials or Credentials()
        self._chunk_bytes = chunk_bytes
        self._turn = threading.Lock()
        self._stream: _Stream | None = None
        self._closed = False

    def __enter__(self) -> LinkProber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream, and a round that is under way with ServerUnavailable."""
        self._closed = True
        if (stream := self._stream) is not None:
            stream.close()

    def round(self, nbytes: int, answer_bytes: int = 0, timeout: float = 30.0) -> Round:
        """One round. Raises ServerUnavailable when there is no answer within ``timeout`` seconds, or no server, and
        what the server refuses by its name (Disagreement: it is too old to be probed).
        """
        return self.train([(nbytes, answer_bytes)], timeout)[0]

    def train(self, rounds: Sequence[tuple[int, int]], timeout: float = 30.0) -> list[Round]:
        """Rounds of (bytes up, bytes down) sent back to back, without waiting for the answers; the rest as `round`.

        What the second takes to arrive (`Round.receive_ns`) tells the rate of the link, whatever its latency, and
        whatever burst a token bucket forgave the first. ``total_ns`` of each counts from the beginning of the train.
        """
        with self._turn:
            if self._stream is None and not self._closed:
                self._stream = _Stream(self.server, self._chunk_bytes, self._credentials)
            stream = self._stream
            try:
                if self._closed or stream is None:  # looked at last: `close` may have come before there was a stream
                    raise ServerUnavailable(f"the prober of {self.server} is closed")
                return stream.train(rounds, timeout)
            except BaseException:
                if stream is not None:
                    stream.close()
                self._stream = None
                raise


class _Stream:
    """One gRPC stream. It lives until its first error."""

    def __init__(self, server: str, chunk_bytes: int, credentials: Credentials) -> None:
        self._server = server
        self._credentials = credentials
        self._chunk_bytes = chunk_bytes
        self._outgoing: queue.SimpleQueue[padding.Padding | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[split_pb2.ProbeReply, int, int] | IsthmusError] = queue.SimpleQueue()
        self._channel = dial(server, KEEP_ALIVE, credentials)
        method = self._channel.stream_stream(
            METHOD, request_serializer=padding.serialize_frame, response_deserializer=padding.parse_reply
        )
        self._call: Any = method(iter(self._outgoing.get, None))
        threading.Thread(target=self._read, name=f"edge-probe {server}", daemon=True).start()

    def train(self, rounds: Sequence[tuple[int, int]], timeout: float) -> list[Round]:
        began, until = time.perf_counter_ns(), time.monotonic() + timeout
        for nbytes, answer_bytes in rounds:
            for frame in _frames(nbytes, answer_bytes, self._chunk_bytes):
                self._outgoing.put(frame)
        return [self._take(nbytes, answer_bytes, began, until, timeout) for nbytes, answer_bytes in rounds]

    def _take(self, nbytes: int, answer_bytes: int, began: int, until: float, timeout: float) -> Round:
        try:
            answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise ServerUnavailable(
                f"{self._server} did not answer a probe of {nbytes} bytes within {timeout:.3g} s"
            ) from None
        ended = time.perf_counter_ns()
        if isinstance(answer, IsthmusError):
            raise answer
        reply, first_ns, last_ns = answer
        if reply.received_bytes != nbytes:
            raise RemoteError(f"{self._server} received {reply.received_bytes} of a probe's {nbytes} bytes")
        if reply.server_ns > ended - began:
            raise RemoteError(
                f"{self._server} says that it spent {reply.server_ns} ns on a probe of {ended - began} ns"
            )
        load = Load(reply.load.pending, reply.load.workers, reply.load.queue_ns)
        return Round(nbytes, answer_bytes, ended - began, reply.server_ns, reply.receive_ns, last_ns - first_ns, load)

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()

    def _read(self) -> None:
        first_ns: int | None = None
        try:
            for reply in self._call:
                now_ns = time.perf_counter_ns()
                first_ns = first_ns or now_ns
                if isinstance(reply, padding.Padding):
                    bytearray(reply.data)  # as an answer's chunk is copied into its payload
                elif reply.last:
                    self._answers.put((reply, first_ns, time.perf_counter_ns()))
                    first_ns = None
            self._answers.put(ServerUnavailable(f"{self._server} ended the probe"))
        except grpc.RpcError as error:
            self._answers.put(verdict.refusal(error, self._server, self._credentials))
        except Exception as error:
            self._answers.put(RemoteError(f"the probe of {self._server} failed: {error!r}"))


def _frames(nbytes: int, answer_bytes: int, chunk_bytes: int) -> Iterator[padding.Padding]:
    head = min(nbytes, HEADER_BYTES)
    left = nbytes - head
    for data in padding.pieces(head, HEADER_BYTES):
        if left:
            yield padding.Padding(data)
        else:
            yield padding.Padding(data, last=True, answer_bytes=answer_bytes)
    if not nbytes:
        yield padding.Padding(memoryview(b""), last=True, answer_bytes=answer_bytes)
    for data in padding.pieces(left, chunk_bytes):
        left -= data.nbytes
        yield padding.Padding(data, last=not left, answer_bytes=0 if left else answer_bytes)
