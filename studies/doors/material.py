"""What a client asks with, and what must come: files that need nothing but NumPy to be read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from shared_hooks import WrappedModel
from shared_hooks.crossing import named_crossing
from shared_hooks.models import load_spec

SPLIT = "stage2.0.conv2"
IMAGES = 3
CROSSES = "crosses:"
"""Before the names of what crosses."""


def make(folder: Path) -> Path:
    """A folder with `material.npz` (images, answers, and what crosses a cut, by name) and the tail's parameters."""
    spec = load_spec("digits")
    torch.manual_seed(1)
    images = torch.rand(IMAGES, 1, 32, 32)
    model = spec.load_model()
    with torch.no_grad():
        answers = model(images)
    with WrappedModel(model) as wrapped:
        early = wrapped.head(SPLIT, images)
        named = named_crossing(early.crossing, ["image"]).tensors
        crosses = {f"{CROSSES}{one.name}": one.tensor_of(early.pieces[one.piece]).contiguous().numpy() for one in named}
        parameters = {"isthmus_weights": wrapped.weights_hash()}
    np.savez(folder / "material.npz", images=images.numpy(), answers=answers.numpy(), **crosses)
    (folder / "parameters.json").write_text(json.dumps(parameters))
    return folder
