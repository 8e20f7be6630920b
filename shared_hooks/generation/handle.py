"""What a session leaves on a state object: who it belongs to, and what is done to it between steps.

A copy of the state (``copy.deepcopy``: beams, prompts that many answers share) has a handle that says of which session
at which step it is a copy: the next step of either makes it a session of its own.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch

from shared_hooks.errors import CutRefused
from shared_hooks.generation.changes import Changes
from shared_hooks.generation.forms import OWN, plain
from shared_hooks.generation.mirror import Mirror
from shared_hooks.generation.mutators import MUTATORS, written


class Handle:
    """On one state. ``session``: of the edge; a handle without a mirror is that of a copy not used yet."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.mirror: Mirror | None = None
        self.done: list[Any] = []
        """What was done to the state since the last step, for the wire."""
        self.busy = False
        """Whether a step runs: what the model itself does to the state is no call from outside."""
        self.hidden = frozenset({OWN, *MUTATORS})
        self.spoilt = False
        """Whether a step that failed has left its traces in the state's tensors."""
        self.fork: Any = None
        """For a copy: what its session continues from."""

    def put_on(self, state: Any, here: torch.device) -> None:
        """Leave the handle there. Raises CutRefused for a state that is partly elsewhere and belongs to no session."""
        own = vars(state)
        own[OWN] = self
        for name in MUTATORS:
            if hasattr(type(state), name):
                own[name] = Called(self, state, name)
        self.mirror = Mirror(state, here)
        self.mirror.loosen()

    def opening(self) -> Any:
        """For the wire: the form of the state, where a step is the first of a session; else None."""
        if self.mirror is None or self.session.number or self.fork is not None:
            return None
        return plain(self.mirror.root)

    def take_off(self) -> None:
        """The state is as it was without."""
        if self.mirror is not None:
            own = vars(self.mirror.state)
            for name in self.hidden:
                if name == OWN or isinstance(own.get(name), Called):
                    own.pop(name, None)

    def note(self) -> None:
        """What the caller changed by hand goes into `done`. Raises CutRefused for what the other side cannot follow."""
        assert self.mirror is not None
        changes = self.mirror.look()
        if self.mirror.moved:
            name = ".".join(map(str, self.mirror.moved[0]))
            raise CutRefused(
                f"{name} of the state was changed between two steps, and its tensor is on the other side: use "
                f"methods of the state ({', '.join(MUTATORS)})"
            )
        if changes:
            self.done.append(["=", Changes().said(changes)])

    def repeat(self, done: list[Any]) -> None:
        """Do to the state what was done to another one."""
        for name, arguments in done:
            assert self.mirror is not None
            if name == "=":
                self.mirror.put(Changes().heard(self.mirror.form, arguments))
                self.done.append([name, arguments])
            else:
                method = getattr(self.mirror.state, name)
                method(*[torch.tensor(one) if isinstance(one, list) else one for one in arguments])

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        made = Handle(self.session)
        made.done, made.spoilt = list(self.done), self.spoilt
        unused = self.mirror is None  # a copy of a copy that was not used yet
        made.fork = (self.fork if unused else self.session).copied()
        return made


class Called:
    """A method of a state: called here, and noted for the other side."""

    def __init__(self, handle: Handle, state: Any, name: str) -> None:
        self._handle = handle
        self._kept = weakref.ref(state)
        self.__name__ = name

    @property
    def _state(self) -> Any:
        return self._kept()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle, method = self._handle, getattr(type(self._state), self.__name__)
        if handle.busy or handle.mirror is None:
            result = method(self._state, *args, **kwargs)
            if not handle.busy:
                handle.done.append([self.__name__, written((*args, *kwargs.values()))])
            return result
        handle.note()
        result = method(self._state, *args, **kwargs)
        handle.done.append([self.__name__, written((*args, *kwargs.values()))])
        handle.mirror.renew()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Called:
        twin = memo.get(id(self._state))
        return Called(copy.deepcopy(self._handle, memo), self._state if twin is None else twin, self.__name__)


def handle_of(state: Any) -> Handle | None:
    """The handle on a state."""
    found = vars(state).get(OWN)
    return found if isinstance(found, Handle) else None
