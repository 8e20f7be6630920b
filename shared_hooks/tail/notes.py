"""What a rehearsal has noted so far: where it is, the steps, the first failure."""

from __future__ import annotations

from shared_hooks.crossing import Crossing, PathDigest
from shared_hooks.errors import CutRefused, IsthmusError, PlaceholderRead
from shared_hooks.modules import call_name
from shared_hooks.tail.recipe import Step


class Frame:
    """A module call that is running. ``start``: number of steps before it; ``wrote``: it writes to what it is given."""

    def __init__(self, path: str, number: int, start: int) -> None:
        self.path = path
        self.number = number
        self.start = start
        self.index = 0
        self.has_child = False
        self.wrote = False


class Notes:
    """What one rehearsal notes. ``stack``: the module calls that are running; ``done``: the cut is reached;
    ``in_opaque``: how many scripted or compiled modules are running.
    """

    def __init__(self, crossing: Crossing) -> None:
        self.crossing = crossing
        self.steps: list[Step] = []
        self.stack = [Frame("", 1, 0)]
        self.digest = PathDigest()
        self.in_opaque = 0
        # before the cut "input" there is nothing: the model is run to see how much work comes after it
        self.done = crossing.layer_id < 0
        self.failure: IsthmusError | None = None

    @property
    def frame(self) -> Frame:
        """The module call that runs now."""
        return self.stack[-1]

    def refusal(self, what: str) -> CutRefused:
        """An error that says where; kept, in case the model catches it."""
        frame = self.frame
        where = f" (in {call_name(frame.path, frame.number)})" if frame.path else ""
        error = CutRefused(
            f"cannot resume after layer {self.crossing.layer_id} ({self.crossing.layer_name}): {what}{where}"
        )
        self.failed(error)
        return error

    def failed(self, error: BaseException) -> None:
        """Keep the first failure: a model that catches exceptions must not turn it into an answer."""
        if self.done and isinstance(error, PlaceholderRead):
            return  # after the cut there is no data to read
        if self.failure is None and isinstance(error, IsthmusError):
            self.failure = error
