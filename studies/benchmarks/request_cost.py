"""What a request costs beside its layers: wall-clock and processor time of both sides, with records and without.

Twenty convolutions on 16 x 16 images, whose frontier is a kilobyte: nearly all of a round trip over loopback is what
Isthmus does around them. The same halves in one process are taken off, measured in turns. Beside it a bare gRPC echo
of as many bytes, and the same requests, each after another 15 ms of work in memory: what cold caches make of it. The
processor time is Linux's, of every thread of a process (``/proc/PID/task/*/schedstat``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from studies.benchmarks.frontier import ANSWER_BYTES, HEADER_BYTES, REPLY_BYTES, EchoClient
from studies.benchmarks.processes import cloud, echo, target
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread, interleave, spreads, timed, wall_ns

MODEL = "Thin"
SHAPE = (1, 3, 16, 16)
MIDDLE = 10
BUSY_NS = 15_000_000
BUSY_ELEMENTS = 16 << 20
"""The elements of a tensor written before a request: 64 MiB, more than any cache of the processor holds."""


def measure(options: Options) -> Row:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    large = torch.zeros(BUSY_ELEMENTS)
    model = ModelChoice(target(MODEL), device="cpu", threads=options.threads)
    with (
        cloud(MODEL, shape=SHAPE, threads=options.threads) as address,
        EdgeClient(address, model, split=MIDDLE) as client,
        EdgeClient(address, model, split=MIDDLE, metrics=False) as bare,
        echo("1", str(REPLY_BYTES + ANSWER_BYTES)) as echoing,
        EchoClient(echoing, 1) as plain,
    ):
        message = bytes(HEADER_BYTES + client.wrapped.forward(x, end=MIDDLE).nbytes)
        ways: dict[str, Callable[[], object]] = {
            "request": lambda: client.infer(x),
            "halves": lambda: _halves(client, x),
            "without records": lambda: bare.infer(x),
            "halves without": lambda: _halves(bare, x),
            "echo": lambda: plain.send([message]),
        }
        found = spreads(interleave(ways, options.repeats(600), wall_ns, warm_up=20), 1e-6)
        cold = _after_work(lambda: client.infer(x), large, options.repeats(120))
        cold_halves = _after_work(lambda: _halves(client, x), large, options.repeats(120))
        both = {"request": ways["request"], "halves": ways["halves"]}
        edge, server = (
            spreads(interleave(both, options.repeats(600), partial(_processor_ns, pid), warm_up=2), 1e-6)
            for pid in (os.getpid(), _server_of(os.getpid()))
        )
    added = found["request"].median - found["halves"].median
    added_without = found["without records"].median - found["halves without"].median
    added_cold = cold.median - cold_halves.median
    note = f"{found['request'].median:.2f} ms against {found['halves'].median:.2f} ms in one process"
    edge_ms, server_ms, halves_ms = edge["request"].median, server["request"].median, edge["halves"].median
    note_echo = f"{found['echo'].median:.2f} ms"
    note_cpu = f"edge {edge_ms:.2f} ms and server {server_ms:.2f} ms, against {halves_ms:.2f} ms"
    return Row(
        (
            Line("a request beside its layers", added, "ms", None, note),
            Line("... without records of layers", added_without, "ms"),
            Line("... after 15 ms and more of other work", added_cold, "ms"),
            Line("... by a bare echo of its bytes", added / found["echo"].median, "x", None, note_echo),
            Line("... processor time of both sides", edge_ms + server_ms - halves_ms, "ms", None, note_cpu),
        ),
        {
            "ms": {name: one.as_dict() for name, one in found.items()},
            "cold_ms": {"request": cold.as_dict(), "halves": cold_halves.as_dict()},
            "processor_ms": {
                "edge": {name: one.as_dict() for name, one in edge.items()},
                "server": server["request"].as_dict(),
            },
        },
    )


def _halves(client: EdgeClient, x: torch.Tensor) -> None:
    client.wrapped.forward(client.wrapped.forward(x, end=MIDDLE), start=MIDDLE)


def _after_work(function: Callable[[], object], large: torch.Tensor, repeats: int) -> Spread:
    """Milliseconds of a call, each after work that leaves nothing of it in the caches."""
    times: list[float] = []
    for _ in range(repeats):
        until = wall_ns() + BUSY_NS
        while wall_ns() < until:
            large.add_(1)
        times.append(timed(function, wall_ns) / 1e6)
    return Spread.of(times)


def _processor_ns(pid: int) -> int:
    """Return the processor time of all threads of the process so far."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def _server_of(pid: int) -> int:
    """The child that is a cloud server."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [child for one in children for child in one.read_text().split()]
    (server,) = [int(child) for child in found if b"cloud_server" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return server
