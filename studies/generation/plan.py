"""How near a plan of a generation comes: what it predicts for every cut, and what the cut then takes.

    python -m studies.generation.plan                                    12 blocks of width 512, 20 ms, 50 Mbit/s
    python -m studies.generation.plan --rtt 2 --mbit 1000 --prompt 300 --json FILE

Both halves run in this process, behind a link that sleeps. The plan knows that link, this side's profile, and steps at
the first and the last cut. All is measured in turns, so that a machine that others use is as slow for each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_client.generation.survey import StepSampler, token_times
from edge_client.planning.generation import (
    SessionMove,
    Workload,
    cloud_profile,
    head_profile,
    moving,
    overhead_of,
    predict_generation,
)
from edge_client.planning.link import Curve, Link
from edge_client.screen import table
from edge_client.user_text import EDGE_ONLY
from shared_hooks.generation import DecodingTail, InProcess, SplitForward, StepReply
from shared_hooks.profiling.decoding import DecodingMeasurement, words_at_random
from studies.benchmarks.machine import facts

LENGTHS = (16, 128, 384)


class Delayed:
    """A link that takes its time: a round trip, and so long a byte each way."""

    begins = False

    def __init__(self, link: InProcess, network: Link) -> None:
        self._link = link
        self._network = network

    def step(self, session: int, number: int, header: Any, tensors: Any, *rest: Any) -> StepReply:
        reply = self._link.step(session, number, header, tensors, *rest)
        time.sleep(self._network.network_ns(reply.bytes_up, reply.bytes_down) / 1e9)
        return reply

    def close(self, session: int) -> None:
        self._link.close(session)


def built(blocks: int, width: int) -> nn.Module:
    """A Llama with random weights, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=blocks,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def reply_ns(model: nn.Module, prompt: int, new: int) -> tuple[float, float]:
    """To the first token, and the median of each further one."""
    ends = token_times(model, words_at_random(model)(prompt), new)
    first, *steps = [after - before for before, after in pairwise(ends)]
    return float(first), statistics.median(steps)


def move_text(move: SessionMove) -> str:
    """In a line."""
    carried = f"carried {move.carried_bytes / 1e6:.2f} MB, {move.carry_ns / 1e6:.0f} ms"
    replayed = f"replayed {move.replayed_bytes / 1e6:.2f} MB, {move.replay_ns / 1e6:.0f} ms"
    pays = f"pays after {move.pays_after:.0f} tokens" if math.isfinite(move.pays_after) else "never pays"
    return f"{carried}; {replayed}; {pays}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rtt", type=float, default=20.0, metavar="MS")
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    edge, there = built(given.blocks, given.width), built(given.blocks, given.width)
    rate = given.mbit * 1e6 / 8
    network = Link(Curve.line(given.rtt * 1e6, rate), Curve.line(0.0, rate))
    measurement = DecodingMeasurement(edge, "study", "edge", lengths=LENGTHS)

    def link_at(cut: str) -> Delayed:
        return Delayed(InProcess(DecodingTail(there, cut)), network)

    sampler = StepSampler(edge, measurement, link_at)
    names = measurement.blocks
    ways = {name: SplitForward(edge, name, link_at(name)) for name in names}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in (EDGE_ONLY, *names)}
    for _ in range(given.rounds):
        measurement.round()
        sampler.round()
        took[EDGE_ONLY].append(reply_ns(edge, given.prompt, given.new))
        for name, split in ways.items():
            with split:
                took[name].append(reply_ns(edge, given.prompt, given.new))
    profile = measurement.result()
    cloud = cloud_profile(profile, sampler.samples, {})
    overhead = overhead_of(profile, sampler.samples, network, lambda n: float(n * profile.words * profile.word_bytes))
    head, workload = head_profile(profile, sampler.samples), Workload(given.prompt, given.new)
    found = predict_generation(profile, cloud, network, workload, head=head, overhead=overhead)
    rows = []
    for one in found:
        first, token = (statistics.median(each[at] for each in took[one.name]) for at in (0, 1))
        rows.append(
            {
                "cut": one.name,
                "token_ns": one.token.latency_ns,
                "token_measured_ns": token,
                "first_ns": one.first.latency_ns,
                "first_measured_ns": first,
            }
        )
    off = {
        what: statistics.median(abs(row[f"{what}_ns"] / row[f"{what}_measured_ns"] - 1) for row in rows)
        for what in ("token", "first")
    }
    text = [
        [
            row["cut"],
            *(f"{row[key] / 1e6:.1f}" for key in ("token_ns", "token_measured_ns", "first_ns", "first_measured_ns")),
        ]
        for row in rows
    ]
    headers = ["cut after", "ms a token", "measured", "ms to the first", "measured"]
    print(table(headers, text, right=(1, 2, 3, 4)))
    print(f"median error: a token {off['token']:.1%}, the first {off['first']:.1%}")
    moves = {}
    ns = {one.name: one.token.latency_ns for one in found}
    middle = len(names) // 2
    for new in (0, middle + 1, len(names) - 1):
        for tokens in (128, 1024):
            move = moving(profile, cloud, network, middle, new, tokens, ns[names[middle]] - ns[names[new]])
            what = f"moving from block {middle} to {new} after {tokens} tokens"
            moves[what] = move.as_dict()
            print(f"{what}: {move_text(move)}")
    if given.json:
        reported = {
            "machine": facts(),
            "rows": rows,
            "median_error": off,
            "moves": moves,
            "overhead": overhead.as_dict(),
        }
        given.json.write_text(json.dumps(reported, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
