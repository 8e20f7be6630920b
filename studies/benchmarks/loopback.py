"""Round trip over loopback to a real server process, against head and tail one after the other in this process.

AlexNet at 224 x 224, cut after the layer in the middle (number 10 of 21, the last convolution; its ReLU works in
place, so the frontier is copied before it is). Both sides have the same number of threads, the same weights and metrics
on; the two halves in one process use the client's own `WrappedModel`, without bytes in between. Beside it the least
that gRPC can do there: a bare echo of as many bytes between the same two halves. Wall-clock time.
"""

from __future__ import annotations

from typing import Any

from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from studies.benchmarks.frontier import ANSWER_BYTES, HEADER_BYTES, REPLY_BYTES, EchoClient
from studies.benchmarks.networks import image
from studies.benchmarks.processes import cloud, echo, target
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread, interleave, pairwise, ratio, spreads, wall_ns

MODEL = "AlexNet"
MIDDLE = 10
LIMIT = 1.10


def measure(options: Options) -> Row:
    x = image()
    with (
        cloud(MODEL, shape=tuple(x.shape), threads=options.threads) as address,
        EdgeClient(address, ModelChoice(target(MODEL), device="cpu", threads=options.threads), split=MIDDLE) as client,
        echo("--tail", MODEL, str(MIDDLE), "1", str(REPLY_BYTES + ANSWER_BYTES)) as echoing,
        EchoClient(echoing, 1) as bare,
    ):
        wrapped = client.wrapped
        frontier = wrapped.forward(x, end=MIDDLE).nbytes
        message = bytes(HEADER_BYTES + frontier)
        times: list[dict[str, int]] = []

        def split() -> None:
            times.append(client.infer(x).times.as_dict())

        def here() -> None:
            wrapped.forward(wrapped.forward(x, end=MIDDLE), start=MIDDLE)

        def echoed() -> None:
            wrapped.forward(x, end=MIDDLE)
            bare.send([message])

        ways = {"loopback": split, "one process": here, "echo": echoed}
        measured = interleave(ways, options.repeats(120), wall_ns, warm_up=5)
    times = times[5:]
    where: dict[str, Any] = {name: Spread.of([one[name] for one in times]).scaled(1e-6).as_dict() for name in times[0]}
    known = pairwise(measured["loopback"], measured["one process"])
    found = spreads(measured, 1e-6)
    note = (
        f"{found['loopback'].median:.2f} ms against {found['one process'].median:.2f} ms, "
        f"frontier {frontier / 1e3:.0f} kB; lower quartiles {found['loopback'].low / found['one process'].low:.3f} x; "
        f"neighbouring pairs {known.low:.3f} to {known.high:.3f} x, {known.count} of them"
    )
    line = Line(
        "loopback round trip / head + tail, AlexNet",
        ratio(measured["loopback"], measured["one process"]),
        "x",
        LIMIT,
        note,
    )
    between = ratio(measured["echo"], measured["one process"])
    floor = Line("... and a bare echo between the two", between, "x", None, f"{found['echo'].median:.2f} ms")
    return Row(
        (line, floor),
        {
            "frontier_bytes": frontier,
            "ms": {name: one.as_dict() for name, one in found.items()},
            "pairs": known.as_dict(),
            "where_ms": where,
        },
    )
