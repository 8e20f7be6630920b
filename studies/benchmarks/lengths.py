"""A sequence length that was never seen, after three were: head and tail with all that has to be worked out for it,
over head and tail of a length that is known. Both sides in one process, through bytes; wall-clock time, one thread.

A BERT of the base's width with six layers, cut after its fourth; lengths alternate, so that a longer one is no excuse:
each new length is compared with the same length asked a second time.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import BertConfig, BertModel

from shared_hooks import EarlyOutput, WrappedModel
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread

LIMIT = 1.5
CUT = "encoder.layer.3.output.LayerNorm"
SEEN = (96, 128, 160)
NEW = (100, 112, 120, 136, 140, 144, 150, 152, 168, 176, 180, 192)


def _model() -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig(num_hidden_layers=6)).eval()


def measure(options: Options) -> Row:
    model = _model()
    edge, cloud = WrappedModel(model), WrappedModel(_model())
    new: list[float] = []
    known: list[float] = []

    def ask(length: int) -> float:
        ids = torch.randint(0, 1000, (1, length))
        mask = torch.ones(1, length, dtype=torch.long)
        started = time.perf_counter_ns()
        early = edge.head(CUT, ids, attention_mask=mask)
        cloud.tail(EarlyOutput.from_bytes(early.to_bytes()))
        return time.perf_counter_ns() - started

    with torch.no_grad():
        for length in SEEN:
            ask(length), ask(length)
        made = edge.plans_made
        for length in NEW[: 4 if options.quick else None]:
            new.append(ask(length))
            known.append(min(ask(length), ask(length)))
    pairs = [one / other for one, other in zip(new, known, strict=True)]
    planned = edge.plans_made - made
    note = (
        f"{statistics.median(new) / 1e6:.0f} ms against {statistics.median(known) / 1e6:.0f} ms; "
        f"{len(new)} lengths, of which {planned} were planned by running the model"
    )
    details: dict[str, Any] = {
        "ms": {"new": Spread.of(new).scaled(1e-6).as_dict(), "known": Spread.of(known).scaled(1e-6).as_dict()},
        "pairs": pairs,
    }
    return Row((Line("a new length / a known one, BERT", statistics.median(pairs), "x", LIMIT, note),), details)
