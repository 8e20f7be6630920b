"""`LinkProber`: rounds of a given number of bytes in each direction on a separate stream, beside requests.

A round's frames are cut, serialized and received like a request's (a small one for the header, then chunks; one thread
sends, one receives, a third waits), so that it costs what a request of its size costs.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import grpc

from edge_client.call import Load
from edge_client.credentials import Credentials
from edge_client.dial import check_address, dial, hang_up, why_not
from edge_client.planning.link import Curve, Link, Speed, speed_of
from edge_client.transport import KeepAlive, options, wire
from edge_client.user_text import check_seconds
from protos import padding
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame, IsthmusError, RemoteError, ServerUnavailable
from shared_hooks.profiling.profile import Quartiles

METHOD: Final = "/isthmus.v1.Split/Probe"
HEADER_BYTES: Final = 1 << 10  # a request's header has a frame of its own
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
        """The round without the server's own time."""
        return max(0, self.total_ns - self.server_ns)


class LinkProber:
    """Measures the link to one server. The stream is opened with the first round, and again after a failed one; one
    round at a time (others wait). Use it as a context manager, or call `close`.
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
        """End the stream; a round in progress ends with ServerUnavailable."""
        self._closed = True
        if (stream := self._stream) is not None:
            stream.close()

    def round(self, nbytes: int, answer_bytes: int = 0, timeout: float = 30.0) -> Round:
        """Return one round. Raises ServerUnavailable without an answer within ``timeout`` seconds, or without a server,
        and the server's refusals (Disagreement: it is too old to be probed).
        """
        return self.train([(nbytes, answer_bytes)], timeout)[0]

    def train(self, rounds: Sequence[tuple[int, int]], timeout: float = 30.0) -> list[Round]:
        """Rounds of (bytes up, bytes down) sent back to back, without waiting for the answers; otherwise as `round`.

        The arrival time of the second (`Round.receive_ns`) shows the rate of the link, independent of its latency, and
        of a burst that a token bucket allowed the first. ``total_ns`` of each counts from the beginning of the train.
        """
        with self._turn:
            if self._stream is None and not self._closed:
                self._stream = _Stream(self.server, self._chunk_bytes, self._credentials)
            stream = self._stream
            try:
                # checked last: `close` may have been called before there was a stream
                if self._closed or stream is None:
                    raise ServerUnavailable(f"the prober of {self.server} is closed")
                return stream.train(rounds, timeout)
            except BaseException:
                if stream is not None:
                    stream.close()
                self._stream = None
                raise


class _Stream:
    """One gRPC stream, until its first error."""

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
                f"{self._server} reports that it spent {reply.server_ns} ns on a probe of {ended - began} ns"
            )
        load = Load(reply.load.pending, reply.load.workers, reply.load.queue_ns)
        return Round(nbytes, answer_bytes, ended - began, reply.server_ns, reply.receive_ns, last_ns - first_ns, load)

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        hang_up(self._channel)

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
            self._answers.put(options.refusal(error, self._server, self._credentials))
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


# What the link carries, measured; and the server's profile, fetched.


SIZES: Final = (0, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
ANSWER_SIZES: Final = (0, 1 << 10, 16 << 10, 256 << 10, 1 << 20)
WARMUP: Final = 5
REPETITIONS: Final = 15
PROFILE_SECONDS: Final = 600.0
LEAST: Final = 3
TELLING: Final = 16 << 10
"""The least difference in bytes of two sizes from which a larger one is extrapolated: smaller ones are noise."""
RUNGS: Final = (TELLING, 16 * TELLING, 256 * TELLING)
"""The number of sizes tried on the way to a larger one."""
SHORT: Final = 0.05
"""The share of the whole time that a round may take to be repeated."""
FEW: Final = 7
"""Rounds of each size that is sent only to tell how fast a link is."""
WIDE: Final = 1.5
"""The speed's interval is to be no wider than that, from end to end."""
MOST_PROBED: Final = 1 << 20
BUSY_SECONDS: Final = 0.003
SOON_SECONDS: Final = 1.0
"""After which it is asked why there is no connection yet."""
Progress = Callable[[int, int, str], None]


