"""Where answers go: what requests and their table need to know of a stream."""

from __future__ import annotations

from typing import Protocol

from cloud_server.access import Caller
from cloud_server.requests.answers import Answer
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError
from shared_hooks.sharing import Party


class Outlet(Protocol):
    """One client's stream, as seen by what runs for it. `session.StreamSession` is one."""

    @property
    def client_id(self) -> str: ...

    @property
    def caller(self) -> Caller:
        """Whose stream it is."""
        ...

    @property
    def party(self) -> Party:
        """On whom it counts what is held for it."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing is taken from it or sent on it any more."""
        ...

    @property
    def inline_bytes(self) -> int:
        """Answers up to this size go in their header."""
        ...

    @property
    def undelivered(self) -> int:
        """Answers that the client has not begun to fetch."""
        ...

    @property
    def stuck_seconds(self) -> float:
        """How long nothing was fetched of what is being sent; 0 where nothing is."""
        ...

    def withdraw(self, answer: Answer, failure: split_pb2.RequestFailed) -> bool:
        """Takes an answer out of the line, and puts ``failure`` in its place; False when it is being sent."""
        ...

    def drop(self, error: IsthmusError) -> None:
        """Ends the stream at once, with what is in line."""
        ...

    def send(self, item: split_pb2.ServerFrame | Answer) -> None:
        """Puts a frame or an answer in line; never blocks. After the stream's end it is dropped."""
        ...
