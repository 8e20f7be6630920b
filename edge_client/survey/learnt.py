"""What a server takes to decode the codec "basis": asked with real requests, as a server profiles without books.

Each cut that has books gets a few requests of the frontier that profiles are made of, and each answer says how long its
decoding took. Nothing else of them is used.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from edge_client.credentials import Credentials
from edge_client.planning.codecs import LEARNT
from edge_client.request import Books
from edge_client.survey.loaded import Loaded
from edge_client.transport import Connection, ConnectionOptions, Exchange, Outgoing, Stamps, wire
from shared_hooks.codecs.basis import Basis
from shared_hooks.errors import DeadlineExceeded, Disagreement, IsthmusError, ServerUnavailable
from shared_hooks.profiling.profile import CodecProfile, CutProfile, Profile
from shared_hooks.profiling.profiler import Progress
from shared_hooks.profiling.quartiles import Quartiles
from shared_hooks.profiling.timers import HeadTimer, Inputs

REQUESTS: Final = 5
"""At each cut, after one that does not count: it brings the books, and the server's memory for the answer is new."""
REQUEST_SECONDS: Final = 30.0


def asked_of_servers(codecs: Iterable[str]) -> tuple[str, ...]:
    """Those whose decoding a server measures by itself, on frontiers of its own."""
    return tuple(name for name in codecs if name not in LEARNT)


def with_books(
    cloud: Profile,
    loaded: Loaded,
    books: Mapping[str, Books],
    server: str,
    warn: Callable[[str], None],
    on_progress: Progress = lambda done, total, what: None,
    *,
    seconds: float = 20.0,
    patience: float = 15.0,
    credentials: Credentials | None = None,
) -> Profile:
    """``cloud``, the profile of this server, with "basis" at the cuts of ``books``. No further cut is begun after
    ``seconds``. ``warn`` hears of cuts that could not be measured; these have no "basis".

    Raises ServerUnavailable, and what ``on_progress`` raises.
    """
    cuts = [cut for cut in cloud.cuts if cut.name in books]
    if not cuts:
        return cloud
    timer = HeadTimer(loaded.wrapped, Inputs(loaded.wrapped, loaded.args, loaded.kwargs), Basis.name, books)
    found: dict[str, CodecProfile] = {}
    until, ids = time.monotonic() + seconds, itertools.count(1)
    try:
        with _connected(server, loaded, patience, credentials or Credentials()) as connection:
            for number, cut in enumerate(cuts):
                on_progress(number, len(cuts), f"{Basis.name} after {cut.name}")
                if time.monotonic() > until:
                    warn(f"{Basis.name} is not measured at {len(cuts) - number} of {len(cuts)} cuts, for want of time")
                    break
                try:
                    measured = _measure(connection, ids, timer, cut)
                except ServerUnavailable:
                    raise
                except IsthmusError as error:
                    warn(f"{Basis.name} is not measured at {cut.name}: {error}")
                    continue
                if measured is not None:
                    found[cut.name] = measured
    except Disagreement as error:  # a server without this codec, for one
        warn(f"{Basis.name} is not measured: {error}")
    return replace(cloud, cuts=tuple(_with(cut, found.get(cut.name)) for cut in cloud.cuts))


def _with(cut: CutProfile, found: CodecProfile | None) -> CutProfile:
    return cut if found is None else replace(cut, codecs={**cut.codecs, Basis.name: found})


def _measure(connection: Connection, ids: Iterator[int], timer: HeadTimer, cut: CutProfile) -> CodecProfile | None:
    """None where the books code nothing of what crosses for these inputs."""
    early = timer.frontier(cut.layer_id)
    parcel = timer.packed(early)
    if Basis.name not in parcel.codecs:
        return None
    outgoing = wire.outgoing(early, parcel)
    took = [_decoding(connection, next(ids), outgoing) for _ in range(1 + REQUESTS)][1:]
    return CodecProfile(len(parcel.header) + parcel.nbytes, Quartiles.of(took))


def _decoding(connection: Connection, request_id: int, outgoing: Outgoing) -> int:
    """Nanoseconds that the server took to decode one request. Raises what it answers with, and DeadlineExceeded."""
    limit = ConnectionOptions().max_answer_bytes
    exchange = Exchange(
        request_id,
        outgoing,
        until=time.monotonic() + REQUEST_SECONDS,
        stamps=Stamps(),
        check_header=lambda header, nbytes: wire.check_answer(header, nbytes, limit),
        want_metrics=False,
    )
    connection.submit(exchange)
    if not exchange.wait():
        connection.cancel(exchange, DeadlineExceeded(f"no answer within {REQUEST_SECONDS:g} s"))
    if exchange.error is not None:
        raise exchange.error
    assert exchange.reply is not None
    return wire.server_times(exchange.reply.durations).decode


@contextmanager
def _connected(server: str, loaded: Loaded, patience: float, credentials: Credentials) -> Iterator[Connection]:
    wrapped = loaded.wrapped
    greeting = wire.hello_frame(
        client_id=uuid.uuid4().hex,
        model_id=loaded.spec.model_id,
        weights_hash=wrapped.weights_hash(),
        structure_digest=wrapped.structure_digest(),
        plan_digest="",  # profiles have been compared by theirs
        environment=wrapped.environment(),
        about={},
    )
    connection = Connection(server, greeting, ConnectionOptions(credentials=credentials), codec=Basis.name)
    try:
        connection.open(patience)
        yield connection
    finally:
        connection.close()
