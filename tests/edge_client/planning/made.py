"""Profiles made by hand: a model as a list of layers, each with its times here and there and what crosses after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_client.planning.codecs import CodecLoss, CutLosses, LossTable
from shared_hooks.metrics.records import Reading, TensorShape
from shared_hooks.profiling.profile import (
    CodecProfile,
    CutProfile,
    FileInput,
    LayerProfile,
    ModelIdentity,
    Profile,
    Quartiles,
    Side,
)

MS = 1e6
NONE = Reading.unavailable("no sensor")


@dataclass(frozen=True)
class Layer:
    """Milliseconds on either side, and bytes that cross after it."""

    edge_ms: float
    cloud_ms: float
    nbytes: int
    kind: str = "Conv2d"
    macs: float = 1e6


def exactly(ns: float) -> Quartiles:
    return Quartiles(ns, ns, ns, 5)


def profile(
    side: Side,
    layers: Sequence[Layer],
    *,
    input_bytes: int = 150_000,
    answer_bytes: int = 500,
    energy: bool = False,
    idle: float | None = None,
    files: tuple[FileInput, ...] = (),
    weights_hash: str = "aa",
    encode_ms: float = 0.1,
) -> Profile:
    """One side of the model that the layers describe; heads draw 2 W where there is energy."""
    times = [layer.edge_ms if side == "edge" else layer.cloud_ms for layer in layers]
    cuts = []
    for at in range(-1, len(layers)):
        nbytes = input_bytes if at < 0 else layers[at].nbytes
        before, after = sum(times[: at + 1]) * MS, sum(times[at + 1 :]) * MS
        if side == "edge":
            stages = {"head": exactly(before), "encode": exactly(encode_ms * MS)}
        else:
            stages = {
                "decode": exactly(0.05 * MS),
                "inject": exactly(0.0),
                "compute": exactly(after),
                "encode": exactly(0.05 * MS),
            }
        joules = Reading.measured(2 * before / 1e9, "a meter") if energy else NONE
        name = "input" if at < 0 else f"layer{at}"
        cuts.append(CutProfile(at, name, nbytes, nbytes + 200, stages, joules, Reading.measured(1e6 + nbytes, "x")))
    whole = sum(times) * MS
    return Profile(
        side=side,
        model=ModelIdentity("made", weights_hash, "bb", "cc"),
        machine={"id": f"{side}-machine", "name": f"the {side}"},
        created="2026-01-01T00:00:00+00:00",
        settings={"threads": 1},
        whole_ns=exactly(whole),
        outside_ns=exactly(0.0),
        layers=tuple(
            LayerProfile(
                at,
                f"layer{at}",
                layer.kind,
                (TensorShape("float32", (1, 8)),),
                layer.nbytes,
                layer.nbytes,
                True,
                "",
                exactly(times[at] * MS),
                None,
                NONE,
                NONE,
                NONE,
                NONE,
                {"macs": layer.macs, "input_elements": 100.0, "output_elements": 100.0, "parameters": 10.0},
            )
            for at, layer in enumerate(layers)
        ),
        cuts=tuple(cuts),
        whole_energy=Reading.measured(2 * whole / 1e9, "a meter") if energy else NONE,
        idle_power=NONE if idle is None else Reading.measured(idle, "a meter"),
        whole_memory_peak=Reading.measured(5e6, "x"),
        weights_bytes=10_000_000,
        answer_bytes=answer_bytes,
        files=files,
    )


def funnel(edge_ms: float = 300.0, cloud_ms: float = 15.0, layers: int = 12, first: int = 800_000) -> list[Layer]:
    """A convolutional net's shape: what crosses shrinks, the work is spread evenly."""
    return [Layer(edge_ms / layers, cloud_ms / layers, max(400, int(first * 0.5**at))) for at in range(layers)]


SHAPES = {
    "funnel": funnel(),
    "slow edge": funnel(1200, 30),
    "fast edge": funnel(60, 10),
    "flat": [*(Layer(20, 1, 60_000) for _ in range(10)), Layer(20, 1, 400)],
    "wide": funnel(400, 20, 16, 3_000_000),
    "small": funnel(8, 2, 10, 16_000),
}


SIZES = {"lz4": (0.8, 0.3, 0.1), "int8": (0.25, 1.0, 0.5), "int4": (0.12, 2.0, 0.7)}
"""The share of the bytes; milliseconds to encode and to decode."""


def with_codecs(one: Profile) -> Profile:
    """With `SIZES` measured at every cut."""
    at = 1 if one.side == "edge" else 2
    cuts = [
        replace(
            cut,
            codecs={
                name: CodecProfile(round(cut.wire_bytes * known[0]), exactly(known[at] * MS))
                for name, known in SIZES.items()
            },
        )
        for cut in one.cuts
    ]
    return replace(one, cuts=tuple(cuts), settings={**one.settings, "codec": "raw"})


def loss(codec: str, high: float | None) -> CodecLoss:
    return CodecLoss(codec, False, 100, 1.0, 0.0, 0.0, high, None, {}, False)


def losses(layers: int) -> LossTable:
    """int8 and int4 lose a little at every cut."""
    names = ["input", *(f"layer{at}" for at in range(layers))]
    cuts = tuple(
        CutLosses(name, at - 1, 1, (loss("int8", 0.004), loss("int4", 0.008))) for at, name in enumerate(names)
    )
    return LossTable(ModelIdentity("made", "aa", "bb", "cc"), "classes", 100, 0, 0.95, 0.01, None, "now", cuts)
