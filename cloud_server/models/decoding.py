"""Decoding sessions of a model in this process: a step's bytes in, its answer's bytes out.

What a step computes is the engine's own (`shared_hooks.generation`); here it is unpacked, watched and packed as any
tail's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from cloud_server.config import DecodingFactory
from cloud_server.models.engine import Computed, EngineSession, owned
from cloud_server.models.weights_guard import WeightsGuard
from shared_hooks import Parcel, WrappedModel
from shared_hooks.errors import BadFrame, IsthmusError, ModelFailed, SessionLost
from shared_hooks.forward import interruptible
from shared_hooks.generation import DecodingTail as OwnTail
from shared_hooks.generation.remote_tensor import STEP_BYTES
from shared_hooks.generation.together import Ended, Outcome, Together
from shared_hooks.lifecycle import Stage
from shared_hooks.observers import transforms
from shared_hooks.tensors.staging import to_device, wait

NEED = "need"
ALONE: Outcome[None] = Outcome(None, None, company=1, meetings=0)


class DecodingSession(Protocol):
    """The state of one model behind one cut, from step to step."""

    @property
    def nbytes(self) -> int:
        """Memory of the tensors held for it."""
        ...

    def step(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The next step; the dictionaries are JSON-able. After any error all is as before. One that says `NEED` was not
        made, and comes again.
        """
        ...

    def fork(self) -> DecodingSession:
        """A copy: both may go on from here."""
        ...


class DecodingTail(Protocol):
    """One model behind one cut."""

    def open(self) -> DecodingSession: ...


