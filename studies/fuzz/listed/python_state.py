"""Python state behind the recording's back: written before a cut, read after it."""

from __future__ import annotations

import collections
import contextvars
import random
import threading
from typing import Any

from torch import Tensor, nn

G: Any = 1.0
TABLE: dict[str, Any] = {"v": 1.0}
VAR: contextvars.ContextVar[Any] = contextvars.ContextVar("VAR", default=1.0)


class Box:
    """A plain object."""

    def __init__(self) -> None:
        self.v: Any = 1.0
        self.queue: collections.deque[Any] = collections.deque([1.0], maxlen=3)
        self.user: collections.UserDict[str, Any] = collections.UserDict(v=1.0)
        self.deep: list[Any] = [[[[[[1.0]]]]]]


def _cell() -> tuple[Any, Any]:
    v: Any = 1.0

    def put(new: Any) -> None:
        nonlocal v
        v = new

    return put, lambda: v


_put, _get = _cell()


class Writer(nn.Module):
    """Writes with a function, hands its input through a layer."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.write = write

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        self.write(x, *more)
        return self.layer(x)


class State(nn.Module):
    """Writer, a layer, then what was written is read."""

    def __init__(self) -> None:
        super().__init__()
        self.box = Box()
        self.writer, self.mid, self.out = Writer(self.write), nn.Linear(8, 8), nn.Linear(8, 8)

    def write(self, x: Tensor) -> None: ...

    def read(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.writer(x))
        return self.out(x * self.read())


class PlainObject(State):
    """A number in a plain object."""

    def write(self, x: Tensor) -> None:
        self.box.v = round(float(x.mean()), 2)

    def read(self) -> Any:
        return self.box.v


class PlainObjectTensor(PlainObject):
    """A tensor in a plain object."""

    def write(self, x: Tensor) -> None:
        self.box.v = x[:1]


class Deque(State):
    """In a deque."""

    def write(self, x: Tensor) -> None:
        self.box.queue.append(x.shape[0] * 0.25)

    def read(self) -> Any:
        return self.box.queue[0]


class InUserDict(State):
    """In a UserDict."""

    def write(self, x: Tensor) -> None:
        self.box.user["v"] = self.box.user["v"] * 0.5 + 1

    def read(self) -> Any:
        return self.box.user["v"]


class DeepList(State):
    """Deep in a list."""

    def write(self, x: Tensor) -> None:
        self.box.deep[0][0][0][0][0][0] = x.mean(0)

    def read(self) -> Any:
        return self.box.deep[0][0][0][0][0][0]


class Global(State):
    """In a global name."""

    def write(self, x: Tensor) -> None:
        global G
        G = 2.0

    def read(self) -> Any:
        return G


class GlobalDict(State):
    """In a global dictionary."""

    def write(self, x: Tensor) -> None:
        TABLE["v"] = x.shape[0] * 0.75

    def read(self) -> Any:
        return TABLE["v"]


class Closure(State):
    """In a closure's cell."""

    def write(self, x: Tensor) -> None:
        _put(x[:1] * 0.5)

    def read(self) -> Any:
        return _get()


class ContextVariable(State):
    """In a context variable."""

    def write(self, x: Tensor) -> None:
        VAR.set(2.0)

    def read(self) -> Any:
        return VAR.get()


class PythonsRandom(State):
    """Seeded before the cut, drawn after it."""

    def write(self, x: Tensor) -> None:
        random.seed(x.shape[0])

    def read(self) -> Any:
        return random.random()


class PythonsRandomDrawnBefore(State):
    """Drawn before the cut, used after it; the two processes' generators stand elsewhere."""

    def write(self, x: Tensor) -> None:
        self.box.v = random.random()

    def read(self) -> Any:
        return self.box.v


class EqualValue(State):
    """Set to what planning has left there, which is no change to see: the other side's is older."""

    def write(self, x: Tensor) -> None:
        self.box.v = 2.0

    def read(self) -> Any:
        return self.box.v


class EqualFlag(State):
    """The same with an attribute of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def write(self, x: Tensor) -> None:
        self.ready = True

    def read(self) -> Any:
        return 2.0 if self.ready else 1.0


class EqualOfAnotherType(EqualFlag):
    """1 is True, and is not."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: Any = True

    def write(self, x: Tensor) -> None:
        self.ready = 1

    def read(self) -> Any:
        return 2.0 if self.ready is True else 1.0


class DeepListNumber(DeepList):
    """A number deep in a list."""

    def write(self, x: Tensor) -> None:
        self.box.deep[0][0][0][0][0][0] = x.shape[0] * 0.75


class ClosureNumber(Closure):
    """A number in a closure's cell."""

    def write(self, x: Tensor) -> None:
        _put(x.shape[0] * 0.75)


class MemoOfAThread(nn.Module):
    """What it keeps for good was made from what a thread gave, which no look at its kernels sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.memo: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        box: list[Tensor] = []
        worker = threading.Thread(target=lambda: box.append(x * 0.5))
        worker.start()
        worker.join()
        y: Tensor = self.linear(box[0])
        if self.memo is None:
            self.memo = y[:1].clone()
        return y + self.memo
