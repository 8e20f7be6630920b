"""`to_bytes` and `from_bytes` with the raw codec, against one memcpy of the same bytes.

`to_bytes` makes a new object, so the memcpy it is compared with makes one, too: ``bytes(view)``, whose memory comes
from the same allocator in the same way. A copy into a buffer that exists (and is in the caches, if it fits) is in the
notes. What does not depend on the size (cut, header) is a fixed cost, here that of the smallest size. Judged twice,
at every size of 1 MB and more: all of the cost, and the cost per byte without what is fixed. Measured in bursts of the
same, so that the caches hold what each needs, if they can.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from shared_hooks import EarlyOutput, WrappedModel
from studies.benchmarks.networks import Bare, built
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import cpu_ns, interleave, ratio, spreads

SIZES = (65_536, 802_816, 3_211_264, 12_845_056, 51_380_224)
JUDGED_FROM = 1_000_000
MAX_BYTES = 1 << 30
LIMIT = 3.0


def measure(options: Options) -> Row:
    details: dict[str, Any] = {}
    fresh: dict[int, float] = {}
    warm: dict[int, float] = {}
    per_byte: dict[int, float] = {}
    fixed_ns = 0.0
    with torch.no_grad(), WrappedModel(built(Bare)) as wrapped:
        for size in SIZES:
            early = wrapped.forward(torch.randn(1, size // 4), end="before")
            data = early.to_bytes()
            source = memoryview(early.pieces[0].reshape(-1).view(torch.uint8).numpy())
            target = memoryview(bytearray(size))
            assert source.nbytes == size

            def there_and_back(early: EarlyOutput = early) -> None:
                EarlyOutput.from_bytes(early.to_bytes(), MAX_BYTES)

            def into(target: memoryview = target, source: memoryview = source) -> None:
                target[:] = source

            run = {
                "both": there_and_back,
                "fresh": lambda source=source: bytes(source),
                "to_bytes": early.to_bytes,
                "warm": into,
                "from_bytes": lambda data=data: EarlyOutput.from_bytes(data, MAX_BYTES),
            }
            measured = interleave(run, options.repeats(100 if size > 4_000_000 else 200), cpu_ns, warm_up=5, burst=6)
            fresh[size] = ratio(measured["both"], measured["fresh"])
            warm[size] = ratio(measured["both"], measured["warm"])
            both, memcpy = statistics.median(measured["both"]), statistics.median(measured["fresh"])
            if size == SIZES[0]:
                fixed_ns = both - memcpy
            per_byte[size] = (both - fixed_ns) / memcpy
            details[str(size)] = {
                "us": {name: one.as_dict() for name, one in spreads(measured, 1e-3).items()},
                "against_fresh_memory": fresh[size],
                "against_warm_memory": warm[size],
                "without_fixed_cost": per_byte[size],
            }
    judged = [size for size in SIZES if size >= JUDGED_FROM]
    worst = max(judged, key=lambda size: fresh[size])
    worst_per_byte = max(judged, key=lambda size: per_byte[size])
    what = "to_bytes + from_bytes / memcpy"
    all_of_it = ", ".join(f"{_size(size)} {fresh[size]:.2f} (warm {warm[size]:.2f})" for size in SIZES)
    beyond = ", ".join(f"{_size(size)} {per_byte[size]:.2f}" for size in judged)
    return Row(
        (
            Line(f"{what}, per byte", per_byte[worst_per_byte], "x", LIMIT, f"{fixed_ns / 1e3:.0f} us apart; {beyond}"),
            Line(f"{what}, all of it, from 1 MB", fresh[worst], "x", LIMIT, f"worst at {_size(worst)}; {all_of_it}"),
        ),
        {"fixed_us": fixed_ns / 1e3, "sizes": details},
    )


def _size(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
