"""What a codec takes to encode and decode feature maps, by the bytes of float32 that go in.

Nanoseconds a byte: 1 is 1 GB/s. The median over the maps is judged; the worst and best are in the note. Encoding begins
with the tensor as it crosses, and ends with the bytes of its section; decoding is the reverse, its check included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from shared_hooks.codecs import CODECS, Codec
from studies.benchmarks.codec_maps import Map, maps
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import cpu_ns, interleave

NAMES = ("lz4", "zstd", "shuffle-zstd", "sparse", "bf16", "int8", "int4", "int2", "int1")
LIMITS = {"int8": (1.0, 1 / 1.5), "sparse": (5.0, None)}
"""To encode and to decode, ns a byte."""


def measure(options: Options) -> Row:
    found: dict[str, dict[str, list[float]]] = {name: {"encode": [], "decode": [], "ratio": []} for name in NAMES}
    used: list[str] = []
    for one in maps():
        used.append(f"{one.name} ({one.nbytes / 1e6:.1f} MB)")
        for name, reported in found.items():
            codec = CODECS[name]
            coded = codec.encode(one.flat, one.grain)
            assert coded is not None, f"{name} encodes {one.name}"
            run = {"encode": _encoding(codec, one), "decode": _decoding(codec, one)}
            measured = interleave(run, options.repeats(12), cpu_ns)
            for what, times in measured.items():
                reported[what].append(statistics.median(times) / one.nbytes)
            reported["ratio"].append(one.nbytes / len(coded.data))
    lines = []
    for name, reported in found.items():
        limits = LIMITS.get(name, (None, None))
        for what, limit in zip(("encode", "decode"), limits, strict=True):
            speeds = sorted(1 / value for value in reported[what])
            ratios = reported["ratio"]
            note = f"{speeds[0]:.2f} to {speeds[-1]:.2f} GB/s; {min(ratios):.1f}x to {max(ratios):.1f}x"
            lines.append(Line(f"{name}, {what}", statistics.median(reported[what]), "ns/B", limit, note))
    return Row(tuple(lines), {"maps": used, "codecs": found})


def _encoding(codec: Codec, one: Map) -> Callable[[], Any]:
    return lambda: codec.encode(one.flat, one.grain)


def _decoding(codec: Codec, one: Map) -> Callable[[], Any]:
    coded = codec.encode(one.flat, one.grain)
    assert coded is not None

    def decode() -> None:
        codec.check(coded.params, one.flat.dtype, one.flat.numel(), len(coded.data))
        codec.decode(coded.data, coded.params, one.flat.dtype, one.flat.numel())

    return decode
