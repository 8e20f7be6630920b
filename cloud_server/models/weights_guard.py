"""After every request the served model is as before: looked at, and put right before anybody is served by another.

A recipe lets no request write to the model's memory before the cut, and a rehearsal refuses models that do so after it.
This is the look behind their backs: version counters and addresses of parameters and buffers, some microseconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch
from torch import nn

from cloud_server.models.engine import Identity
from shared_hooks.errors import ServerUnavailable
from shared_hooks.modules import weights_hash
from shared_hooks.state import PythonState
from shared_hooks.tensors import held

log = logging.getLogger("cloud_server")


class WeightsGuard:
    """Watches one model; safe with several workers. ``load`` builds it again, after which ``mended`` is called."""

    def __init__(
        self,
        identity: Identity,
        model: nn.Module,
        load: Callable[[], nn.Module],
        mended: Callable[[], None] = lambda: None,
    ) -> None:
        self._model_id = identity.model_id
        self._model = model
        self._load = load
        self._on_mended = mended
        self._hash = identity.weights_hash
        self._lock = threading.Lock()
        self.mended = 0
        """How often the model was put right: what was computed before is not to be continued."""
        weights = [*model.parameters(), *model.buffers()]
        self._tensors = list(map(held, weights))
        # what else the model keeps is not in a file of weights
        known = set(map(id, weights))
        others = {id(one): one for one in PythonState(model).tensors() if id(one) not in known}
        self._copies = [(one, one.clone()) for one in others.values() if one.layout == torch.strided]
        self._tensors += [one for one, _ in self._copies]
        self._kinds = list(map(type, self._tensors))
        self._seen = self._now()

    def _now(self) -> list[tuple[int, int, type]]:
        return [
            (-1 if tensor.is_inference() else tensor._version, tensor.data_ptr(), type(tensor))
            for tensor in self._tensors
        ]

    def check(self) -> None:
        """To be called after every request. Raises `ServerUnavailable` when the model had changed: what was computed
        meanwhile is not to be believed, and the same request may be asked again.
        """
        if self.mend():
            raise ServerUnavailable(f'model "{self._model_id}" had changed in memory and was loaded again; ask again')

    def mend(self) -> bool:
        """Put the model right if it has changed; whether it had."""
        if self._now() == self._seen:
            return False
        with self._lock:
            if self._now() == self._seen:
                return False
            log.critical(
                "model %s changed while it served: out of service, its weights are loaded again", self._model_id
            )
            self._restore()
            self.mended += 1
            self._on_mended()
        return True

    def _restore(self) -> None:
        fresh = self._load()
        with torch.no_grad():
            for mine, kind in zip(self._tensors, self._kinds, strict=True):
                mine.__class__ = kind
            own = self._tensors[: len(self._tensors) - len(self._copies)]
            for mine, theirs in zip(own, [*fresh.parameters(), *fresh.buffers()], strict=True):
                mine.data = theirs.data
            for mine, copy in self._copies:
                mine.data = copy.clone()
        self._seen = self._now()
        if weights_hash(self._model) != self._hash:
            log.critical("model %s: the loaded weights are not those it was announced with", self._model_id)
            self._seen = []  # never again equal: nothing is served any more
