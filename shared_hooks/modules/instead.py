"""Functions in place of methods of one module, for as long as they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Instead:
    """A function on a module, in place of a method. Who looks at what a model keeps between calls does not look into
    it: what is behind it is ours.
    """

    def __init__(self, function: Callable[..., Any], before: Any) -> None:
        self._function = function
        self.before = before
        """What was there, None for nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def put_instead(module: nn.Module, functions: dict[str, Callable[..., Any]]) -> Callable[[], None]:
    """Put functions there by the methods' names. Gives what takes them away again, and leaves alone what others have
    put over them since.
    """
    own = vars(module)
    before = {name: own[name] for name in functions if name in own}
    ours = {name: Instead(function, own.get(name)) for name, function in functions.items()}
    own.update(ours)

    def take_off() -> None:
        for name, one in ours.items():
            if own.get(name) is one:
                del own[name]
                own.update({name: before[name]} if name in before else {})

    return take_off
