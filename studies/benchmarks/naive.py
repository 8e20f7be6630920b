"""The baseline: resume as a plain hook tool would. It runs every layer, on random data, and overwrites what is banked.

`NaiveResume` banks the output of the cut layer with a forward hook; to resume, it runs the whole model on random input
and another forward hook puts the banked output in the place of the cut layer's. Its CPU time is compared with
the whole model's, its answer with the right one, bit by bit, at every cut; next to it ours at the same cuts.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from studies.benchmarks.networks import CLASSICS, built, image
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import cpu_ns, interleave


class NaiveResume:
    """Hooks on one layer call of a model."""

    def __init__(self, model: nn.Module, layer_name: str) -> None:
        path, _, number = layer_name.partition("#")
        self._model = model
        self._module = model.get_submodule(path)
        self._call = int(number or 1)

    def bank(self, x: Tensor) -> Tensor:
        """The cut layer's output in a run on ``x``."""
        found: list[Tensor] = []
        self._run(x, lambda output: found.append(output.clone()))
        return found[0]

    def resume(self, banked: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The model's output with ``banked`` in the place of what the cut layer makes of random data."""
        # a copy: a later layer may work in place
        return self._run(torch.rand(shape), lambda output: banked.clone())

    def _run(self, x: Tensor, at_cut: Any) -> Tensor:
        left = self._call

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Any:
            nonlocal left
            left -= 1
            return at_cut(output) if left == 0 else None

        handle = self._module.register_forward_hook(hook)
        try:
            result: Tensor = self._model(x)
            return result
        finally:
            handle.remove()


def measure(options: Options) -> Row:
    cuts: list[dict[str, Any]] = []
    x = image()
    for name, build in CLASSICS.items():
        plain, model = built(build), built(build)
        model.load_state_dict(plain.state_dict(), assign=True)
        with torch.no_grad(), WrappedModel(model) as wrapped:
            expected = plain(x)
            wrapped.plan(x)
            layers = [layer for layer in wrapped.layers if layer.can_split]
            for layer in layers[:: max(1, len(layers) // 6) if options.quick else 1]:
                naive = NaiveResume(plain, layer.name)
                banked = naive.bank(x)
                early = wrapped.forward(x, end=layer.layer_id)
                run = {
                    "whole": partial(plain, x),
                    "naive": partial(naive.resume, banked, tuple(x.shape)),
                    "ours": partial(wrapped.forward, early, start=early.layer_id),
                }
                measured = interleave(run, 5, cpu_ns, warm_up=1)
                whole, resumed, ours = (statistics.median(measured[kind]) for kind in ("whole", "naive", "ours"))
                cuts.append(
                    {
                        "model": name,
                        "name": layer.name,
                        "naive": resumed / whole,
                        "ours": ours / whole,
                        "naive_is_right": torch.equal(run["naive"](), expected),
                        "ours_is_right": torch.equal(run["ours"](), expected),
                    }
                )
        options.say(f"  {name}")
    return Row(tuple(_lines(cuts)), {"cuts": cuts})


def _lines(cuts: list[dict[str, Any]]) -> list[Line]:
    lines = []
    for kind, title in (("naive", "baseline: naive resume"), ("ours", "the same for this tail")):
        ratios = [cut[kind] for cut in cuts]
        wrong = [cut for cut in cuts if not cut[f"{kind}_is_right"]]
        models = ", ".join(
            f"{name} {sum(cut['model'] == name for cut in wrong)} of {sum(cut['model'] == name for cut in cuts)}"
            for name in dict.fromkeys(cut["model"] for cut in cuts)
        )
        note = f"{min(ratios):.2f} to {max(ratios):.2f} over {len(cuts)} cuts; wrong answers: {models}"
        lines.append(Line(f"{title}, CPU / whole model, median", statistics.median(ratios), "x", None, note))
    return lines
