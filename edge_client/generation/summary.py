"""What one generation took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared_hooks.generation import StepRecord
from shared_hooks.showing import duration, html_table, panel, size, summary_of

# Timestamps of tokens, taken inside ``generate()`` of transformers: a stopping criterion that never stops anything.


class Clock:
    """A stopping criterion that records times: called by ``generate()`` after every token, or after several (assisted
    decoding).
    """

    def __init__(self) -> None:
        self.began = time.perf_counter_ns()
        self.first: int | None = None
        self.first_length = 0
        self.length = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        """Returns False for all rows: it never stops."""
        self.length = input_ids.shape[-1]
        if self.first is None:
            self.first, self.first_length = time.perf_counter_ns(), self.length
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def criteria_with(clock: Clock, given: Any) -> Any:
    """transformers' list of stopping criteria: those ``given``, and the clock."""
    from transformers import StoppingCriteriaList

    return StoppingCriteriaList([*(given or ()), clock])


def prompt_length(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock) -> int:
    """Return the number of tokens that the sequences began with."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        ids = kwargs.get("decoder_input_ids")
    else:
        ids = next((one for one in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs")) if one is not None), None)
        if ids is None and kwargs.get("inputs_embeds") is not None:
            return 0
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[1] < clock.first_length:
        return ids.shape[1]
    return max(0, clock.first_length - 1)


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """What one `generate` took. Times in nanoseconds on the edge's clock; bytes are those of headers and payloads.

    ``tokens``: new ones of the longest of ``rows`` sequences. ``first_token_ns``: until the first of them was there;
    None if unknown. ``head_ns``: of all steps, up to the cut. ``server_ns``: the server's own, on its
    clock. ``round_trips``: steps that were answered; with drafts there are fewer than tokens.
    """

    rows: int
    tokens: int
    total_ns: int
    first_token_ns: int | None
    round_trips: int
    bytes_up: int
    bytes_down: int
    first_bytes_up: int
    first_bytes_down: int
    head_ns: int
    server_ns: int

    @classmethod
    def of(
        cls, records: Sequence[StepRecord], *, rows: int, tokens: int, total_ns: int, first_token_ns: int | None
    ) -> Summary:
        """Summarise the records of all steps."""
        first = records[0] if records else None
        return cls(
            rows=rows,
            tokens=tokens,
            total_ns=total_ns,
            first_token_ns=first_token_ns,
            round_trips=len(records),
            bytes_up=sum(one.bytes_up for one in records),
            bytes_down=sum(one.bytes_down for one in records),
            first_bytes_up=first.bytes_up if first else 0,
            first_bytes_down=first.bytes_down if first else 0,
            head_ns=sum(one.head_ns for one in records),
            server_ns=sum(sum(one.server.values()) for one in records),
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of one sequence, after its first token; None where there is no second."""
        if self.first_token_ns is None or self.tokens < 2 or self.total_ns <= self.first_token_ns:
            return None
        return (self.tokens - 1) * 1e9 / (self.total_ns - self.first_token_ns)

    @property
    def bytes_up_per_token(self) -> float | None:
        """After the first step, which brings the prompt; None where there is no second."""
        return (self.bytes_up - self.first_bytes_up) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def bytes_down_per_token(self) -> float | None:
        """As `bytes_up_per_token`."""
        return (self.bytes_down - self.first_bytes_down) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def line(self) -> str:
        """All of it for people, in one line."""
        rate = self.tokens_per_second
        parts = [
            f"{self.tokens} tokens" + (f" in each of {self.rows}" if self.rows > 1 else ""),
            "" if rate is None else f"{rate:.1f} tokens/s",
            "" if self.first_token_ns is None else f"first after {duration(self.first_token_ns)}",
            f"{self.round_trips} round trips",
            f"{size(self.bytes_up)} up, {size(self.bytes_down)} down",
        ]
        return ", ".join(part for part in parts if part)

    def as_dict(self) -> dict[str, float | int | None]:
        """Return JSON data, by the names of the fields."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "total_ns": self.total_ns,
            "first_token_ns": self.first_token_ns,
            "round_trips": self.round_trips,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "bytes_up_per_token": self.bytes_up_per_token,
            "bytes_down_per_token": self.bytes_down_per_token,
            "head_ns": self.head_ns,
            "server_ns": self.server_ns,
        }

    def __repr__(self) -> str:
        return summary_of(self, self.line)

    def _repr_html_(self) -> str:
        rate = self.tokens_per_second
        rows = [
            ("tokens a second", "-" if rate is None else f"{rate:.1f}"),
            ("time to first token", duration(self.first_token_ns)),
            ("round trips", str(self.round_trips)),
            ("up, a token", size(self.bytes_up_per_token)),
            ("down, a token", size(self.bytes_down_per_token)),
            ("up, in all", size(self.bytes_up)),
            ("down, in all", size(self.bytes_down)),
            ("head", duration(self.head_ns)),
            ("server", duration(self.server_ns)),
            ("in all", duration(self.total_ns)),
        ]
        return panel(f"{self.tokens} tokens", html_table(("what", "figure"), rows, (1,)))
