"""What sends the requests of one client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from edge_client.benching.shot import Ended, Shot

Over = Callable[[Ended], None]
"""Hears how a shot ended, in whatever thread that was."""


class Lane(Protocol):
    """One client: an identity and a stream of its own."""

    def begin(self) -> None:
        """Connects, and asks at each cut once, so that plans and recipes are made. Raises what that raises."""

    def send(self, shot: Shot, intended: float, over: Over) -> None:
        """Begins a request and does not wait. ``intended``: `time.monotonic` at which it was to begin."""

    def tick(self) -> None:
        """Gives up what has taken too long; called a few times a second."""

    def close(self) -> None:
        """Ends what is under way."""
