"""What a request asks of a decoding session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloud_server.decoding.books import Session
from cloud_server.models import Begun, Computed
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame
from shared_hooks.generation.together import Outcome

MAX_NAME = 1024
"""Characters of a layer's name."""


@dataclass(frozen=True)
class Step:
    """``fork_of``: 0, or the session of which this one begins as a copy, when that has done ``fork_step`` steps.
    ``together``: it may be computed with steps of other sessions.
    """

    session: int
    number: int
    cut: str
    fork_of: int
    fork_step: int
    close: bool
    together: bool = False

    @classmethod
    def of(cls, frame: split_pb2.RequestHeader) -> Step | None:
        """None for a request on its own. Raises BadFrame for what says two things at once."""
        decoding = frame.decoding
        if not frame.HasField("decoding"):
            if frame.session_id or frame.step:
                raise BadFrame("session_id and step are of decoding sessions, and must be 0 in other requests")
            return None
        if not frame.session_id:
            raise BadFrame("a step of decoding session 0; sessions are numbered from 1")
        if frame.cut_digest or frame.HasField("file"):
            raise BadFrame("a step of a decoding session names its cut, and has no description of one, nor a file")
        if len(decoding.cut) > MAX_NAME:
            raise BadFrame(f"a layer's name of {len(decoding.cut)} characters; at most {MAX_NAME} are taken")
        if decoding.fork_of == frame.session_id:
            raise BadFrame(f"decoding session {frame.session_id} cannot begin as a copy of itself")
        if decoding.close and (decoding.fork_of or frame.header or frame.payload_bytes):
            raise BadFrame("a decoding session is closed by a request without a header, a payload or a fork")
        if not (frame.header or decoding.close):
            raise BadFrame("a step of a decoding session without a header says nothing")
        if decoding.fork_of and frame.step:
            raise BadFrame(f"step {frame.step} of a decoding session; only step 0 opens it as a copy")
        fork = decoding.fork_of, decoding.fork_step
        return cls(frame.session_id, frame.step, decoding.cut, *fork, decoding.close, decoding.together)


@dataclass(frozen=True)
class Taken:
    """A session that is at a step, and the step."""

    session: Session
    begun: Begun


@dataclass(frozen=True)
class Turn:
    """A step, and who takes it: header and payload in, the answer out. ``begin`` and ``end`` do the same in two halves,
    between which it is computed with others (`Engine.company`).
    """

    step: Step
    compute: Callable[[bytes, memoryview], Computed]
    begin: Callable[[bytes, memoryview], Taken]
    end: Callable[[Taken, Outcome[None]], Computed]
