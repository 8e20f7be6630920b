"""Python state behind the recording's back: written before a cut, read after it."""

from __future__ import annotations

import collections
import contextvars
import random
from typing import Any

import torch
from torch import Tensor, nn

G: Any = 1.0
TABLE: dict[str, Any] = {"v": 1.0}
STACK: list[float] = []
VAR: contextvars.ContextVar[Any] = contextvars.ContextVar("VAR", default=1.0)


class _Box:
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


class _Writer(nn.Module):
    """Writes with a function, hands its input through a layer."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.write = write

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        self.write(x, *more)
        return self.layer(x)


class _State(nn.Module):
    """Writer, a layer, then what was written is read."""

    def __init__(self) -> None:
        super().__init__()
        self.box = _Box()
        self.writer, self.mid, self.out = _Writer(self.write), nn.Linear(8, 8), nn.Linear(8, 8)

    def write(self, x: Tensor) -> None: ...

    def read(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.writer(x))
        return self.out(x * self.read())


class PlainObject(_State):
    """A number in a plain object."""

    def write(self, x: Tensor) -> None:
        self.box.v = round(float(x.mean()), 2)

    def read(self) -> Any:
        return self.box.v


class PlainObjectTensor(PlainObject):
    """A tensor in a plain object."""

    def write(self, x: Tensor) -> None:
        self.box.v = x[:1]


class Deque(_State):
    """In a deque."""

    def write(self, x: Tensor) -> None:
        self.box.queue.append(x.shape[0] * 0.25)

    def read(self) -> Any:
        return self.box.queue[0]


class InUserDict(_State):
    """In a UserDict."""

    def write(self, x: Tensor) -> None:
        self.box.user["v"] = self.box.user["v"] * 0.5 + 1

    def read(self) -> Any:
        return self.box.user["v"]


class DeepList(_State):
    """Deep in a list."""

    def write(self, x: Tensor) -> None:
        self.box.deep[0][0][0][0][0][0] = x.mean(0)

    def read(self) -> Any:
        return self.box.deep[0][0][0][0][0][0]


class Global(_State):
    """In a global name."""

    def write(self, x: Tensor) -> None:
        global G
        G = 2.0

    def read(self) -> Any:
        return G


class GlobalDict(_State):
    """In a global dictionary."""

    def write(self, x: Tensor) -> None:
        TABLE["v"] = x.shape[0] * 0.75

    def read(self) -> Any:
        return TABLE["v"]


class Closure(_State):
    """In a closure's cell."""

    def write(self, x: Tensor) -> None:
        _put(x[:1] * 0.5)

    def read(self) -> Any:
        return _get()


class ContextVariable(_State):
    """In a context variable."""

    def write(self, x: Tensor) -> None:
        VAR.set(2.0)

    def read(self) -> Any:
        return VAR.get()


class PythonsRandom(_State):
    """Seeded before the cut, drawn after it."""

    def write(self, x: Tensor) -> None:
        random.seed(x.shape[0])

    def read(self) -> Any:
        return random.random()


class PythonsRandomDrawnBefore(_State):
    """Drawn before the cut, used after it; the two processes' generators stand elsewhere."""

    def write(self, x: Tensor) -> None:
        self.box.v = random.random()

    def read(self) -> Any:
        return self.box.v


class EqualValue(_State):
    """Set to what planning has left there, which is no change to see: the other side's is older."""

    def write(self, x: Tensor) -> None:
        self.box.v = 2.0

    def read(self) -> Any:
        return self.box.v


class EqualFlag(_State):
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


class _Context:
    """Made anew in each forward."""

    def __init__(self) -> None:
        self.scale: Any = 1.0
        self.items: list[Any] = []
        self.deep: list[Any] = [[[[[[]]]]]]


