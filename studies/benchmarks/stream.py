"""Requests one after another, several under way: what one takes, against the slowest of its stages.

ResNet-18, cut after its first stage, where 64 x 56 x 56 floats (803 kB) cross; the tail is half as long again as the
head. The edge has one core and the server another one, all their threads together; the rest of the benchmark shares
them. Stages alone, measured in turns with the stream: head and tail (without bytes in between, each on its side's
core), and the link: a bare gRPC echo of the same chunks with small answers, one behind the other. Then the same over a
link (a relay) that is slower than both sides, with 20 ms each way; and over one that is far, 100 ms each way, where
four requests under way leave everybody waiting: as many as the client finds to be enough, and, in the note, four.

Wall-clock. A stream that is as fast as its slowest stage leaves nothing for packing, sending, receiving and all that
Python does between layers, which share the core with that stage: 0.9 of its rate is 1.11 times its time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edge_client.transport.wire import CHUNK_BYTES
from protos.frames import cut, serialize_client_frame
from studies.benchmarks.frontier import ANSWER_BYTES, HEADER_BYTES, REPLY_BYTES, EchoClient
from studies.benchmarks.networks import image
from studies.benchmarks.processes import cloud, echo, probe
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.stream_probe import MODEL
from studies.benchmarks.timing import Spread, timed, wall_ns
from studies.experiments.relay import Relay

LIMIT = 1 / 0.9
SLOW = 0.02, 25e6
"""Seconds one way, bytes a second."""
FAR = 0.1, 0.0
FEW = 4
FRONTIER_BYTES = 4 * 64 * 56 * 56
AT_ONCE = 16
"""Echoes, one behind the other."""
STAGES = ("stream", "head", "tail")


def measure(options: Options) -> Row:
    """Raises RuntimeError on a system that cannot give a process a core, or has one core."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("the row stream needs two cores, and a system that gives processes theirs (Linux)")
    edge, server, *_ = sorted(os.sched_getaffinity(0))
    lines: list[Line] = []
    details: dict[str, Any] = {}
    with (
        cloud(MODEL, shape=tuple(image().shape), threads=1, core=server) as address,
        echo(str(len(_messages())), str(REPLY_BYTES), str(ANSWER_BYTES)) as echoing,
    ):
        cores, rounds = (str(edge), str(server)), options.repeats(8)
        for name, way in (("over loopback", None), ("over a slow link", SLOW), ("to a far server", FAR)):
            with through(echoing, way) as at:
                link = _link_ns(at, rounds)
            with through(address, way) as at:
                found = probe("stream_probe", at, *cores, str(rounds))
                few = probe("stream_probe", at, *cores, "5", str(FEW)) if way is FAR else None
            lines.append(_line(name, found["ns"], link, few))
            details[name] = {"link_ns": link, **found}
    return Row(tuple(lines), details)


def _line(name: str, ns: dict[str, list[float]], link: float, few: dict[str, Any] | None) -> Line:
    ms = {stage: Spread.of(values).scaled(1e-6).median for stage, values in ns.items()} | {"link": link / 1e6}
    slowest = max(("head", "tail", "link"), key=ms.__getitem__)
    each = zip(*(ns[stage] for stage in STAGES), strict=True)
    known = Spread.of([one / max(head, tail, link) for one, head, tail in each])
    alone = ", ".join(f"{stage} {ms[stage]:.1f}" for stage in ("head", "link", "tail"))
    note = (
        f"{1 / known.median:.3f} of the {slowest}'s rate; {ms['stream']:.1f} ms; alone {alone}; a request by itself "
        f"{ms['alone']:.1f} ms; rounds {known.low:.3f} to {known.high:.3f} x, {known.count} of them"
    )
    if few is not None:
        note += f"; {FEW} under way: {Spread.of(few['ns']['stream']).median / 1e6:.1f} ms"
    return Line(f"a request in a stream {name} / slowest stage", known.median, "x", LIMIT, note)


def _messages() -> list[bytes]:
    payload = memoryview(bytes(FRONTIER_BYTES))
    return [bytes(HEADER_BYTES), *(bytes(serialize_client_frame(chunk)) for chunk in cut(1, [payload], CHUNK_BYTES))]


def _link_ns(address: str, repeats: int) -> float:
    """Return the time on the link of one frontier among several that follow each other."""
    messages = _messages()
    with EchoClient(address, 2 * AT_ONCE) as bare:
        found = [timed(lambda: bare.send(messages * AT_ONCE), wall_ns) / AT_ONCE for _ in range(repeats)]
    return Spread.of(found[1:]).median


@contextmanager
def through(address: str, way: tuple[float, float] | None) -> Iterator[str]:
    """Where a link of so many seconds one way and bytes a second (0: as they come) to ``address`` begins."""
    if way is None:
        yield address
        return
    host, _, port = address.rpartition(":")
    delay, rate = way
    with Relay((host, int(port)), delay=delay) as relay:
        relay.rate = rate
        yield "{}:{}".format(*relay.address)
