"""`to_bytes` and `from_bytes` with the raw codec, against one memcpy of the same bytes.

`to_bytes` makes a new object, so the memcpy it is compared with makes one, too: ``bytes(view)``, whose memory comes
from the same allocator in the same way. A copy into a buffer that exists (and is in the caches, if it fits) is in the
notes. What does not depend on the size (recipe, header) is a fixed cost; it is part of every ratio here, which is why
small frontiers look worse. Judged: every size of 1 MB and more. Measured in bursts of the same, so that the caches hold
what each needs, if they can.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from shared_hooks import EarlyOutput, WrappedModel
from tests.benchmarks.networks import Bare, built
from tests.benchmarks.row import Line, Options, Row
from tests.benchmarks.timing import cpu_ns, interleave, ratio, spreads

SIZES = (65_536, 802_816, 3_211_264, 12_845_056, 51_380_224)
JUDGED_FROM = 1_000_000
MAX_BYTES = 1 << 30


def measure(options: Options) -> Row:
    details: dict[str, Any] = {}
    fresh: dict[int, float] = {}
    warm: dict[int, float] = {}
    fixed_us = 0.0
    with torch.no_grad(), WrappedModel(built(Bare)) as wrapped:
        for size in SIZES:
            early = wrapped.forward(torch.randn(1, size // 4), end="before")
            data = early.to_bytes()
            source = memoryview(early.pieces[0].reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
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
            if size == SIZES[0]:
                fixed_us = (statistics.median(measured["both"]) - statistics.median(measured["fresh"])) / 1e3
            details[str(size)] = {
                "us": {name: one.as_dict() for name, one in spreads(measured, 1e-3).items()},
                "against_fresh_memory": fresh[size],
                "against_warm_memory": warm[size],
            }
    worst = max((size for size in SIZES if size >= JUDGED_FROM), key=lambda size: fresh[size])
    note = ", ".join(f"{_size(size)} {fresh[size]:.2f} (warm {warm[size]:.2f})" for size in SIZES)
    line = Line("to_bytes + from_bytes / memcpy, from 1 MB", fresh[worst], "x", 3.0, f"worst at {_size(worst)}; {note}")
    fixed = Line("  fixed cost of both", fixed_us, "us", None, f"at {_size(SIZES[0])}")
    return Row((line, fixed), details)


def _size(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
