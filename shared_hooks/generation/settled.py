"""Whether a model's own code keeps something between calls beside its state objects: in attributes of modules, in
globals, in what they reach.

Sessions share the model, and the other side has not seen what this one wrote, so such a model is refused by name. What
is written once (a table built on first use) is no such thing: only what changes again counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import nn

from shared_hooks.errors import CutRefused
from shared_hooks.purity import Turns
from shared_hooks.state import PythonState, lost

HOOKS = "hooks of a module"


class Settled:
    """What one model's states look like after a step; shared by all sessions. Any thread may call."""

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
            raise _refusal(again[0])


class Unchanged:
    """Guards the server's model, which sessions of several callers share: no step leaves anything on it.

    What a step changes is put back after it. That is the same as if it had stayed only where the step, made once more
    from what it left, gives the same and changes nothing: as with a table that is built on first use, and now in each
    step. Any other change is refused by name.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.harmless: frozenset[str] = frozenset()
        """Names of what steps may change, since it is put back."""

    def check(self, before: PythonState, again: Callable[[], bool] | None) -> None:
        """After a forward that began with the state ``before``. ``again`` makes it once more from what it left, and
        says whether it gave the same; None where others run between its lines. Raises CutRefused.
        """
        if before.looks_same:
            return
        new = set(lost(before, frozenset())) - self.harmless
        if new:
            left = PythonState(self.turns.model, settings=False)
            if again is None or not again() or not left.looks_same:
                raise _refusal(min(new))
            self.harmless |= new


def _refusal(name: str) -> CutRefused:
    return CutRefused(
        f"the model's code keeps {name} from one call to the next, and not in a state object that is "
        "passed to it: sessions would share it, and the other side would not see it"
    )
