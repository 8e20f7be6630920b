"""What a client asks with, and what must come: files that need nothing but NumPy to be read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from edge_client.inference import tail_request
from shared_hooks import WrappedModel
from shared_hooks.models import load_spec

SPLIT = "stage2.0.conv2"
IMAGES = 3


def make(folder: Path) -> Path:
    """A folder with `material.npz` (images, answers, what crosses a cut) and the tail's parameters."""
    spec = load_spec("digits")
    torch.manual_seed(1)
    images = torch.rand(IMAGES, 1, 28, 28)
    model = spec.load_model()
    with torch.no_grad():
        answers = model(images)
    with WrappedModel(model) as wrapped:
        crosses, parameters = tail_request(wrapped, "digits", wrapped.head(SPLIT, images))
    np.savez(folder / "material.npz", images=images.numpy(), answers=answers.numpy(), crosses=crosses)
    (folder / "parameters.json").write_text(json.dumps(parameters))
    return folder
