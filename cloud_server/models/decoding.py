"""Decoding sessions of a model in this process: a step's bytes in, its answer's bytes out.

What a step computes is the engine's own (`shared_hooks.generation`); here it is unpacked, watched and packed as any
tail's.
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
from shared_hooks.generation.middle import MiddleSession
from shared_hooks.generation.remote_tensor import STEP_BYTES
from shared_hooks.generation.session import Said
from shared_hooks.generation.together import Ended, Outcome, Together
from shared_hooks.lifecycle import Stage
from shared_hooks.observers import transforms
from shared_hooks.tensors.staging import to_device, wait

NEED = "need"
ALONE: Outcome[None] = Outcome(None, None, batch_size=1, meetings=0)


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
        bringing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``factory``: what makes a cut's tail, in place of our own engine, whose steps may take ``step_bytes`` of
        memory. ``bringing``: around a step.
        """
        self.wrapped = wrapped
        self.device = device
        self.guard = guard
        self._factory = factory or self._own
        self.step_bytes = step_bytes
        self.bringing = bringing
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

    def open(self, cut: str, following: Following | None = None) -> ModelSession:
        """``following``: the part behind it. Raises UnknownLayer, CutRefused, and ModelFailed (the model's error)."""
        try:
            with self._lock:
                if cut not in self._tails:
                    self._tails[cut] = self._factory(self.wrapped, cut)
                tail = self._tails[cut]
            if following is None:
                return ModelSession(self, cut, tail.open())
            if not isinstance(tail, OwnTail):
                raise CutRefused(f"what steps this model after {cut} runs to its end: no other server can follow")
            return ModelSession(self, cut, MiddleSession(tail, *following))
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error

    def begin(self, session: EngineSession, header: bytes, payload: memoryview) -> BegunStep:
        """As `StepBatching.begin`."""
        assert isinstance(session, ModelSession)
        return BegunStep(self, session, header, payload)

    def run(self, calls: Sequence[Callable[[], None]], ended: Ended) -> list[Outcome[None]]:
        """As `StepBatching.run`. The model is looked after once, for all."""
        with self._lock:
            if self._together is None:
                self._together = Together(self.wrapped.model)
        try:
            if len(calls) == 1 or any(tail.leaves for tail in self._tails.values() if isinstance(tail, OwnTail)):
                # what each builds for itself they would build for each other
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
        session, self._session = self._session, None
        if isinstance(session, MiddleSession):
            session.close()

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
        self._lost = why
        self.close()


class BegunStep:
    """One step: unpacked when it is made, then computed, by itself or beside others, then packed."""

    def __init__(self, tails: DecodingTails, session: ModelSession, header: bytes, payload: memoryview) -> None:
        self._tails = tails
        self._session = session
        self._tail = session.held()
        self._done: Said = {}, []
        self._changed: tuple[str, ...] = ()
        self._rest: Callable[[], Said] | None = None
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
            with interruptible(), transforms.during(self._tails.wrapped) as changed, self._tails.bringing():
                if isinstance(self._tail, MiddleSession):
                    begun = self._tail.begin(self._asked, self._tensors)
                    self._rest, self._done = (begun, self._done) if callable(begun) else (None, begun)
                else:
                    self._done = self._tail.step(self._asked, self._tensors)
                self._changed = tuple(changed())
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
        """The rest of a step in the middle of a chain: what the next server gives."""
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

    def _packed(self, done: Said, **more: Any) -> Computed:
        said, outputs = done
        lifecycle, began = self._tails.wrapped.lifecycle, time.perf_counter_ns()
        lifecycle.emit(Stage.BEFORE_ENCODE, value=done)
        parcel = Parcel.of_tensors(said, outputs)
        lifecycle.emit(Stage.AFTER_ENCODE, nbytes=parcel.nbytes)
        return Computed.of(
            parcel.header,
            owned(parcel),
            parcel.nbytes,
            encode_ns=time.perf_counter_ns() - began,
            session_bytes=self._tail.nbytes,
            is_done=NEED not in said,
            **more,
        )
