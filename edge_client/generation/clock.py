"""When tokens come, seen from inside ``generate()`` of transformers: a stopping criterion that never stops anything."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Called by ``generate()`` after every new token, or after several at once (assisted decoding)."""

    def __init__(self) -> None:
        self.began = time.perf_counter_ns()
        self.first: int | None = None
        self.first_length = 0
        self.length = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        """Nothing stops."""
        self.length = input_ids.shape[-1]
        if self.first is None:
            self.first, self.first_length = time.perf_counter_ns(), self.length
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def criteria_with(clock: Clock, given: Any) -> Any:
    """transformers' list of stopping criteria: those ``given``, and the clock."""
    from transformers import StoppingCriteriaList

    return StoppingCriteriaList([*(given or ()), clock])


def prompt_length(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock) -> int:
    """How many tokens the sequences began with."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        ids = kwargs.get("decoder_input_ids")
    else:
        ids = next((one for one in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs")) if one is not None), None)
        if ids is None and kwargs.get("inputs_embeds") is not None:
            return 0
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[1] < clock.first_length:
        return ids.shape[1]
    return max(0, clock.first_length - 1)
