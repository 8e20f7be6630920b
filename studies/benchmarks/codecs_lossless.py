"""What codecs without loss make of feature maps after ReLU, by what lz4 alone makes of them, in bytes: the worst map.

Judged on the trained digits; in an untrained ResNet-18 nearly nothing is zero behind the first blocks.
"""

from __future__ import annotations

from shared_hooks.codecs import CODECS
from studies.benchmarks.codec_maps import maps
from studies.benchmarks.row import Line, Options, Row

LIMIT = 1 / 1.3
NAMES = tuple(name for name, codec in CODECS.items() if codec.lossless and name not in ("raw", "lz4"))


def measure(options: Options) -> Row:
    found: dict[str, dict[str, float]] = {}
    for one in maps():
        sizes = {}
        for name in ("lz4", *NAMES):
            coded = CODECS[name].encode(one.flat, one.grain)
            assert coded is not None, f"{name} encodes everything"
            sizes[name] = len(coded.data)
        zeros = float((one.flat == 0).float().mean())
        by_lz4 = {name: sizes[name] / sizes["lz4"] for name in NAMES}
        found[one.name] = {"bytes": one.nbytes, "zeros": zeros, "lz4": sizes["lz4"] / one.nbytes, **by_lz4}
    lines = []
    for name in NAMES:
        for model in ("digits", "ResNet-18"):
            by_map = {cut: reported[name] for cut, reported in found.items() if cut.startswith(model)}
            note = ", ".join(f"{cut.removeprefix(model)[1:]} {1 / one:.2f}" for cut, one in by_map.items())
            limit = LIMIT if (name, model) == ("sparse", "digits") else None
            lines.append(Line(f"{name} / lz4, {model}", max(by_map.values()), "x", limit, f"times smaller: {note}"))
    return Row(tuple(lines), {"maps": found})
