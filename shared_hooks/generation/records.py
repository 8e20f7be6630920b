"""What one step took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """Nanoseconds on the edge's clock: of the head, from there to the answer, and to take the answer. Bytes of headers
    and payloads. ``server``: nanoseconds on the server's clock, by name. ``company``: how many steps the server
    computed together at the most, this one included; 1: what it gives is exact. ``codec``: that of the hidden
    states; empty where they travelled as they are.
    """

    head_ns: int
    wait_ns: int
    answer_ns: int
    bytes_up: int
    bytes_down: int
    server: dict[str, int]
    company: int = 1
    codec: str = ""

    @property
    def total_ns(self) -> int:
        """Of the whole step on the edge."""
        return self.head_ns + self.wait_ns + self.answer_ns