class DecodingTails:
    """The decoding tails of one model, by cut; each is made for its first session. Any thread may call."""

    def __init__(
        self,
        wrapped: WrappedModel,
        device: torch.device,
        guard: WeightsGuard,
        factory: DecodingFactory | None = None,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        """``factory``: what makes a cut's tail, in place of our own engine, whose steps may take ``step_bytes`` of
        memory.
        """
        self.wrapped = wrapped
        self.device = device
        self.guard = guard
        self._factory = factory or self._own
        self.step_bytes = step_bytes
        self._tails: dict[str, DecodingTail] = {}
        self._together: Together | None = None
        self._lock = threading.Lock()
        self.closed = ""
        """Why none of its sessions continues; empty while they do."""

    def close(self, why: str) -> None:
        """All of its sessions are lost; what they hold goes with them."""
        self.closed = why
        with self._lock:
            self._tails.clear()

    def _own(self, wrapped: WrappedModel, cut: str) -> DecodingTail:
        return OwnTail(wrapped.model, cut, step_bytes=self.step_bytes, modules=wrapped.modules, turns=wrapped.turns)

    def open(self, cut: str) -> ModelSession:
        """Raises UnknownLayer, CutRefused, and ModelFailed with the model's error as cause."""
        try:
            with self._lock:
                if cut not in self._tails:
                    self._tails[cut] = self._factory(self.wrapped, cut)
                tail = self._tails[cut]
            return ModelSession(self, cut, tail.open())
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error

    def begin(self, session: EngineSession, header: bytes, payload: memoryview) -> BegunStep:
        """As `Company.begin`."""
        assert isinstance(session, ModelSession)
        return BegunStep(self, session, header, payload)

    def run(self, calls: Sequence[Callable[[], None]], ended: Ended) -> list[Outcome[None]]:
        """As `Company.run`. The model is looked after once, for all."""
        with self._lock:
            if self._together is None:
                self._together = Together(self.wrapped.model)
        try:
            if any(tail.unchanged.harmless for tail in self._tails.values() if isinstance(tail, OwnTail)):
                # what each builds for itself they would build for each other
                return [self._together.run([call], partial(_renumbered, ended, n))[0] for n, call in enumerate(calls)]
            with self.wrapped.turn():
                outcomes = self._together.run(calls, ended)
                self.synchronize()
            return outcomes
        finally:
            self.guard.mend()

    def synchronize(self) -> None:
        """On a GPU the kernels are only launched until here."""
        wait(self.device)


def _renumbered(ended: Ended, number: int, _: int) -> BaseException | None:
    return ended(number)


class ModelSession:
    """An `engine.EngineSession` of a model in this process."""

    def __init__(self, tails: DecodingTails, cut: str, session: DecodingSession) -> None:
        self._lost = ""
        self._tails = tails
        self.cut = cut
        self._session: DecodingSession | None = session
        self._mended = tails.guard.mended

    @property
    def lost(self) -> str:
        """Why it is no longer there; empty while it is."""
        return self._lost or self._tails.closed

    def step(self, header: bytes, payload: memoryview) -> Computed:
        """Raises ModelFailed with the model's error as cause, and SessionLost."""
        step = BegunStep(self._tails, self, header, payload)
        try:
            step.run()
            self._tails.synchronize()
        finally:
            self._tails.guard.mend()
            self.check_model()
        return step.end()

    def fork(self) -> ModelSession:
        """Raises SessionLost, and ModelFailed with the model's error as cause."""
        try:
            made = ModelSession(self._tails, self.cut, self.held().fork())
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        made._mended = self._mended
        return made

    def close(self) -> None:
        self._session = None

    def held(self) -> DecodingSession:
        """What steps it. Raises SessionLost."""
        self.check_model()
        if self._session is None:
            raise SessionLost(self.lost or "it was closed")
        return self._session

    def check_model(self) -> None:
        """What was computed with weights that had changed is not to be continued: raises SessionLost."""
        if self._tails.guard.mended != self._mended:
            self.lose("the model had changed in memory and was loaded again")
            raise SessionLost(self._lost)
        if self._tails.closed:
            raise SessionLost(self._tails.closed)

    def lose(self, why: str) -> None:
        """It is not used any more."""
        self._lost, self._session = why, None


class BegunStep:
    """One step: unpacked when it is made, then computed, by itself or beside others, then packed."""

    def __init__(self, tails: DecodingTails, session: ModelSession, header: bytes, payload: memoryview) -> None:
        self._tails = tails
        self._session = session
        self._tail = session.held()
        self._done: tuple[dict[str, Any], list[torch.Tensor], tuple[str, ...]] = {}, [], ()
        lifecycle, started = tails.wrapped.lifecycle, time.perf_counter_ns()
        lifecycle.emit(Stage.BEFORE_DECODE, nbytes=payload.nbytes)
        asked, tensors = Parcel.tensors(header, payload, tails.step_bytes)
        if not isinstance(asked, dict):
            raise BadFrame(f"the header of a step says {type(asked).__name__}, not what is asked")
        self._asked, self._tensors = asked, [to_device(tensor, tails.device) for tensor in tensors]
        lifecycle.emit(Stage.AFTER_DECODE, value=(self._asked, self._tensors))
        self._decoded = time.perf_counter_ns()
        self._decode_ns = self._decoded - started
        lifecycle.emit(Stage.BEFORE_TAIL, split=session.cut)

    def run(self) -> None:
        """Raises ModelFailed with the model's error as cause."""
        try:
            # Wherever it is interrupted, for its time is over, its session is not used any more.
            with interruptible(), transforms.during(self._tails.wrapped) as changed:
                said, outputs = self._tail.step(self._asked, self._tensors)
                self._done = said, outputs, tuple(changed())
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        except BaseException as error:  # it came from outside, at any line: nobody knows how far the step got
            self._session.lose(f"a step was ended by {type(error).__name__}")
            raise

    def end(self, outcome: Outcome[None] = ALONE) -> Computed:
        """Raises SessionLost where the model had changed meanwhile, else the error of `run`."""
        computed, lifecycle = time.perf_counter_ns(), self._tails.wrapped.lifecycle
        self._session.check_model()
        outcome.result()
        said, outputs, changed = self._done
        lifecycle.emit(Stage.AFTER_TAIL, split=self._session.cut, output=(said, outputs))
        lifecycle.emit(Stage.BEFORE_ENCODE, value=(said, outputs))
        parcel = Parcel.of_tensors(said, outputs)
        lifecycle.emit(Stage.AFTER_ENCODE, nbytes=parcel.nbytes)
        return Computed.of(
            parcel.header,
            owned(parcel),
            parcel.nbytes,
            decode_ns=self._decode_ns,
            compute_ns=computed - self._decoded,
            encode_ns=time.perf_counter_ns() - computed,
            transforms=changed,
            session_bytes=self._tail.nbytes,
            is_done=NEED not in said,
            company=outcome.company,
        )
