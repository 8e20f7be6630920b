"""What `generate()` is given: text, with pictures or sound where a model takes them, one row or a batch of several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from studies.library.check import short
from studies.library.hub_inputs import Make, ways
from studies.library.subject import NotUsable, seed_all

PADS = (0, 2, 4)
"""How many of a row's places are padding, of rows in turn."""
LONG = ("input_ids", "attention_mask", "bbox", "token_type_ids")


@dataclass(frozen=True)
class Prompts:
    """``label``: what they are made of. ``right``: whether padding goes behind the text, as encoders have it."""

    label: str
    make: Make
    right: bool

    def batch(self, rows: int, seed: int) -> dict[str, Any]:
        """Arguments of ``generate`` for so many rows; with several, text has padding and a mask that says so."""
        made = [self._row(number, rows, seed) for number in range(rows)]
        joined: dict[str, Any] = {}
        for name, value in made[0].items():
            joined[name] = torch.cat([row[name] for row in made]) if isinstance(value, Tensor) else value
        return joined

    def _row(self, number: int, rows: int, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(100 * seed + number)
        row = self.make(generator)
        row.pop("decoder_input_ids", None)
        ids = row.get("input_ids")
        if ids is None:
            return row
        if len(ids) > 1:
            row = {name: value[:1] if len(value) == len(ids) else value for name, value in row.items()}
        length = ids.shape[1]
        row["attention_mask"] = torch.ones(1, length, dtype=torch.long)
        if rows > 1:
            row = {name: self._padded(name, value, number, generator) for name, value in row.items()}
        return row

    def _padded(self, name: str, value: Any, number: int, generator: torch.Generator) -> Any:
        if name not in LONG:
            return value
        pads = PADS[number % len(PADS)]
        more = torch.zeros(1, max(PADS), *value.shape[2:], dtype=value.dtype)
        if name == "input_ids":
            more = torch.randint(5, 100, more.shape, generator=generator)
        elif name == "attention_mask":
            more += 1
        if self.right:
            more[:, more.shape[1] - pads :] = 0
            return torch.cat([value, more], 1)
        more[:, :pads] = 0
        return torch.cat([more, value], 1)


def _candidates(model: nn.Module) -> Iterator[Prompts]:
    right = bool(getattr(model.config, "is_encoder_decoder", False))
    for label, make in ways(model):
        yield Prompts(label, make, right)


def prompts(model: Any) -> Prompts:
    """The first way to call the model's ``generate`` that works. Raises NotUsable with what was tried."""
    troubles = []
    for candidate in _candidates(model):
        try:
            given = candidate.batch(1, 0)
            seed_all(5)
            with torch.no_grad():
                model.generate(**given, max_new_tokens=3, do_sample=False)
        except Exception as error:
            troubles.append(f"{candidate.label}: {short(error, 120)}")
        else:
            return candidate
    raise NotUsable("does not generate: " + "; ".join(troubles[:2]))
