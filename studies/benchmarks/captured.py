"""A decode step by the model's own Python, by the graph of its kernels, and compiled; CPU time of one thread.

The graph is recorded once, for any length of the cache (`torch.fx`), and runs without the model's Python; what the
compiler makes of the step (`torch.compile`) is rounded otherwise. Both are what half of a split generation could run in
steady state in place of the prepared bare model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from studies.benchmarks import language
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import cpu_ns, interleave, pairwise, ratio, spreads

NETWORKS = "language_8x256", "language_16x768"
CACHED = 64
Step = Callable[..., tuple[torch.Tensor, ...]]


def measure(options: Options) -> Row:
    lines, details = [], {}
    for name in NETWORKS[: 1 if options.quick else None]:
        model = getattr(language, name)().requires_grad_(False)
        step = _step(model)
        with torch.no_grad():
            given = _given(model, CACHED)
            graph = make_fx(step, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True)(*given)
            began = time.monotonic()
            ways: dict[str, Step] = {"graph": graph, "compiled": torch.compile(step, dynamic=True)}
            ways["compiled"](*given)
            seconds = time.monotonic() - began
            given = _given(model, CACHED + 9)
            equal = {way: all(map(torch.equal, made(*given), step(*given))) for way, made in ways.items()}
            run = {way: partial(made, *given) for way, made in {**ways, "own": step}.items()}
            measured = interleave(run, options.repeats(60), cpu_ns)
        details[name] = {way: one.as_dict() for way, one in spreads(measured, 1e-9).items()}
        for way in ways:
            note = "bit for bit the same" if equal[way] else "rounded otherwise"
            note += f"; compiled in {seconds:.0f} s" if way == "compiled" else ""
            share = ratio(measured[way], measured["own"])
            lines.append(Line(f"step by {way} / own Python, {name}", share, "x", None, note))
            details[f"{name}, {way}"] = pairwise(measured[way], measured["own"]).as_dict()
    return Row(tuple(lines), details)


def _step(model: Any) -> Step:
    """A step as a function of tensors alone: token and mask, keys and values of all blocks."""
    from transformers import DynamicCache

    def step(token: torch.Tensor, mask: torch.Tensor, *cached: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache: Any = DynamicCache(config=model.config)
        for number, layer in enumerate(cache.layers):
            layer.lazy_initialization(*cached[2 * number : 2 * number + 2])
            layer.keys, layer.values = cached[2 * number : 2 * number + 2]
        logits = model(token, attention_mask=mask, past_key_values=cache).logits
        return logits, *_tensors(cache)

    return step


def _given(model: Any, length: int) -> tuple[torch.Tensor, ...]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(torch.arange(length)[None], past_key_values=cache)
    return torch.tensor([[7]]), torch.ones(1, length + 1, dtype=torch.long), *_tensors(cache)


def _tensors(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
