"""Implement `EdgeClient.intervene`, which changes activations in the layers that run here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from edge_client.request import Cut
from edge_client.user_text import AUTO, CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from shared_hooks import WrappedModel
from shared_hooks.config import raised
from shared_hooks.errors import CutRefused, ModelFailed
from shared_hooks.modules import call_parts
from shared_hooks.observers import Transform


class Intervention(Transform):
    """Replaces modules' outputs with functions' results. An exception fails its request."""

    def __init__(self, wrapped: WrappedModel, changes: Mapping[str, Callable[[Any], Any]]) -> None:
        """``changes``: the name of a block or layer -> a function of the output of each of its calls."""
        super().__init__(self._change, list(changes), max_records=1)
        self._wrapped, self._changes = wrapped, dict(changes)
        self._of_thread = threading.local()

    def _change(self, module: nn.Module, inputs: tuple[Any, ...], output: Any, name: str) -> Any:
        return self._changes[name](output)

    def failed(self, error: Exception, where: str) -> None:
        """Store the error for the request, whose head runs in this thread."""
        self.failures += 1
        self._of_thread.error = f"intervene, {where}: {raised(error)}"

    def check(self, cut: Cut) -> None:
        """Raise the errors of a request whose head has run in this thread: ModelFailed if a function raised, or
        returned another shape or dtype, and CutRefused if a module runs behind the cut.
        """
        error = getattr(self._of_thread, "error", None)
        if error is not None:
            self._of_thread.error = None
            raise ModelFailed(error)
        if cut == EDGE_ONLY:
            return
        if cut == AUTO:
            raise CutRefused('intervene needs a cut that is given: with split="auto" a module may run on either side')
        if isinstance(cut, tuple):
            raise CutRefused(
                "intervene needs a single cut: along branches modules before its end may run on the server"
            )
        info = None if cut in (CLOUD_ONLY, CLOUD_FILE) else self._wrapped.resolve(cut)
        places = [one.name for one in self._wrapped.cuts]
        end = -1 if info is None else places.index(info.name)
        for name in self._changes:
            for number, place in enumerate(places):
                path = call_parts(place)[0]
                if number > end and (path == name or path.startswith(f"{name}.")):
                    raise CutRefused(
                        f"intervene: {name} runs on the server with split={cut!r}: cut behind it "
                        "(or ask for a Transform that the server's file allows by name, docs/observers.md)"
                    )
