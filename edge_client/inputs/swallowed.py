"""Keywords that a model takes by its ``**kwargs`` alone, and that were perhaps meant for another name.

``attention_maks`` goes into the ``**kwargs`` of a model of transformers, and the answer is the unmasked one. What a
model takes is never refused: it is logged, once a name.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterable
from typing import Final

from torch import nn

from edge_client.call import Call
from shared_hooks.errors import near

OWN: Final = ("split", "deadline")
"""What `EdgeClient.infer` itself takes by name."""
NEAR: Final = 0.8
"""How near a name is for a slip: ``output_attentions`` and ``attention_mask`` are no slip of each other."""
log = logging.getLogger("edge_client")


class Swallowed:
    """Warns of keywords that one model swallows. ``usual``: the example's keywords, which are never warned of. Any
    thread may call.
    """

    def __init__(self, model: nn.Module, usual: Iterable[str]) -> None:
        try:
            found = list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):  # code that is not Python's says nothing
            found = []
        self._takes_any = any(one.kind is one.VAR_KEYWORD for one in found)
        self._positional = [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
        self._known = [*self._positional, *(one.name for one in found if one.kind is one.KEYWORD_ONLY)]
        self._usual = {*usual, *self._known}
        self._seen: set[tuple[int, tuple[str, ...]]] = set()
        self._told: set[str] = set()

    def look(self, call: Call) -> None:
        """Warns of the keywords of ``call``; nothing the next time they are the same."""
        names = len(call.args), tuple(call.kwargs)
        if not self._takes_any or names in self._seen:
            return
        self._seen.add(names)
        given = {*self._positional[: len(call.args)], *call.kwargs}
        meant = [name for name in (*self._known, *OWN) if name not in given]
        for name in call.kwargs:
            if name not in self._usual and name not in self._told and (hint := near(name, meant, NEAR)):
                self._told.add(name)
                line = f"the model names no argument {name!r:.60}, and takes it by its **kwargs.{hint}"
                log.warning("%s", line)
                warnings.warn(line, UserWarning, stacklevel=5)
