"""What a request by itself would gain if the sections of its frontier left, and were decoded, one by one.

A U-Net cut at its bottom, where three skip connections cross beside the last map: the first is there after a fraction
of the head. Measured: when each section is there (heads that end at its layer), what encoding and decoding it takes,
its bytes, and the tail. The link is arithmetic: bytes by rate. Divided are

* as it is: the head, all encoding, all sending, all decoding, the tail, one after the other;
* section by section: each is encoded when it is final, sent behind the one before it, and decoded when it has come.

The encoder shares the edge's core with the head, so the head ends later by what was encoded meanwhile. In a stream
nothing changes: other requests' work fills the same gaps, and the slowest stage sets the pace (row `stream`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from shared_hooks import WrappedModel
from shared_hooks.crossing import Parcel
from studies.benchmarks.networks import UNet, built
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import timed, wall_ns

RATES = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6}
"""Bytes a second."""
CODECS = ("raw", "int8", "zstd")
SECTIONS = tuple(f"downs.{number}.3" for number in range(4))
"""The layers whose results cross; after the last one the model is cut."""


class Section(NamedTuple):
    """``ready``: since the head's beginning. All in seconds, and bytes."""

    ready: float
    encode: float
    nbytes: int
    decode: float


def measure(options: Options) -> Row:
    wrapped = WrappedModel(built(UNet))
    x = torch.randn(1, 3, 256, 256, generator=torch.Generator().manual_seed(1))
    repeats = options.repeats(20)
    early = wrapped.forward(x, end=SECTIONS[-1])
    pieces = sorted(early.pieces, key=torch.Tensor.numel, reverse=True)  # as they come
    if len(pieces) != len(SECTIONS):
        raise RuntimeError(f"{len(pieces)} pieces cross, not {len(SECTIONS)}")
    heads = [_seconds(lambda end=end: wrapped.forward(x, end=end), repeats) for end in SECTIONS]  # type: ignore[misc]
    tail = _seconds(lambda: wrapped.forward(early, start=SECTIONS[-1]), repeats)
    lines, details = [], {"heads": heads, "tail": tail}
    for codec in CODECS:
        sections = [_section(ready, piece, codec, repeats) for ready, piece in zip(heads, pieces, strict=True)]
        details[codec] = [one._asdict() for one in sections]
        for name, rate in RATES.items():
            now, then = one_after_the_other(sections, rate, tail), section_by_section(sections, rate, tail)
            note = f"{1e3 * then:.0f} against {1e3 * now:.0f} ms; {sum(one.nbytes for one in sections) / 1e6:.1f} MB"
            lines.append(
                Line(f"a request alone, section by section / as it is: {codec}, {name}", then / now, "x", None, note)
            )
    return Row(tuple(lines), details)


def one_after_the_other(sections: list[Section], rate: float, tail: float) -> float:
    """Seconds from the head's beginning to the tail's end."""
    return sections[-1].ready + sum(one.encode + one.nbytes / rate + one.decode for one in sections) + tail


def section_by_section(sections: list[Section], rate: float, tail: float) -> float:
    edge = sent = decoded = 0.0
    for before, one in pairwise((Section(0.0, 0.0, 0, 0.0), *sections)):
        edge += one.ready - before.ready + one.encode
        sent = max(edge, sent) + one.nbytes / rate
        decoded = max(sent, decoded) + one.decode
    return decoded + tail


def _section(ready: float, piece: torch.Tensor, codec: str, repeats: int) -> Section:
    parcel = Parcel.of_tensors(None, [piece], codec)
    payload = bytearray(b"".join(parcel.buffers))
    encode = _seconds(lambda: Parcel.of_tensors(None, [piece], codec), repeats)
    decode = _seconds(lambda: Parcel.tensors(parcel.header, payload), repeats)
    return Section(ready, encode, parcel.nbytes, decode)


def _seconds(function: Callable[[], Any], repeats: int) -> float:
    function()
    return statistics.median(timed(function, wall_ns) for _ in range(repeats)) / 1e9
