"""`SessionLink`: decoding sessions over a client's connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from edge_client.answer import Answer
from edge_client.core import ClientCore
from edge_client.request.requests import SentStep
from edge_client.transport import Stamps, State, Times, wire
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError
from shared_hooks.generation import StepReply
from shared_hooks.generation.edge_session import PendingStep

CLOSE_SECONDS: Final = 0.5
"""How long closing a session may take; otherwise the server closes it once it has been idle for long."""


class SessionLink:
    """Decoding sessions of ``client``'s model, cut after the layer ``cut``: a `shared_hooks.generation.EdgeLink`.
    Along a chain ``cut`` is a list with one cut for each server.

    A step is an ordinary request: it has a deadline (``deadline`` seconds; None: the client's), is sent again after a
    lost connection, and is computed once. The server's refusals are raised: SessionLost (the session can be rebuilt
    from its steps), StepOutOfOrder, UnknownLayer, CutRefused, TooLarge, ServerUnavailable. Thread-safe; steps of one
    session follow each other.

    ``exact`` False: the server may compute steps together with those of other sessions, which is faster. The last bits
    may then differ, as `StepReply.batch_size` says.
    """

    def __init__(
        self, client: ClientCore, cut: str | Sequence[str], *, deadline: float | None = None, exact: bool = True
    ) -> None:
        self.cut, *rest = (cut,) if isinstance(cut, str) else cut
        hops = zip(client.chain[1:], rest, strict=True)
        self._route = tuple(split_pb2.Hop(server=server, cut=cut) for server, cut in hops)
        self.exact = exact
        self.at_once = 1
        """The number of sessions, including this one, whose steps are sent at the same time."""
        self.deadline = deadline
        self._client = client

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        fork: tuple[int, int] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> StepReply:
        """Make the ``number``-th step of a session, which the caller numbers from 0; the first one opens it.

        ``header``: JSON-able. ``fork``: (session, steps) that this session continues from. ``meanwhile``: called while
        the server computes, after the check that the model is unchanged; an error of either is raised in place of the
        answer.
        """

        def check() -> None:
            self._client.check_unchanged()
            meanwhile()

        of, steps = fork or (0, 0)
        together = 0 if self.exact else self.at_once
        decoding = split_pb2.Decoding(cut=self.cut, fork_of=of, fork_step=steps, together=together)
        reply: StepReply = self._begun(session, number, decoding, header, tensors).result(check)
        return reply

    def close(self, session: int) -> None:
        """Release a session. Waits at most half a second; without a connection it does nothing."""
        if self._client.state is not State.READY:
            return
        try:
            closing = split_pb2.Decoding(cut=self.cut, close=True)
            self._begun(session, 0, closing, {}, [], CLOSE_SECONDS).result()
        except IsthmusError:
            pass  # it has left already, or will be evicted when idle

    def begin(
        self, session: int, number: int, header: dict[str, Any], tensors: list[torch.Tensor], branch: int
    ) -> PendingStep:
        """As `step`, without waiting for the answer: see `shared_hooks.generation.EdgeLink`."""
        self._client.check_unchanged()
        return self._begun(session, number, split_pb2.Decoding(cut=self.cut, branch=branch), header, tensors)

    @property
    def begins(self) -> bool:
        """Whether a session may have several steps in progress: not along a chain."""
        return not self._route

    def _begun(
        self,
        session: int,
        number: int,
        decoding: split_pb2.Decoding,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        deadline: float | None = None,
    ) -> SentStep:
        pack = partial(wire.outgoing_step, session, number, decoding, header, tensors, self._route)
        until = self._client.until(self.deadline if deadline is None else deadline)
        step = self._client.requests.begin_step(pack, self.cut, Stamps(), until)
        return replace(step, answer=lambda: _reply(step.answer()))


def _reply(answer: Answer) -> StepReply:
    reported, results = answer.output
    nbytes = answer.bytes_up, answer.bytes_down
    return StepReply(reported, results, *nbytes, _durations(answer.times), answer.batch_size)


def _durations(times: Times) -> dict[str, int]:
    """Return the server's own durations (ns)."""
    return {
        "queue": times.server_queue,
        "decode": times.server_decode,
        "compute": times.server_compute,
        "encode": times.server_encode,
    }
