"""What a client sends beside the tensors: the header of a request, and once a stream the description of its cut.

The most over all cuts of a model. `BEFORE` is what the same models took when the client sent a recipe (format 1, commit
a9bf448; counted there with ``len(early.recipe.to_bytes())`` and ``len(early.pack().header)`` over the same cuts).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel

from shared_hooks import WrappedModel
from studies.benchmarks.networks import CLASSICS, built, image
from studies.benchmarks.row import Line, Options, Row

BEFORE: dict[str, tuple[int, int]] = {
    "ResNet-18": (1572, 211),
    "AlexNet": (1547, 152),
    "VGG-11 (half width)": (2798, 154),
    "ViT (384 x 6)": (2759, 211),
    "BERT (6 layers)": (1763, 322),
}


def _bert() -> nn.Module:
    torch.manual_seed(0)
    return BertModel(BertConfig(num_hidden_layers=6)).eval()


def measure(options: Options) -> Row:
    lines: list[Line] = []
    details: dict[str, Any] = {}
    models: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
        name: (lambda build=build: built(build), image()) for name, build in CLASSICS.items()
    }
    models["BERT (6 layers)"] = _bert, torch.randint(0, 1000, (1, 128))
    for name, (build, x) in models.items():
        sizes: list[tuple[int, int]] = []
        with torch.no_grad(), WrappedModel(build()) as wrapped:
            wrapped.plan(x)
            layers = [layer.layer_id for layer in wrapped.layers if layer.can_split]
            for cut in layers[:: max(1, len(layers) // 8)]:
                early = wrapped.head(cut, x)
                sizes.append((len(early.crossing.to_bytes()), len(early.pack().header)))
        cut_bytes, header = max(size for size, _ in sizes), max(size for _, size in sizes)
        before = BEFORE.get(name)
        note = f"the largest of {len(sizes)} cuts" + (
            f"; was {before[0]} and {before[1]} with recipes" if before else ""
        )
        lines.append(Line(f"description of a cut, {name}", cut_bytes, "B", before[0] if before else None, note))
        lines.append(Line(f"  header of a request, {name}", header, "B", before[1] if before else None, ""))
        details[name] = sizes
    return Row(tuple(lines), details)
