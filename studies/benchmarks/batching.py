"""Requests of 16 clients as one batch, against one at a time; and a batch's tail against the model's own.

Whether a batch gains anything is the model's affair: on one thread of a CPU a layer that reads many weights for one row
(AlexNet's classifier) gains much, convolutions hardly. So each network's own gain stands beside what the server makes
of it: the rest of the model, run directly on one row and on 16.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.batching import BatchedResult, Batches, Ways
from shared_hooks.tensors import flatten
from studies.benchmarks.batching_clients import CLIENTS
from studies.benchmarks.networks import AlexNet, ResNet18, ViT, built
from studies.benchmarks.processes import cloud, probe
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import cpu_ns, interleave, pairwise, ratio

LIMIT = round(1 / 1.5, 3)
DIRECT = round(1 / 0.9, 3)
DELAY = 20_000
"""Microseconds that the worker waits for the other clients' requests."""

Tail = Callable[[Any, torch.Tensor], torch.Tensor]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, Tail]] = {
    "AlexNet": (AlexNet, "pool", lambda m, x: m.classifier(x.flatten(1))),
    "ViT": (ViT, "blocks.2.mlp", lambda m, x: m.head(m.norm(m.blocks[3:](x))[:, 0])),
    "ResNet18": (ResNet18, "stages.2", lambda m, x: m.fc(m.pool(m.stages[3:](x)).flatten(1))),
}
EARLIER = {"AlexNet": "features.8", "ViT": "blocks.1.mlp", "ResNet18": "stages.1"}
"""Where half of the clients cut, for the last line of each."""


def measure(options: Options) -> Row:
    lines: list[Line] = []
    details: dict[str, Any] = {}
    for name, (build, cut, tail) in NETWORKS.items():
        options.say(f"  {name}")
        own, direct = _in_process(build, cut, tail, options.repeats(20))
        gain = ratio(own["one"], own["many"]) * CLIENTS
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "server.toml")
            file.write_text(f"[limits]\nmax_queue_delay_microseconds = {DELAY}\n")
            with cloud(name, shape=(1, 3, 224, 224), threads=options.threads, words=[str(file)]) as address:
                words = address, name, cut, f"{options.repeats(12)}"
                found = probe("batching_clients", *words, threads=options.threads)
        seconds, batch_size = found["seconds"], found["batch_size"]
        share = ratio(seconds["together"], seconds["exact"])
        met = statistics.mean(batch_size["together"])
        note = (
            f"{1 / share:.2f} times the requests a second; the model alone gains {gain:.2f} times from {CLIENTS} rows; "
            f"{met:.1f} met on the average"
        )
        limit = LIMIT if gain >= 1.5 / 0.9 else None  # where there is something to gain
        lines += [
            Line(f"{name}, {CLIENTS} clients together / one at a time", share, "x", limit, note),
            Line(f"{name}, a batch's tail / the same batch directly", ratio(*direct), "x", DIRECT, f"after {cut}"),
        ]
        joined, apart, chosen = _two_cuts(build, EARLIER[name], cut, options.repeats(20))
        note = f"{CLIENTS // 2} after {EARLIER[name]} run on to {cut}; by its own times a server "
        note += "joins them" if chosen else "leaves them apart"
        lines.append(Line(f"{name}, two cuts joined / a batch of each", ratio(joined, apart), "x", None, note))
        middle = _middles(build, EARLIER[name], cut, options.repeats(20))
        note = f"from {EARLIER[name]} to {cut}, of a chain"
        lines.append(Line(f"{name}, {CLIENTS} middle parts together / one by one", ratio(*middle), "x", None, note))
        details[name] = {
            "middle parts together by alone": pairwise(*middle).as_dict(),
            "together by exact": pairwise(seconds["together"], seconds["exact"]).as_dict(),
            "tail by direct": pairwise(*direct).as_dict(),
            "own gain": gain,
            "two cuts joined by apart": pairwise(joined, apart).as_dict(),
        }
    return Row(tuple(lines), details)


