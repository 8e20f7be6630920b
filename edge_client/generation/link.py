"""`SessionLink`: the way of decoding sessions to the server, over a client's standing connection."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from edge_client.client import EdgeClient
from edge_client.transport import Stamps, State, Times, wire
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError

CLOSE_SECONDS: Final = 0.5
"""For the server to hear that a session is closed; else it finds out by itself, when it is idle for long."""

_ids = itertools.count(1)
"""Of the sessions of this process; a client's own are told apart by them."""


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What a step was answered with. ``bytes_up``, ``bytes_down``: header and payload, without the wire's framing.
    ``times``: rows in nanoseconds, the server's own (``server_compute`` ...) among them.
    """

    header: dict[str, Any]
    tensors: list[torch.Tensor]
    bytes_up: int
    bytes_down: int
    times: Times


class SessionLink:
    """Decoding sessions of ``client``'s model, cut after the layer ``cut``. Any thread may call.

    A step is a request like any other: it has a deadline, is sent again after a lost connection, and is computed once.
    The server's refusals come as they are: SessionLost (make the session again from its steps), StepOutOfOrder,
    TooLarge, CutRefused, ServerUnavailable.
    """

    def __init__(self, client: EdgeClient, cut: str) -> None:
        self.cut = cut
        self._client = client

    @staticmethod
    def new_session() -> int:
        """An id that no other session of this process has."""
        return next(_ids)

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        *,
        fork_of: int = 0,
        deadline: float | None = None,
    ) -> StepAnswer:
        """Step ``number`` (from 0, which opens the session). ``header``: JSON-able.

        ``fork_of``: the session begins as a copy of that one, which has done ``number`` steps, and goes on with this.
        ``deadline``: seconds; None = the client's.
        """
        return self._ask(session, number, header, tensors, fork_of=fork_of, deadline=deadline)

    def fork(self, session: int, of: int, steps: int, *, deadline: float | None = None) -> None:
        """From now on ``session`` is a copy of session ``of``, which has done ``steps`` steps: that is its next."""
        self._ask(session, steps, None, [], fork_of=of, deadline=deadline)

    def close(self, session: int) -> None:
        """The server may forget it. Waits for half a second at most; without a connection it says nothing."""
        if self._client.state is not State.READY:
            return
        try:
            self._ask(session, 0, None, [], close=True, deadline=CLOSE_SECONDS)
        except IsthmusError:
            pass  # it is gone already, or will be when it has been idle for long

    def _ask(
        self,
        session: int,
        number: int,
        header: dict[str, Any] | None,
        tensors: list[torch.Tensor],
        *,
        fork_of: int = 0,
        close: bool = False,
        deadline: float | None = None,
    ) -> StepAnswer:
        stamps, until = Stamps(), self._client.until(deadline)
        decoding = split_pb2.Decoding(cut=self.cut, fork_of=fork_of, close=close)
        pack = partial(wire.outgoing_step, session, number, decoding, header, tensors)
        answer = self._client.requests.ask(pack, self.cut, stamps, until)
        said, found = answer.output
        return StepAnswer(said, found, answer.bytes_up, answer.bytes_down, answer.times)
