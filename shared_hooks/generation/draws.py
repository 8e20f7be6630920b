"""Whether a step draws random numbers on the cloud's side: they would not be those that the edge's generator gives."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.state import Dice


class Draws(TorchDispatchMode):
    """Looks at the generator before and after each kernel that may use it: what other threads draw does not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(before, torch.get_rng_state()):
            self.found = func._schema.name.removeprefix("aten::")
        return result


class Look:
    """At one forward. A first one is quick; where it says that generators were used, a second one says by whom."""

    def __init__(self) -> None:
        self._dice = Dice()
        self._others: list[str] = []
        self.draws: Draws | None = None

    def again(self) -> bool:
        """After a forward: whether there is to be a second one, closely looked at."""
        if self.draws is not None:
            self._others = self._dice.others
            return False
        if not self._dice.rolled:
            return False
        self.draws, self._dice = Draws(), Dice()
        return True

    @property
    def found(self) -> str:
        """What draws: a kernel, or a library; empty for nothing."""
        if self.draws is None:
            return ""
        if self.draws.found:
            return f"{self.draws.found}()"
        return f"the generator of {', '.join(self._others)}" if self._others else ""
