"""Do the layers and what lies outside them make up the forward? Against clocks that know nothing of the metrics.

``layers + outside`` is the metrics' own total by construction, so it is compared with two readings of the clock around
the very call: within 2 % or 100 us, whichever is more. And with the unwrapped model, in turns, each first every other
time. What it differs by there is what the hooks cost, which on a model of many tiny layers is more than 2 %, and no
error of the sum: judged on networks of real size.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from shared_hooks import WrappedModel
from shared_hooks.models import load_spec
from studies.benchmarks.networks import ResNet18, ViT, built, image
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread

ALLOWED_SHARE = 0.02
ALLOWED_NS = 100_000
LARGE = ("ResNet-18", "ViT")
WHAT = {"around": "a clock around the call", "bare": "the unwrapped model"}


def measure(options: Options) -> Row:
    details: dict[str, Any] = {}
    notes: dict[str, list[str]] = {"around": [], "bare": []}
    worst = {"around": 0.0, "bare": 0.0}
    digits = load_spec("digits")
    few = digits.example(torch.device("cpu"))
    assert few is not None
    cases = {
        "ResNet-18": (built(ResNet18), image()),
        "ViT": (built(ViT), image()),
        "digits": (digits.load_model(torch.device("cpu")), few[0][0]),
        "32 digits": (digits.load_model(torch.device("cpu")), few[0][0].repeat(32, 1, 1, 1)),
    }
    for title, (model, x) in cases.items():
        around: list[int] = []
        bare: list[int] = []
        total: list[int] = []
        layers: list[int] = []
        with torch.no_grad(), WrappedModel(model) as wrapped:
            for number in range(-3, options.repeats(100)):
                spent = {}
                for name, run in sorted({"bare": model, "around": wrapped.forward}.items(), reverse=bool(number % 2)):
                    start = time.perf_counter_ns()
                    run(x)
                    spent[name] = time.perf_counter_ns() - start
                forward = wrapped.get_forward_metrics()
                assert forward is not None
                if number >= 0:
                    bare.append(spent["bare"])
                    around.append(spent["around"])
                    total.append(sum(layer.inference_ns for layer in wrapped.get_layer_metrics()) + forward.outside_ns)
                    layers.append(forward.layers_ns)
        known_values = {"around": around, "bare": bare, "total": total, "layers": layers}
        details[title] = {f"{name}_ns": Spread.of(values).as_dict() for name, values in known_values.items()}
        for name, known in (("around", around), ("bare", bare)):
            gap = abs(statistics.median(t - k for t, k in zip(total, known, strict=True)))
            whole = statistics.median(known)
            share = gap / max(ALLOWED_SHARE * whole, ALLOWED_NS)
            if name == "around" or title in LARGE:
                worst[name] = max(worst[name], share)
            notes[name].append(f"{title} {gap / 1e3:.0f} us of {whole / 1e6:.1f} ms ({gap / whole:.2%})")
    return Row(
        tuple(
            Line(f"layers + outside against {WHAT[name]}", worst[name], "of 2 %|100 us", 1.0, ", ".join(notes[name]))
            for name in worst
        ),
        details,
    )