def probe(
    server: str,
    sizes: Sequence[int] = SIZES,
    answer_sizes: Sequence[int] = ANSWER_SIZES,
    seconds: float = 3.0,
    on_progress: Progress | None = None,
    patience: float = 15.0,
    credentials: Credentials | None = None,
) -> tuple[Link, Load]:
    """Rounds of all sizes alternately on one stream, for about ``seconds`` in all: the median of each, of at least
    `LEAST` rounds unless the link is too slow for that. If these do not show the link's speed and time is left, larger
    rounds follow, up to `MOST_PROBED` bytes.

    A size that would take too long is left out: `Curve` extrapolates with the stated speed. Before each round this
    thread computes for `BUSY_SECONDS`, as before a request: clocks, caches and a CPU quota are then as after computing
    (on a quarter of a core that adds 4 ms to a round trip of 25). Raises ServerUnavailable without a server or without
    an answer for ``patience`` seconds, and Disagreement for a server too old to be probed.
    """
    check_seconds("seconds", seconds)
    up = [(nbytes, 0) for nbytes in sorted({0, max(sizes, default=0) // 2, *sizes})]
    down = [(0, nbytes) for nbytes in sorted({0, *answer_sizes})]
    total = LEAST * (len(up) + len(down) - 1)
    found: dict[tuple[int, int], list[Round]] = {}
    with LinkProber(server, credentials=credentials) as prober:
        for _ in range(WARMUP):
            last = prober.round(1 << 10, 0, patience)
        began = time.monotonic()

        def measure(kind: tuple[int, int]) -> Round:
            if on_progress:
                done = sum(len(rounds) for rounds in found.values())
                on_progress(min(done, total), total, f"{kind[1]} bytes down" if kind[1] else f"{kind[0]} bytes up")
            _compute(BUSY_SECONDS)
            one = prober.round(*kind, patience)
            found.setdefault(kind, []).append(one)
            return one

        for way in (up, down):
            known: dict[int, float] = {}
            rungs = {(one, 0) if way is up else (0, one) for one in RUNGS if one < max(way[-1])}
            for kind in sorted({*way, *rungs}):

                def affordable(nbytes: int, known: dict[int, float] = known) -> bool:
                    spent = time.monotonic() - began
                    return len(known) < 2 or LEAST * (spent + _foreseen(known, nbytes) / 1e9) <= seconds

                again = max(known, default=0)
                for _ in range(LEAST - 1):  # a hiccup of the last one is not the link's
                    if affordable(max(kind)) or known[again] / 1e9 > SHORT * seconds:
                        break
                    took = prober.round(*((again, 0) if way is up else (0, again)), patience).total_ns
                    known[again] = min(known[again], float(took))
                if not affordable(max(kind)):
                    break
                if kind in way:
                    last = found[kind][0] if kind in found else measure(kind)
                else:
                    last = prober.round(*kind, patience)
                known[max(kind)] = float(last.total_ns)
        for turn in range(1, REPETITIONS):
            spent = time.monotonic() - began
            if spent > (seconds if turn >= LEAST else 2 * seconds):  # a slow link: fewer rounds rather than a long wait
                break
            for kind in list(found):
                last = measure(kind)
        requested = {kind: list(rounds) for kind, rounds in found.items()}
        # A fast link shows only in larger rounds, as does one whose bucket lets a small round pass free: their result
        # must agree with the rounds before. Requests are never that large: they are not part of the curve.
        size, before, reported = max(nbytes for nbytes, _ in found), Speed(None, None, None), _speed(found, 0)
        while not (reported.ratio <= WIDE and reported.overlaps(before)) and 0 < size < MOST_PROBED:
            left = 1.5 * seconds - (time.monotonic() - began)
            if 6 * FEW * (_middle(found[size, 0]) / 1e9 + BUSY_SECONDS) > left:
                break
            size = min(4 * size, MOST_PROBED)
            try:
                for _ in range(FEW):
                    for nbytes in (size // 2, size):
                        measure((nbytes, 0))
            except IsthmusError:  # the server refuses the codec, or more requests
                break
            before, reported = reported, _speed(found, 0)
        if on_progress:
            on_progress(total, total, "done")
    nothing = _middle(requested[0, 0])
    ups = [(nbytes, _middle(rounds)) for (nbytes, answer), rounds in sorted(requested.items()) if not answer]
    downs = [(answer, max(0.0, _middle(rounds) - nothing)) for (_, answer), rounds in requested.items() if answer]
    known_down = _speed(found, 1)
    return Link(
        Curve(tuple(ups), reported),
        Curve(((0, 0.0), *downs), known_down),
        measured_up=reported,
        measured_down=known_down,
    ), last.load


def _foreseen(known: Mapping[int, float], nbytes: int) -> float:
    """Return the expected nanoseconds of a round of ``nbytes``, from smaller ones; 0 if these do not show it yet."""
    largest = max(known, default=0)
    smaller = [one for one in known if one <= largest - TELLING]
    if not smaller:
        return 0.0
    slope = (known[largest] - known[max(smaller)]) / (largest - max(smaller))
    return known[largest] + max(0.0, slope) * (nbytes - largest)


def _speed(found: Mapping[tuple[int, int], Sequence[Round]], way: int) -> Speed:
    """Return the speed from rounds by (bytes up, bytes down), using those with bytes in one direction."""
    return speed_of(
        {kind[way]: [float(one.network_ns) for one in rounds] for kind, rounds in found.items() if not kind[1 - way]}
    )


def round_trip(server: str, patience: float = 15.0, credentials: Credentials | None = None) -> float:
    """Return the seconds of an empty round, the median of a few. Raises as `probe` does."""
    with LinkProber(server, credentials=credentials) as prober:
        for _ in range(WARMUP):
            prober.round(0, 0, patience)
        return _middle([prober.round(0, 0, patience) for _ in range(WARMUP)]) / 1e9


def fetch_profile(
    server: str,
    model_id: str,
    warmup: int = 0,
    repetitions: int = 0,
    seconds: float = 0.0,
    on_progress: Progress | None = None,
    *,
    codecs: Sequence[str] = (),
    weights_hash: str = "",
    fresh: bool = False,
    patience: float = 15.0,
    credentials: Credentials | None = None,
    following: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the cloud's side of a model's profile, for `shared_hooks.profiling.profile.from_json`.

    ``codecs``: whose decoding is also measured, as far as the server knows them. ``weights_hash``: of the model's
    version. A server keeps what it measured with equal settings, unless ``fresh``; a setting of 0 is the server's own.
    It may have to wait for other profiles, at most `PROFILE_SECONDS` in all. ``following``: names of next servers of a
    chain that lead to another one: {"profile": its profile, "link": the link to it, as `Link.as_dict`}.

    Raises ServerUnavailable, UnknownModel, Disagreement for a server too old, CutRefused for a model without an
    example, SpecError for settings beyond the server's limits.
    """
    check_address(server)
    credentials = credentials or Credentials()
    with dial(server, KeepAlive(every=5.0, timeout=5.0), credentials) as channel:
        _wait_for(channel, server, patience, credentials)
        method = channel.unary_stream(
            "/isthmus.v1.Split/Profile",
            request_serializer=split_pb2.ProfileRequest.SerializeToString,
            response_deserializer=split_pb2.ProfileReply.FromString,
        )
        call = method(
            split_pb2.ProfileRequest(
                model_id=model_id,
                warmup=warmup,
                repetitions=repetitions,
                seconds=seconds,
                fresh=fresh,
                codecs=codecs,
                weights_hash=weights_hash,
                next=following,
            ),
            timeout=PROFILE_SECONDS,
        )
        try:
            for reply in call:
                if reply.WhichOneof("reply") == "profile":
                    return _parsed(reply.profile, server)
                if on_progress:
                    on_progress(reply.progress.done, reply.progress.total, reply.progress.what)
        except grpc.RpcError as error:
            raise options.refusal(error, server, credentials) from None
        finally:
            call.cancel()
    raise BadFrame(f"{server} ended its answer without a profile")


def _wait_for(channel: grpc.Channel, server: str, patience: float, credentials: Credentials) -> None:
    ready = grpc.channel_ready_future(channel)
    first = min(SOON_SECONDS, patience)
    for seconds in (first, patience - first):
        try:
            ready.result(timeout=seconds)
            return
        except grpc.FutureTimeoutError:
            if (found := why_not(server, credentials)) is not None:
                raise found from None
    raise ServerUnavailable(f"no server at {server} for {patience:g} s")


def _parsed(data: bytes, server: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"the profile that {server} sent is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadFrame(f"the profile that {server} sent is not an object")
    return found


def _took(rounds: Sequence[Round]) -> Quartiles:
    return Quartiles.of([one.network_ns for one in rounds])


def _middle(rounds: Sequence[Round]) -> float:
    return _took(rounds).middle


def _compute(seconds: float) -> None:
    """Use processor time of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
