"""Methods of a state that others than the model call between steps: rollback, reordering of beams, copies of rows.

They are called on both sides, each on its own tensors: ``[name, arguments]``. What else the caller changed in the
Python part of a state is sent: ``["=", changes]``.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from shared_hooks.errors import MALFORMED, BadFrame
from shared_hooks.generation.allowance import StepAllowance
from shared_hooks.generation.changes import Changes
from shared_hooks.generation.mirror import Mirror

MUTATORS = (
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "reorder_cache",
    "reset",
)
MAX_NUMBERS = 65_536


def written(arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments for the wire: numbers as they are, a tensor of integers as a list."""
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in arguments]


def apply(mirror: Mirror, calls: Any, most: int) -> None:
    """Call them here; together they may make ``most`` bytes. Raises TooLarge beyond that, and BadFrame for what is no
    such method, and for an index that is out of range.
    """
    name: Any = ""
    allowance = StepAllowance(most)
    try:
        for name, arguments in calls:
            if name == "=":
                mirror.put(Changes().heard(mirror.form, arguments))
                continue
            # of the class: what a sender calls an attribute is no method
            method = getattr(type(mirror.state), name, None) if name in MUTATORS else None
            if not isinstance(method, types.FunctionType):
                raise BadFrame(f"a state has no method {name!r:.40}")
            with allowance:
                method(mirror.state, *[_read(one, mirror.here) for one in arguments])
            mirror.renew()
    except BadFrame:
        raise
    except (*MALFORMED, RuntimeError) as error:
        raise BadFrame(f"{name!r:.40} of the state fails: {error!s:.160}") from error


def _read(argument: Any, here: torch.device) -> Any:
    if isinstance(argument, list):
        if len(argument) > MAX_NUMBERS or any(type(one) is not int for one in argument):
            raise BadFrame("malformed call of a state's method")
        return torch.tensor(argument, dtype=torch.int64, device=here)
    if argument is not None and type(argument) not in (int, bool):
        raise BadFrame("malformed call of a state's method")
    return argument
