"""Decoding sessions of a model in this process: a step's bytes in, its answer's bytes out.

What a step computes is the engine's own (`shared_hooks.generation`); here it is unpacked, watched and packed as any
tail's.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import torch

from cloud_server.config import DecodingFactory
from cloud_server.models.custody import Custody
from cloud_server.models.engine import Computed, owned
from shared_hooks import Parcel, WrappedModel
from shared_hooks.errors import BadFrame, IsthmusError, ModelFailed, SessionLost
from shared_hooks.forward import interruptible
from shared_hooks.generation import DecodingTail as OwnTail
from shared_hooks.generation.allowance import STEP_BYTES
from shared_hooks.lifecycle import Stage
from shared_hooks.observers import transforms

NEED = "need"


class TailSession(Protocol):
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

    def fork(self) -> TailSession:
        """A copy: both may go on from here."""
        ...


class DecodingTail(Protocol):
    """One model behind one cut."""

    def open(self) -> TailSession: ...


class DecodingTails:
    """Of one model, by cut; each is made for its first session. Any thread may call."""

    def __init__(
        self,
        wrapped: WrappedModel,
        device: torch.device,
        custody: Custody,
        factory: DecodingFactory | None = None,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        """``factory``: what makes a cut's tail, in place of our own engine, whose steps may take ``step_bytes`` of
        memory.
        """
        self.wrapped = wrapped
        self.device = device
        self.custody = custody
        self._factory = factory or self._own
        self._step_bytes = step_bytes
        self._tails: dict[str, DecodingTail] = {}
        self._lock = threading.Lock()

    def _own(self, wrapped: WrappedModel, cut: str) -> DecodingTail:
        return OwnTail(wrapped.model, cut, step_bytes=self._step_bytes, modules=wrapped.modules)

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


class ModelSession:
    """An `engine.EngineSession` of a model in this process."""

    def __init__(self, tails: DecodingTails, cut: str, session: TailSession) -> None:
        self.lost = ""
        self._tails = tails
        self._cut = cut
        self._session: TailSession | None = session
        self._mended = tails.custody.mended

    def step(self, header: bytes, payload: memoryview) -> Computed:
        """Raises ModelFailed with the model's error as cause, and SessionLost."""
        session, lifecycle = self._held(), self._tails.wrapped.lifecycle
        lifecycle.emit(Stage.BEFORE_DECODE, nbytes=payload.nbytes)
        started = time.perf_counter_ns()
        asked, tensors = Parcel.tensors(header, payload)
        if not isinstance(asked, dict):
            raise BadFrame(f"the header of a step says {type(asked).__name__}, not what is asked")
        tensors = [tensor.to(self._tails.device) for tensor in tensors]
        lifecycle.emit(Stage.AFTER_DECODE, value=(asked, tensors))
        decoded = time.perf_counter_ns()
        lifecycle.emit(Stage.BEFORE_TAIL, split=self._cut)
        said, outputs, changed = self._run(session, asked, tensors)
        computed = time.perf_counter_ns()
        lifecycle.emit(Stage.AFTER_TAIL, split=self._cut, output=(said, outputs))
        lifecycle.emit(Stage.BEFORE_ENCODE, value=(said, outputs))
        parcel = Parcel.of_tensors(said, outputs)
        lifecycle.emit(Stage.AFTER_ENCODE, nbytes=parcel.nbytes)
        return Computed.of(
            parcel.header,
            owned(parcel),
            parcel.nbytes,
            decode_ns=decoded - started,
            compute_ns=computed - decoded,
            encode_ns=time.perf_counter_ns() - computed,
            transforms=changed,
            session_bytes=session.nbytes,
            is_done=NEED not in said,
        )

    def _run(
        self, session: TailSession, asked: dict[str, Any], tensors: list[torch.Tensor]
    ) -> tuple[dict[str, Any], list[torch.Tensor], tuple[str, ...]]:
        try:
            # Wherever it is interrupted, for its time is over, its session is not used any more.
            with interruptible(), transforms.during(self._tails.wrapped) as changed:
                said, outputs = session.step(asked, tensors)
                names = tuple(changed())
            if self._tails.device.type == "cuda":
                torch.cuda.synchronize(self._tails.device)  # the kernels are only launched until here
            return said, outputs, names
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        except BaseException as error:  # it came from outside, at any line: nobody knows how far the step got
            self._lose(f"a step was ended by {type(error).__name__}")
            raise
        finally:
            self._tails.custody.mend()
            self._check_model()

    def fork(self) -> ModelSession:
        """Raises SessionLost, and ModelFailed with the model's error as cause."""
        try:
            made = ModelSession(self._tails, self._cut, self._held().fork())
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        made._mended = self._mended
        return made

    def close(self) -> None:
        self._session = None

    def _held(self) -> TailSession:
        self._check_model()
        if self._session is None:
            raise SessionLost(self.lost or "it was closed")
        return self._session

    def _check_model(self) -> None:
        """What was computed with weights that had changed is not to be continued."""
        if self._tails.custody.mended != self._mended:
            self._lose("the model had changed in memory and was loaded again")
            raise SessionLost(self.lost)

    def _lose(self, why: str) -> None:
        self.lost, self._session = why, None
