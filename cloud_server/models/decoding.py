"""Decoding sessions of a model in this process: from a step's bytes to its answer's bytes.

The engine computes a step (`shared_hooks.generation`); here it is unpacked, measured and packed as for any tail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from cloud_server.config import DecodingFactory
from cloud_server.models.engine import Computed, EngineSession, Following, WeightsGuard, owned
from shared_hooks import Parcel, WrappedModel
from shared_hooks.errors import BadFrame, CutRefused, IsthmusError, ModelFailed, SessionLost
from shared_hooks.forward import interruptible
from shared_hooks.generation import DecodingTail as OwnTail
from shared_hooks.generation.middle import MiddleDecodingSession
from shared_hooks.generation.remote_tensor import STEP_BYTES
from shared_hooks.generation.session import Message
from shared_hooks.generation.together import Ended, Lockstep, Outcome
from shared_hooks.lifecycle import Stage
from shared_hooks.observers import transforms
from shared_hooks.tensors.staging import to_device, wait

NEED = "need"
ALONE: Outcome[None] = Outcome(None, None, batch_size=1, meetings=0)


class DecodingSessionLike(Protocol):
    """The state of one model behind one cut, across steps."""

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors that it holds."""
        ...

    def step(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Compute the next step; the dictionaries are JSON-able.

        After an error the state is as before. A reply with `NEED` means that the step was not made and must be sent
        again.
        """
        ...

    def fork(self) -> DecodingSessionLike:
        """Return a copy, which can be continued independently."""
        ...


class DecodingTailLike(Protocol):
    """One model behind one cut."""

    def open(self) -> DecodingSessionLike: ...


class DecodingTails:
    """The decoding tails of one model by cut, each made for its first session. Thread-safe."""

    def __init__(
        self,
        wrapped: WrappedModel,
        device: torch.device,
        guard: WeightsGuard,
        factory: DecodingFactory | None = None,
        step_bytes: int = STEP_BYTES,
        bringing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``factory`` makes a cut's tail, instead of the own engine, whose steps may take ``step_bytes`` of memory.
        ``bringing``: a context around a step.
        """
        self.wrapped = wrapped
        self.device = device
        self.guard = guard
        self._factory = factory or self._own
        self.step_bytes = step_bytes
        self.bringing = bringing
        self._tails: dict[str, DecodingTailLike] = {}
        self._together: Lockstep | None = None
        self._lock = threading.Lock()
        self.closed = ""
        """Why none of its sessions can continue; empty while they can."""

    def close(self, why: str) -> None:
        """Drop all sessions, with what they hold."""
        self.closed = why
        with self._lock:
            self._tails.clear()

    def _own(self, wrapped: WrappedModel, cut: str) -> DecodingTailLike:
        return OwnTail(wrapped.model, cut, step_bytes=self.step_bytes, modules=wrapped.modules, turns=wrapped.turns)

    def open(self, cut: str, following: Following | None = None) -> ModelSession:
        """Open a session. ``following``: the part behind it. Raises UnknownLayer, CutRefused, and ModelFailed (the
        model's error).
        """
        try:
            with self._lock:
                if cut not in self._tails:
                    self._tails[cut] = self._factory(self.wrapped, cut)
                tail = self._tails[cut]
            if following is None:
                return ModelSession(self, cut, tail.open())
            if not isinstance(tail, OwnTail):
                raise CutRefused(f"what steps this model after {cut} runs to its end: no other server can follow")
            return ModelSession(self, cut, MiddleDecodingSession(tail, *following))
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error

    def begin(self, session: EngineSession, header: bytes, payload: memoryview) -> StepInProgress:
        """As `StepBatching.begin`."""
        assert isinstance(session, ModelSession)
        return StepInProgress(self, session, header, payload)

    def run(self, calls: Sequence[Callable[[], None]], ended: Ended) -> list[Outcome[None]]:
        """As `StepBatching.run`. The model's memory is checked once for all."""
        with self._lock:
            if self._together is None:
                self._together = Lockstep(self.wrapped.model)
        try:
            if len(calls) == 1 or any(tail.leaves for tail in self._tails.values() if isinstance(tail, OwnTail)):
                # objects that each request creates for itself would be created per batch
                alone = [self._together.run([call], partial(_renumbered, ended, n))[0] for n, call in enumerate(calls)]
                self.synchronize()
                return alone
            with self.wrapped.turn():
                outcomes = self._together.run(calls, ended)
                self.synchronize()
            return outcomes
        finally:
            self.guard.mend()

    def synchronize(self) -> None:
        """Wait for the device: on a GPU, kernels have only been launched until here."""
        wait(self.device)


def _renumbered(ended: Ended, number: int, _: int) -> BaseException | None:
    return ended(number)


class ModelSession:
    """An `engine.EngineSession` of a model in this process."""

    def __init__(self, tails: DecodingTails, cut: str, session: DecodingSessionLike) -> None:
        self._lost = ""
        self._tails = tails
        self.cut = cut
        self._session: DecodingSessionLike | None = session
        self._mended = tails.guard.mended

    @property
    def lost(self) -> str:
        """Why the session is gone; empty while it is usable."""
        return self._lost or self._tails.closed

    def step(self, header: bytes, payload: memoryview) -> Computed:
        """Raise ModelFailed with the model's error as cause, and SessionLost."""
        step = StepInProgress(self._tails, self, header, payload)
        try:
            step.run()
            self._tails.synchronize()
        finally:
            self._tails.guard.mend()
            self.check_model()
        return step.end()

    def fork(self) -> ModelSession:
        """Raise SessionLost, and ModelFailed with the model's error as cause."""
        try:
            made = ModelSession(self._tails, self.cut, self.held().fork())
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        made._mended = self._mended
        return made

    def close(self) -> None:
        session, self._session = self._session, None
        if isinstance(session, MiddleDecodingSession):
            session.close()

    def held(self) -> DecodingSessionLike:
        """Return the state. Raises SessionLost."""
        self.check_model()
        if self._session is None:
            raise SessionLost(self.lost or "it was closed")
        return self._session

    def check_model(self) -> None:
        """Raise SessionLost if weights had changed since it began: what they computed must not be continued."""
        if self._tails.guard.mended != self._mended:
            self.lose("the model had changed in memory and was loaded again")
            raise SessionLost(self._lost)
        if self._tails.closed:
            raise SessionLost(self._tails.closed)

    def lose(self, why: str) -> None:
        """Close the session, with the reason."""
        self._lost = why
        self.close()


class StepInProgress:
    """One step: unpacked on construction, then computed alone or with others, then packed."""

    def __init__(self, tails: DecodingTails, session: ModelSession, header: bytes, payload: memoryview) -> None:
        self._tails = tails
        self._session = session
        self._tail = session.held()
        self._done: Message = {}, []
        self._changed: tuple[str, ...] = ()
        self._rest: Callable[[], Message] | None = None
        lifecycle, started = tails.wrapped.lifecycle, time.perf_counter_ns()
        lifecycle.emit(Stage.BEFORE_DECODE, nbytes=payload.nbytes)
        requested, tensors = Parcel.tensors(header, payload, tails.step_bytes)
        if not isinstance(requested, dict):
            raise BadFrame(f"the header of a step says {type(requested).__name__}, not what is asked")
        self._asked, self._tensors = requested, [to_device(tensor, tails.device) for tensor in tensors]
        lifecycle.emit(Stage.AFTER_DECODE, value=(self._asked, self._tensors))
        self._decoded = time.perf_counter_ns()
        self._decode_ns = self._decoded - started
        lifecycle.emit(Stage.BEFORE_TAIL, split=session.cut)

    def run(self) -> None:
        """Raise ModelFailed with the model's error as cause."""
        try:
            # An interrupted step (its time limit) makes its session unusable.
            with interruptible(), transforms.during(self._tails.wrapped) as changed, self._tails.bringing():
                if isinstance(self._tail, MiddleDecodingSession):
                    begun = self._tail.begin(self._asked, self._tensors)
                    self._rest, self._done = (begun, self._done) if callable(begun) else (None, begun)
                else:
                    self._done = self._tail.step(self._asked, self._tensors)
                self._changed = tuple(changed())
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        except BaseException as error:  # raised from outside, at any line: how far the step got is unknown
            self._session.lose(f"a step was ended by {type(error).__name__}")
            raise

    def end(self, outcome: Outcome[None] = ALONE) -> Computed:
        """Raise SessionLost where the model had changed meanwhile, else the error of `run`."""
        computed, lifecycle = time.perf_counter_ns(), self._tails.wrapped.lifecycle
        self._session.check_model()
        outcome.result()
        lifecycle.emit(Stage.AFTER_TAIL, split=self._session.cut, output=self._done)
        took: dict[str, Any] = {
            "decode_ns": self._decode_ns,
            "compute_ns": computed - self._decoded,
            "transforms": self._changed,
        }
        if self._rest is None:
            return self._packed(self._done, batch_size=outcome.batch_size, **took)
        part = Computed.of(Parcel.of_tensors({}, []).header, (), 0, session_bytes=self._tail.nbytes, **took)
        return replace(part, rest=self._continued)

    def _continued(self) -> Computed:
        """Run the rest of a step in the middle of a chain, and return what the next server answers."""
        rest, self._rest = self._rest, None
        assert rest is not None
        try:
            return self._packed(rest())
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._session.check_model()

    def _packed(self, done: Message, **more: Any) -> Computed:
        reported, outputs = done
        lifecycle, began = self._tails.wrapped.lifecycle, time.perf_counter_ns()
        lifecycle.emit(Stage.BEFORE_ENCODE, value=done)
        parcel = Parcel.of_tensors(reported, outputs)
        lifecycle.emit(Stage.AFTER_ENCODE, nbytes=parcel.nbytes)
        return Computed.of(
            parcel.header,
            owned(parcel),
            parcel.nbytes,
            encode_ns=time.perf_counter_ns() - began,
            session_bytes=self._tail.nbytes,
            is_done=NEED not in reported,
            **more,
        )