class ContextObject(nn.Module):
    """An object handed through the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.mid, self.out = _Writer(self.write), nn.Linear(8, 8), nn.Linear(8, 8)

    def write(self, x: Tensor, context: _Context) -> None:
        context.scale = 2.0
        context.items.append(x * 0.5)
        context.deep[0][0][0][0][0].append(x.mean(0))

    def forward(self, x: Tensor) -> Tensor:
        context = _Context()
        x = self.mid(self.writer(x, context))
        x = x * context.scale + context.items[0]
        return self.out(x) + context.deep[0][0][0][0][0][0]


class ContextObjectNumber(ContextObject):
    """Numbers only, so that no tensor tells that the object was written."""

    def write(self, x: Tensor, context: _Context) -> None:
        context.scale = 2.0
        context.items.append(0.25)
        context.deep[0][0][0][0][0].append(round(float(x.mean()), 2))


class CacheReturned(ContextObject):
    """As MiniMax's: the object is part of the answer, and a list in it misses what was not sent."""

    def forward(self, x: Tensor) -> Any:
        context = _Context()
        x = self.out(self.mid(self.writer(x, context)))
        return {"x": x, "items": list(context.items), "deep": context.deep}


class Tag(nn.Module):
    """An attribute set on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.mid, self.out = _Writer(self.write), nn.Linear(8, 8), nn.Linear(8, 8)

    def write(self, x: Tensor) -> None:
        x.scale = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.tanh(x)
        x = self.mid(self.writer(kept))
        return self.out(x) * getattr(kept, "scale", 1.0)


class SetAndPutBack(_State):
    """A flag on a plain object is up for a while: two runs look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.lowerer = _Writer(self.lower)

    def write(self, x: Tensor) -> None:
        self.box.v = 2.0

    def lower(self, x: Tensor) -> None:
        self.box.v = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.writer(x)) * self.box.v
        return self.out(self.lowerer(x)) * self.box.v


class SetAndPutBackOnAModule(SetAndPutBack):
    """An attribute of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.v = 1.0

    def write(self, x: Tensor) -> None:
        self.v = 2.0

    def lower(self, x: Tensor) -> None:
        self.v = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.writer(x)) * self.v
        return self.out(self.lowerer(x)) * self.v


class ScopesOfModules(SetAndPutBack):
    """A stack of scopes in a global list, entered and left by modules."""

    def write(self, x: Tensor) -> None:
        STACK.append(2.0)

    def lower(self, x: Tensor) -> None:
        STACK.pop()

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.writer(x)) * (1 + len(STACK))
        return self.out(self.lowerer(x)) * (1 + len(STACK))


class ChildsModeByModules(SetAndPutBack):
    """A child's mode, changed by one module and put back by another."""

    def write(self, x: Tensor) -> None:
        self.out.train()

    def lower(self, x: Tensor) -> None:
        self.out.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.writer(x)) * (2 if self.out.training else 1)
        return self.out(self.lowerer(x))


class DeepListNumber(DeepList):
    """A number deep in a list."""

    def write(self, x: Tensor) -> None:
        self.box.deep[0][0][0][0][0][0] = x.shape[0] * 0.75


class ClosureNumber(Closure):
    """A number in a closure's cell."""

    def write(self, x: Tensor) -> None:
        _put(x.shape[0] * 0.75)


class ScopeStack(_State):
    """A stack of scopes in a global list."""

    def forward(self, x: Tensor) -> Tensor:
        STACK.append(2.0)
        x = self.mid(self.writer(x))
        x = x * sum(STACK)
        STACK.pop()
        return self.out(x)


class ChildsMode(_State):
    """A child's mode, set and put back, read between."""

    def forward(self, x: Tensor) -> Tensor:
        self.out.train()
        x = self.mid(self.writer(x))
        x = x * 2 if self.out.training else x
        self.out.eval()
        return self.out(x)


class ForwardSwapped(_State):
    """A child's forward is another one for a while."""

    def forward(self, x: Tensor) -> Tensor:
        kept, self.mid.forward = self.mid.forward, lambda x: x * 2  # type: ignore[method-assign]
        x = self.mid(self.writer(x))
        self.mid.forward = kept  # type: ignore[method-assign]
        return self.out(self.mid(x))