def _in_process(
    build: Callable[[], nn.Module], cut: str, tail: Tail, repeats: int
) -> tuple[dict[str, list[int]], tuple[list[int], list[int]]]:
    """Nanoseconds of the model's own tail on one row and on all; of a batch's tail, with joining and splitting, and of
    the model's own on the same rows.
    """
    model = built(build)
    rows = torch.randn(CLIENTS, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), WrappedModel(model, metrics=False) as wrapped:
        batches = Batches(wrapped, seconds_a_minute=float("inf"))
        earlies = [wrapped.head(cut, row[None]) for row in rows]
        batches.learn(earlies[0].crossing)
        known = batches.of(earlies[0].crossing)
        assert known is not None, batches.reason(earlies[0].crossing)
        frontier = _before(model, cut, rows)
        made = batches.run(earlies, [known] * CLIENTS)
        expected = tail(model, frontier)
        torch.testing.assert_close(torch.cat([flatten(one.output)[1][0] for one in made]), expected)
        functions: dict[str, Callable[[], Any]] = {
            "one": lambda: tail(model, frontier[:1]),
            "many": lambda: tail(model, frontier),
            "batch": lambda: batches.run(earlies, [known] * CLIENTS),
        }
        found = interleave(functions, repeats, cpu_ns, burst=2)
        batches.close()
    return found, (found["batch"], found["many"])


def _two_cuts(build: Callable[[], nn.Module], first: str, last: str, repeats: int) -> tuple[list[int], list[int], bool]:
    """Nanoseconds of half of the rows after ``first`` and half after ``last``: as one batch there, and as two. Whether
    a server would join them.
    """
    half = CLIENTS // 2
    rows = torch.randn(CLIENTS, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), WrappedModel(built(build), metrics=False) as wrapped:
        batches = Batches(wrapped, seconds_a_minute=float("inf"))
        ways = Ways(batches)
        early = [wrapped.head(first, row[None]) for row in rows[:half]]
        late = [wrapped.head(last, row[None]) for row in rows[half:]]
        known = []
        for one in (early[0], late[0]):
            batches.learn(one.crossing)
            found = batches.of(one.crossing)
            assert found is not None, batches.reason(one.crossing)
            known.append(found)
            ways.came(found)
        here, there = known
        ways.learn(here)
        way = ways.way(here, there.batch_key)
        assert way is not None, "the middle part was refused"

        def joined() -> list[BatchedResult]:
            return batches.run([*(ways.run(way, one, 1, there.proof) for one in early), *late], [there] * CLIENTS)

        def apart() -> list[BatchedResult]:
            return batches.run(early, [here] * half) + batches.run(late, [there] * half)

        for one, other in zip(joined(), apart(), strict=True):
            torch.testing.assert_close(flatten(one.output)[1], flatten(other.output)[1])
        took = interleave({"joined": joined, "apart": apart}, repeats, cpu_ns, burst=2)
        chosen = bool(ways.compatible_keys(there.batch_key, lambda batch_key: half, CLIENTS))
        batches.close()
    return took["joined"], took["apart"], chosen


def _middles(build: Callable[[], nn.Module], first: str, last: str, repeats: int) -> tuple[list[int], list[int]]:
    """Nanoseconds of the middle parts of all rows: as one batch, taken apart again, and one after the other."""
    rows = torch.randn(CLIENTS, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), WrappedModel(built(build), metrics=False) as wrapped:
        batches = Batches(wrapped, seconds_a_minute=float("inf"))
        earlies = [wrapped.head(first, row[None]) for row in rows]
        batches.learn(earlies[0].crossing, last)
        known = batches.of(earlies[0].crossing, last)
        assert known is not None, batches.reason(earlies[0].crossing, last)
        functions: dict[str, Callable[[], Any]] = {
            "together": lambda: batches.run(earlies, [known] * CLIENTS),
            "alone": lambda: [wrapped.forward(one, end=last) for one in earlies],
        }
        for one, other in zip(functions["together"](), functions["alone"](), strict=True):
            torch.testing.assert_close(one.output.pieces, other.pieces)
        found = interleave(functions, repeats, cpu_ns, burst=2)
        batches.close()
    return found["together"], found["alone"]


def _before(model: nn.Module, cut: str, rows: torch.Tensor) -> torch.Tensor:
    """What the rest of the model takes: the result of the layer, or of the block that it ends."""
    parts = cut.split(".")
    block = cut if len(parts) < 3 else ".".join(parts[:2])
    kept: list[torch.Tensor] = []
    handle = model.get_submodule(block).register_forward_hook(lambda module, args, output: kept.append(output))
    try:
        model(rows)
    finally:
        handle.remove()
    return kept[0]
