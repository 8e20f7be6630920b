"""How a step gets to the other side. `InProcess` is for tests and studies: through bytes, without a network."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shared_hooks.crossing import Parcel
from shared_hooks.errors import BadFrame, IsthmusError, ModelFailed
from shared_hooks.generation.session import DecodingSession, DecodingTail
from shared_hooks.state import Dice


@dataclass(frozen=True)
class StepReply:
    """What came back. Bytes are those of headers and payloads, durations nanoseconds on the server's clock.

    ``company``: how many steps were computed together at the most, this one included; 1: it is as if computed alone.
    """

    header: dict[str, Any]
    tensors: list[torch.Tensor]
    bytes_up: int = 0
    bytes_down: int = 0
    durations: dict[str, int] = field(default_factory=dict)
    company: int = 1


class Link(Protocol):
    """Sessions on the other side, by a number of the caller's choosing."""

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        fork: tuple[int, int] | None,
    ) -> StepReply:
        """The ``number``-th step of a session, from 0; the first one opens it. ``fork``: it continues from that session
        after so many steps. Raises SessionLost where the other side does not have it any more.
        """

    def close(self, session: int) -> None:
        """It is not needed any more. Never raises."""


class InProcess:
    """A tail in this process. ``record``: a list that gets all bytes that cross, in both directions."""

    def __init__(self, tail: DecodingTail, record: list[bytes] | None = None) -> None:
        self._tail = tail
        self._record = record
        self.sessions: dict[int, DecodingSession] = {}
        self.steps: dict[int, int] = {}

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        fork: tuple[int, int] | None,
    ) -> StepReply:
        """As `Link` says; BadFrame for steps out of order."""
        up = Parcel.of_tensors(header, tensors)
        meta, came = Parcel.tensors(up.header, self._through(up))
        if fork is not None and number == 0:
            if self.steps.get(fork[0]) != fork[1]:
                raise BadFrame(f"session {fork[0]} is not at step {fork[1]}")
            self.sessions[session], self.steps[session] = self.sessions[fork[0]].fork(), 0
        elif number == 0:
            self.sessions[session], self.steps[session] = self._tail.open(), 0
        if self.steps.get(session) != number:
            raise BadFrame(f"session {session} is not at step {number}")
        began = time.perf_counter_ns()
        dice = Dice()  # another process has its own generators
        try:
            answer, made = self.sessions[session].step(meta, came)
        except IsthmusError:
            raise
        except Exception as error:  # as a server says it
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        finally:
            dice.restore()
        took = {"compute": time.perf_counter_ns() - began}
        if "need" not in answer:
            self.steps[session] = number + 1
        down = Parcel.of_tensors(answer, made)
        back, results = Parcel.tensors(down.header, self._through(down))
        return StepReply(back, results, len(up.header) + up.nbytes, len(down.header) + down.nbytes, took)

    def _through(self, parcel: Parcel) -> bytearray:
        data = bytearray().join(parcel.buffers)
        if self._record is not None:
            self._record += [parcel.header, bytes(data)]
        return data

    def close(self, session: int) -> None:
        """As `Link` says."""
        self.sessions.pop(session, None)
        self.steps.pop(session, None)
