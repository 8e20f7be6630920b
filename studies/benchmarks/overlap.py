"""A request by itself whose sections leave as soon as they are final, against one that goes whole after its head.

A U-Net cut at its bottom, where three skip connections cross beside the last map: the first is there after a fraction
of the head. Two clients of one server take turns, the head in this process; one of them has `ConnectionOptions.ahead`
off. Between them and the server is a relay of the rates below, each way. Wall-clock.

In a stream nothing changes: other requests' work fills the same gaps, and the slowest stage sets the pace (row
`stream`); only a request that meets no other leaves early.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from edge_client import ConnectionOptions, EdgeClient
from studies.benchmarks.networks import UNet
from studies.benchmarks.processes import cloud, target
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.stream import through
from studies.benchmarks.timing import Spread, timed, wall_ns

RATES = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6}
"""Bytes a second."""
CODECS = ("raw", "int8", "zstd")
SHAPE = (1, 3, 256, 256)
CUT = "downs.3.3"


def measure(options: Options) -> Row:
    """Raises RuntimeError where the answers differ."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    rounds = options.repeats(16)
    lines: list[Line] = []
    details: dict[str, Any] = {}
    with cloud(UNet.__name__, shape=SHAPE, threads=options.threads) as address:
        for name, rate in RATES.items():
            with through(address, (0.0, rate)) as at:
                for codec in CODECS:
                    whole, ahead, nbytes = _seconds(at, codec, x, rounds)
                    known = Spread.of([one / other for one, other in zip(ahead, whole, strict=True)])
                    note = f"{1e3 * Spread.of(ahead).median:.0f} against {1e3 * Spread.of(whole).median:.0f} ms; "
                    note += f"{nbytes / 1e6:.1f} MB; rounds {known.low:.3f} to {known.high:.3f}, {known.count} of them"
                    lines.append(
                        Line(f"a request alone, sections ahead / whole: {codec}, {name}", known.median, "x", None, note)
                    )
                    details[f"{codec}, {name}"] = {"whole": whole, "ahead": ahead, "bytes": nbytes}
    return Row(tuple(lines), details)


def _seconds(address: str, codec: str, x: torch.Tensor, rounds: int) -> tuple[list[float], list[float], int]:
    """Return the seconds of requests sent whole, those of requests sent early, and the bytes of one."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(
                EdgeClient(
                    address,
                    target(UNet.__name__),
                    CUT,
                    codec=codec,
                    connection=ConnectionOptions(area_bytes=0, ahead=ahead),
                )
            )
            for ahead in (False, True)
        ]
        answers = [client.infer(x) for client in clients]
        if not torch.equal(answers[0].output, answers[1].output):
            raise RuntimeError(f"{codec}: the answer of sections that left early is another one")
        took: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for client, seconds in zip(clients, took, strict=True):
                seconds.append(timed(lambda client=client: client.infer(x), wall_ns) / 1e9)  # type: ignore[misc]
    return *took, answers[0].bytes_up
