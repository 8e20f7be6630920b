"""`TopTokens`: the likeliest next tokens at every step of ``transformers``' ``generate()``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import InputMismatch
from shared_hooks.modules import ROOT
from shared_hooks.observers.base import Observer, Record
from shared_hooks.observers.deferred import Deferred
from shared_hooks.observers.texts import Texts
from shared_hooks.observers.values import is_real
from shared_hooks.observers.watching import ObservedCall


@dataclass(frozen=True)
class Tokens(Record):
    """The k likeliest tokens after the last position of one row of a batch, the likeliest first.

    ``text``: each decoded by itself; empty without a tokenizer, or where it has none for one of them.
    ``probabilities``: softmax of the logits as the model gives them, before temperature and the like.
    """

    row: int
    ids: tuple[int, ...]
    logits: tuple[float, ...]
    probabilities: tuple[float, ...]
    text: tuple[str, ...]


class TopTokens(Observer):
    """One `Tokens` for each step and row. ``tokenizer``: has ``decode([id])`` or ``convert_ids_to_tokens([id])``.

    Looks at the model's own output (``.logits``, ``["logits"]``, or a tensor of shape (..., vocabulary)) unless
    ``targets`` names a module that gives logits. In a split model the logits are on the tail's side.
    """

    def __init__(
        self,
        targets: Any = None,
        every_n: int = 1,
        max_records: int = 1000,
        k: int = 5,
        tokenizer: Any = None,
        **more: Any,
    ) -> None:
        super().__init__(targets, every_n, max_records, **more)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise InputMismatch(f"k is a number from 1 up, not {k!r}")
        self.k = k
        self._texts = None if tokenizer is None else Texts(tokenizer)

    def default_targets(self, model: nn.Module) -> dict[nn.Module, str]:
        return {model: ROOT}

    def observe(self, call: ObservedCall, name: str, step: int) -> Deferred | None:
        logits = logits_in(call.output)
        if logits is None:
            return None
        last = (logits[:, -1] if logits.dim() == 3 else logits.reshape(-1, logits.shape[-1])).float()
        top = last.topk(min(self.k, last.shape[-1]))
        shares = (top.values - last.logsumexp(-1, keepdim=True)).exp()
        # ids are exact in float64
        wide = torch.float32 if last.device.type == "mps" else torch.float64
        values = torch.stack([top.indices.to(wide), top.values.to(wide), shares.to(wide)])
        shape = values.shape

        def make(values: torch.Tensor) -> list[Tokens]:
            ids, logits, probabilities = values.reshape(shape).tolist()
            return [
                self._record(name, step, row, *columns)
                for row, columns in enumerate(zip(ids, logits, probabilities, strict=True))
            ]

        return Deferred(values.reshape(-1), make)

    def _record(
        self, name: str, step: int, row: int, ids: list[float], logits: list[float], shares: list[float]
    ) -> Tokens:
        numbers = tuple(map(int, ids))
        text, why = ((), "") if self._texts is None else self._texts.of(numbers)
        if why and not any(note.startswith("the tokenizer") for note in self.notes):
            self.notes = (*self.notes, why)
        return Tokens(name, step, row, numbers, tuple(logits), tuple(shares), text)


def logits_in(output: Any) -> torch.Tensor | None:
    """The logits in a model's output; None if there are none."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if found is None:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
    if not is_real(found) or not found.is_floating_point() or found.dim() < 1 or found.numel() == 0:
        return None
    logits: torch.Tensor = found
    return logits
