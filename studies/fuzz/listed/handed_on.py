"""Objects handed through the layers, tags on tensors, and what is set for a while and put back.

The classes of `python_state` that are used here have no globals, so the parties may share them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from studies.fuzz.listed.python_state import State, Writer

STACK: list[float] = []


class _Context:
    """Made again in each forward."""

    def __init__(self) -> None:
        self.scale: Any = 1.0
        self.items: list[Any] = []
        self.deep: list[Any] = [[[[[[]]]]]]


class ContextObject(nn.Module):
    """An object handed through the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.mid, self.out = Writer(self.write), nn.Linear(8, 8), nn.Linear(8, 8)

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
        self.writer, self.mid, self.out = Writer(self.write), nn.Linear(8, 8), nn.Linear(8, 8)

    def write(self, x: Tensor) -> None:
        x.scale = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.tanh(x)
        x = self.mid(self.writer(kept))
        return self.out(x) * getattr(kept, "scale", 1.0)


class SetAndPutBack(State):
    """A flag on a plain object is up for a while: two runs look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.lowerer = Writer(self.lower)

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


class ScopeStack(State):
    """A stack of scopes in a global list."""

    def forward(self, x: Tensor) -> Tensor:
        STACK.append(2.0)
        x = self.mid(self.writer(x))
        x = x * sum(STACK)
        STACK.pop()
        return self.out(x)


class ChildsMode(State):
    """A child's mode, set and put back, read between."""

    def forward(self, x: Tensor) -> Tensor:
        self.out.train()
        x = self.mid(self.writer(x))
        x = x * 2 if self.out.training else x
        self.out.eval()
        return self.out(x)


class ForwardSwapped(State):
    """A child's forward is another one for a while."""

    def forward(self, x: Tensor) -> Tensor:
        kept, self.mid.forward = self.mid.forward, lambda x: x * 2  # type: ignore[method-assign]
        x = self.mid(self.writer(x))
        self.mid.forward = kept  # type: ignore[method-assign]
        return self.out(self.mid(x))
