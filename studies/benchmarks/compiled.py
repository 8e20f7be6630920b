"""Compiled tails by the model's own, on the same frontier, in turns; CPU time of one thread.

The tails are made and compared as a server does it (`shared_hooks.compiling`), with rounding allowed, and used
even where they win nothing. What could not be
compiled is in the note, and its ratio is that of two equal runs.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.compiling import CompiledTails, Standing
from shared_hooks.models import load_spec
from studies.benchmarks.networks import ResNet18, ViT, built, image
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import cpu_ns, interleave, pairwise, ratio, spreads

PATIENCE = 900.0
"""Seconds for a compiler."""


def measure(options: Options) -> Row:
    spec = load_spec("digits")
    example = spec.example()
    assert example is not None
    (digit,) = example[0]
    cases: list[tuple[str, nn.Module, str, torch.Tensor]] = [
        ("digits, 1", spec.load_model(), "stage2.0.relu#2", digit),
        ("digits, 16", spec.load_model(), "stage2.0.relu#2", digit.repeat(16, 1, 1, 1)),
    ]
    if not options.quick:
        cases += [("ResNet-18", built(ResNet18), "stages.1.1.relu#2", image())]
        vit = built(ViT)
        with WrappedModel(vit) as wrapped:
            layers = list(wrapped.plan(image()).layers)
        cases += [("ViT", vit, layers[len(layers) // 2].name, image())]
    lines, details = [], {}
    for name, model, cut, x in cases:
        line, details[name] = _compared(name, model, cut, x, options)
        lines.append(line)
    return Row(tuple(lines), details)


def _compared(name: str, model: nn.Module, cut: str, x: torch.Tensor, options: Options) -> tuple[Line, dict[str, Any]]:
    with WrappedModel(model, metrics=False) as wrapped:
        early = wrapped.head(cut, x)
        compiled = CompiledTails(wrapped, rounding=True, wins=lambda *_: True)
        began = time.monotonic()
        compiled.add(early)
        word, why = _settled(compiled, wrapped, cut, x)
        seconds = time.monotonic() - began
        header, payload = _parts(early)
        found = compiled.of(early.crossing, header, payload)
        run = {"compiled": lambda: wrapped.tail(early, substitutes=found), "own": lambda: wrapped.tail(early)}
        measured = interleave(run, options.repeats(60), cpu_ns)
        own, other = wrapped.tail(early), wrapped.tail(early, substitutes=found)
        apart = float((own - other).abs().max() / own.abs().max())
        compiled.close()
    note = f"{word} after {seconds:.0f} s; apart by {apart:.0e} of the largest element" if not why else f"{word}: {why}"
    line = Line(f"compiled tail / own, {name}", ratio(measured["compiled"], measured["own"]), "x", None, note)
    return line, {
        "seconds": {way: one.as_dict() for way, one in spreads(measured, 1e-9).items()},
        "ratio": pairwise(measured["compiled"], measured["own"]).as_dict(),
        "compile_seconds": seconds,
    }


def _settled(compiled: CompiledTails, wrapped: WrappedModel, cut: str, x: torch.Tensor) -> tuple[str, str]:
    """Asks as clients do until the tail is used, or refused: which, and why."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        ((word, why),) = compiled.standings().values()
        if word in (Standing.USED.value, Standing.REFUSED.value):
            return word, why
        if word == Standing.CHECKING.value:
            early = wrapped.head(cut, torch.randn_like(x))
            compiled.of(early.crossing, *_parts(early))
        time.sleep(0.05)
    return word, f"not within {PATIENCE:g} s"


def _parts(early: EarlyOutput) -> tuple[bytes, memoryview]:
    parcel = early.pack("raw")
    return parcel.header, memoryview(b"".join(bytes(one) for one in parcel.buffers))
