"""Every layer of the zoo's vision models: masked it is exact at every cut, pruned it is what zeroed channels give, or
refused by name.
"""

from __future__ import annotations

import copy

import pytest
import torch

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused
from shared_hooks.selection import Mask, Sample, capture, masked, pruned
from shared_hooks.selection.capture import place_of, run
from shared_hooks.selection.channels import trace
from tests.zoo import CASES, Case
from tests.zoo.case import Draw

VISION = [
    case for case in CASES if case.name.endswith("_like") or case.name in ("unet", "hf_resnet", "hf_mobilenet_v2")
]


def layers_of(case: Case, most: int) -> tuple[torch.nn.Module, Sample, list[str]]:
    model, (args, kwargs) = case.build().eval(), case.make(Draw(0))
    with WrappedModel(model) as wrapped:
        names = [layer.name for layer in wrapped.plan(*args, **kwargs).layers]
    return model, Sample(args, kwargs), names[:: max(1, len(names) // most)]


@pytest.mark.parametrize("case", VISION, ids=lambda case: case.name)
def test_pruned_is_what_zeroed_channels_give(case: Case) -> None:
    model, sample, layers = layers_of(case, 8)
    for layer in layers:
        try:
            space = trace(model, sample).space(layer)
            keep = list(range(0, space.channels, 2))
            pruned(model, layer, keep, [sample])
        except CutRefused as refusal:
            assert str(refusal)
            continue
        silent = copy.deepcopy(model)
        gone = [channel for channel in range(space.channels) if channel not in keep]
        with torch.no_grad():
            for path in (*space.makers, *space.carriers):
                for name in ("weight", "bias", "running_mean"):
                    if (tensor := getattr(silent.get_submodule(path), name, None)) is not None:
                        tensor[gone] = 0
        torch.testing.assert_close(
            run(pruned(silent, layer, keep, [sample]), sample), run(silent, sample), atol=1e-4, rtol=1e-3
        )


@pytest.mark.parametrize("case", VISION, ids=lambda case: case.name)
def test_masked_is_exact_at_the_cut(case: Case) -> None:
    _, sample, layers = layers_of(case, 2)
    for layer in layers:
        model = case.build().eval()
        try:
            module, dim = place_of(model, layer, sample)
        except CutRefused:
            continue
        captured = capture(model, layer, [sample])
        keep = tuple(range(0, captured.channels, 2))
        mask = Mask(module, dim, keep, tuple(captured.fill.float().tolist()))
        with WrappedModel(masked(model, mask)) as wrapped:
            early = wrapped.forward(*sample.args, end=mask.split, **sample.kwargs)
            output, whole = wrapped.forward(early, start=mask.split), run(model, sample)
        assert torch.equal(getattr(output, "logits", output), getattr(whole, "logits", whole))
