"""Decoding profiles made by hand: a decoder of equal blocks."""

from __future__ import annotations

from edge_client.planning.link import Curve, Link
from shared_hooks.profiling.decoding import DecoderPart, DecodingProfile, LineFit
from shared_hooks.profiling.profile import Side

MS = 1e6
WORDS = 1000


def decoder(side: Side, block_ms: float, blocks: int = 8, hidden: int = 1024, state: int = 512) -> DecodingProfile:
    """``block_ms`` a block and token; 1 % more with every 100 tokens before it; a prompt's token a tenth."""

    def part(name: str, ms: float, hidden: int = 0, state: int = 0) -> DecoderPart:
        return DecoderPart(
            name,
            step=LineFit(ms * MS, ms * MS / 10_000),
            prefill=LineFit(ms * MS, ms * MS / 10),
            weights_bytes=round(ms * 1e6),
            state_bytes=LineFit(0, state),
            hidden_bytes=hidden,
        )

    return DecodingProfile(
        side,
        "made",
        {"name": f"the {side}"},
        part("before", block_ms / 10),
        tuple(part(f"layers.{at}", block_ms, hidden, state) for at in range(blocks)),
        part("after", block_ms),
        WORDS,
        4,
        (16, 128),
    )


def link(rtt_ms: float = 10.0, bytes_per_second: float = 1e6) -> Link:
    return Link(Curve.line(rtt_ms * MS, bytes_per_second), Curve.line(0, bytes_per_second))
