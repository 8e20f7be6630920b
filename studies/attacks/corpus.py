"""What honest clients send: recordings of requests at many cuts, as plain JSON and bytes, and input files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.config import Table
from shared_hooks.errors import CutRefused
from shared_hooks.models import ModelSpec, load_spec
from shared_hooks.models.spec import spec_from_table
from studies.attacks.models import Mood, Options, Reader

READER = "reader"
DIGITS = "digits"
KEEPER = "keeper"
TARGETS = {READER: ("Reader", "example"), KEEPER: ("Keeper", "keeper_example")}
"""What a server makes of the models of `studies.attacks.models`: class and example."""


@dataclass(frozen=True)
class Recording:
    """One honest request. ``crossing`` and ``header`` are JSON texts, ``answer`` is what the whole model gives."""

    model_id: str
    crossing: bytes
    header: bytes
    payload: bytes
    answer: Any
    early: EarlyOutput

    @cached_property
    def reported(self) -> dict[str, Any]:
        """The cut's description; shared, so that who changes it changes a copy."""
        found: dict[str, Any] = json.loads(self.crossing)
        return found

    @cached_property
    def body(self) -> dict[str, Any]:
        """The header without its checksum; shared like the description."""
        found: dict[str, Any] = json.loads(self.header[8:])
        return found


def spec_of(model_id: str) -> ModelSpec:
    """How a server loads one of the models."""
    if model_id == DIGITS:
        return load_spec(DIGITS)
    factory, example = (f"{Reader.__module__}:{name}" for name in TARGETS[model_id])
    return spec_from_table(Table({"id": model_id, "factory": factory, "example": example}, "attacks"), Path.cwd())


def inputs_of(model_id: str, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The ``number``-th input of a model: several forms."""
    generator = torch.Generator().manual_seed(number)
    if model_id == DIGITS:
        return (torch.randn(1 + number % 2, 1, 32, 32, generator=generator),), {}
    if model_id == KEEPER:
        return (torch.randn(1 + number % 2, 8, generator=generator),), {}
    ids = torch.randint(0, 50, (1 + number % 3, 4 + number % 2), generator=generator)
    mask = torch.rand(ids.shape, generator=generator) > 0.3
    options = Options(0.5, 1 + number % 2, Mood.LOUD)
    return [((ids,), {}), ((ids, mask), {}), ((ids,), {"mask": mask, "options": options})][number % 3]


def record(model_id: str, count: int, stride: int = 1) -> Iterator[Recording]:
    """Requests on ``count`` inputs, at every ``stride``-th cut."""
    model = spec_of(model_id).load_model()
    with WrappedModel(model) as edge, torch.no_grad():
        for number in range(count):
            args, kwargs = inputs_of(model_id, number)
            plan = edge.plan(*args, **kwargs)
            torch.manual_seed(number)
            answer = edge.whole(*args, **kwargs)
            for cut in ["input", *range(number % stride, len(plan.layers), stride)]:
                torch.manual_seed(number)
                try:
                    early = edge.head(cut, *args, **kwargs)
                except CutRefused:
                    continue
                parcel = early.pack()
                payload = b"".join(parcel.buffers)
                yield Recording(model_id, early.crossing.to_bytes(), parcel.header, payload, answer, early)


def corpus() -> list[Recording]:
    """Recordings of all models; the same each time, so that a volley is known by its seed and number."""
    return [*record(READER, 6), *record(KEEPER, 2), *record(DIGITS, 1, 6)]


def files() -> list[tuple[str, bytes]]:
    """(suffix, bytes) of an input of digits in every format that a server reads."""
    values = np.random.default_rng(5).integers(0, 255, (32, 32), dtype=np.uint8)
    found = []
    for suffix, kind in ((".png", "PNG"), (".jpg", "JPEG"), (".bmp", "BMP"), (".gif", "GIF"), (".webp", "WEBP"),
                         (".tiff", "TIFF"), (".ppm", "PPM")):  # fmt: skip
        file = BytesIO()
        Image.fromarray(values).save(file, kind)
        found.append((suffix, file.getvalue()))
    array = BytesIO()
    np.save(array, values[None, None].astype(np.float32) / 255)
    tensor = torch.from_numpy(values[None, None].astype(np.float32) / 255)
    return [*found, (".npy", array.getvalue()), (".safetensors", save({"x": tensor}))]
