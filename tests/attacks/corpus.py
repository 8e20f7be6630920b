"""What honest clients send: recordings of requests at many cuts of two models, as plain JSON and bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import CutRefused
from shared_hooks.models import ModelSpec, load_spec
from shared_hooks.models.spec import spec_from_table
from shared_hooks.models.table import Table
from tests.attacks.models import Mood, Options, Reader

READER = "reader"
DIGITS = "digits"
KEEPER = "keeper"
TARGETS = {READER: ("Reader", "example"), KEEPER: ("Keeper", "keeper_example")}
"""What a server makes of the models of `tests.attacks.models`: class and example."""


@dataclass(frozen=True)
class Recording:
    """One honest request. ``crossing`` and ``header`` are JSON texts, ``answer`` is what the whole model gives."""

    model_id: str
    crossing: bytes
    header: bytes
    payload: bytes
    answer: Any
    early: EarlyOutput

    @property
    def told(self) -> dict[str, Any]:
        """The cut's description, to be changed at will."""
        found: dict[str, Any] = json.loads(self.crossing)
        return found

    @property
    def body(self) -> dict[str, Any]:
        """The header without its checksum."""
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


def corpus(seed: int, *, small: bool = False) -> list[Recording]:
    """Recordings of all models, in a random order."""
    found = [*record(READER, 3 if small else 6), *record(KEEPER, 2), *record(DIGITS, 1, 12 if small else 6)]
    random.Random(seed).shuffle(found)
    return found
