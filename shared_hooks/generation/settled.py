"""Whether a model's own code keeps something between calls beside its state objects: in attributes of modules, in
globals, in what they reach.

Sessions share the model, and the other side has not seen what this one wrote, so such a model is refused by name. What
is written once (a table built on first use) is no such thing: only what changes again counts.
"""

from __future__ import annotations

import threading

from torch import nn

from shared_hooks.errors import CutRefused
from shared_hooks.state import PythonState

HOOKS = "hooks of a module"


class Settled:
    """Of one model; shared by all sessions. Any thread may call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state: PythonState | None = None
        self._changed: set[str] = set()
        self._lock = threading.Lock()

    def check(self) -> None:
        """After a step. Raises CutRefused where the model has changed what it had changed before."""
        with self._lock:
            if self._state is not None and self._state.is_same:
                return
            names = set() if self._state is None else {change.name for change in self._state.changes()} - {HOOKS}
            again = sorted(names & self._changed)
            self._changed |= names
            self._state = PythonState(self._model, settings=False)
        if again:
            raise CutRefused(
                f"the model's code keeps {again[0]} from one call to the next, and not in a state object that is "
                "passed to it: sessions would share it, and the other side would not see it"
            )
