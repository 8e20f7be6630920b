"""`Pending`: a request under way, for who does not want to wait for it at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_client.answer import Answer
from edge_client.request.many import Started
from shared_hooks.showing import summary_of


@dataclass(frozen=True, slots=True, repr=False)
class Pending:
    """Its head has run, and the rest is under way. Ask for the answer once, or give it up.

    Made by `EdgeClient.submit`. Any thread may cancel it while another waits for its answer.
    """

    request: Any
    finish: Callable[[Any], Answer]
    leave: Callable[[Any, str], None]

    @property
    def settled(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        started: Started = self.request
        return started.settled

    def result(self) -> Answer:
        """Waits for the answer. Raises as `EdgeClient.infer`, and Cancelled after `cancel`."""
        return self.finish(self.request)

    def cancel(self, why: str = "the caller wants it no more") -> None:
        """Nobody wants it any more, and the server is informed; no effect on what is answered."""
        self.leave(self.request, why)

    def __repr__(self) -> str:
        return summary_of(self, "settled" if self.settled else "under way")
