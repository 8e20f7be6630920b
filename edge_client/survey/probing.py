"""What the link carries, measured; and the server's profile, fetched."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import grpc

from edge_client.credentials import Credentials
from edge_client.dial import check_address, dial
from edge_client.handshake import why_not
from edge_client.load import Load
from edge_client.planning.link import Curve, Link
from edge_client.planning.speed import Speed, speed_of
from edge_client.survey.prober import LinkProber, Round
from edge_client.transport import KeepAlive, check_seconds, verdict
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame, IsthmusError, ServerUnavailable
from shared_hooks.profiling.quartiles import Quartiles

SIZES: Final = (0, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
ANSWER_SIZES: Final = (0, 1 << 10, 16 << 10, 256 << 10, 1 << 20)
WARMUP: Final = 5
REPETITIONS: Final = 15
PROFILE_SECONDS: Final = 600.0
LEAST: Final = 3
TELLING: Final = 16 << 10
"""Bytes that two sizes must be apart to tell what a larger one would take: of a few bytes more there is only noise."""
RUNGS: Final = (TELLING, 16 * TELLING, 256 * TELLING)
"""Tried on the way to a larger size."""
SHORT: Final = 0.05
"""The share of all the time that a round may take to be tried again."""
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
    """Rounds of all sizes in turns on one stream, about ``seconds`` in all: the middle of each, `LEAST` rounds of it
    unless the link is too slow for that. Where these do not tell how fast the link is and there is time left, larger
    rounds follow, up to `MOST_PROBED` bytes, for that alone.

    A size that would take more than the time is left out: `Curve` continues at the speed that was stated. Before each
    round this thread computes for `BUSY_SECONDS`, as a request's does: clocks, caches and a CPU quota are as computing
    leaves them (on a quarter of a core that makes 4 ms of a round trip of 25). Raises ServerUnavailable without a
    server or without an answer for ``patience`` seconds, and Disagreement for a server too old to be probed.
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
            if spent > (seconds if turn >= LEAST else 2 * seconds):  # a slow link: better few rounds than a long wait
                break
            for kind in list(found):
                last = measure(kind)
        asked = {kind: list(rounds) for kind, rounds in found.items()}
        # A fast link shows in larger rounds only, and one whose bucket forgives all of a small one: what they tell is
        # to agree with the rounds before. Requests send no such: they are no part of the curve.
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
            except IsthmusError:  # the server takes no such, or no more
                break
            before, reported = reported, _speed(found, 0)
        if on_progress:
            on_progress(total, total, "done")
    nothing = _middle(asked[0, 0])
    ups = [(nbytes, _took(rounds)) for (nbytes, answer), rounds in sorted(asked.items()) if not answer]
    downs = [(answer, max(0.0, _middle(rounds) - nothing)) for (_, answer), rounds in asked.items() if answer]
    told_down = _speed(found, 1)
    return Link(
        Curve(tuple((nbytes, took.middle) for nbytes, took in ups), reported),
        Curve(((0, 0.0), *downs), told_down),
        measured_up=reported,
        measured_down=told_down,
        quarters=(
            Curve(tuple((n, took.q1) for n, took in ups), reported),
            Curve(tuple((n, took.q3) for n, took in ups), reported),
        ),
    ), last.load


def _foreseen(known: Mapping[int, float], nbytes: int) -> float:
    """Nanoseconds that a round of ``nbytes`` may take, by what smaller ones took; 0 where these tell nothing yet."""
    largest = max(known, default=0)
    smaller = [one for one in known if one <= largest - TELLING]
    if not smaller:
        return 0.0
    slope = (known[largest] - known[max(smaller)]) / (largest - max(smaller))
    return known[largest] + max(0.0, slope) * (nbytes - largest)


def _speed(found: Mapping[tuple[int, int], Sequence[Round]], way: int) -> Speed:
    """The speed from rounds by (bytes up, bytes down), those that have bytes one way only."""
    return speed_of(
        {kind[way]: [float(one.network_ns) for one in rounds] for kind, rounds in found.items() if not kind[1 - way]}
    )


def round_trip(server: str, patience: float = 15.0, credentials: Credentials | None = None) -> float:
    """Seconds of a round of no bytes, the middle of a few. Raises as `probe` does."""
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
    fresh: bool = False,
    patience: float = 15.0,
    credentials: Credentials | None = None,
) -> dict[str, Any]:
    """The cloud's side of a model's profile, as `shared_hooks.profiling.profile_file.from_json` takes it.

    ``codecs``: whose decoding it also measures, those of them that it knows. A server keeps what it measured with equal
    settings until ``fresh``; a setting of 0 is the server's own. It may have
    to wait for others' profiles, but not for ever: `PROFILE_SECONDS` in all. Raises
    ServerUnavailable, UnknownModel, Disagreement for a server too old, CutRefused for a model without an example,
    SpecError for settings beyond the server's limits.
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
            raise verdict.refusal(error, server, credentials) from None
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
    """Processor time of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
