"""Methods of a state that others than the model call between steps: rollback, reordering of beams, copies of rows.

They are called on both sides, each on its own tensors: ``[name, arguments]``. What else the caller changed in the
Python part of a state is told: ``["=", changes]``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from shared_hooks.errors import BadFrame
from shared_hooks.generation.allowance import Allowance
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
FEW_ROWS = 64


def written(arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments for the wire: numbers as they are, a tensor of integers as a list."""
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in arguments]


def apply(mirror: Mirror, calls: Any, most: int) -> None:
    """Call them here; ``most`` bytes may be made. Raises TooLarge beyond that, and BadFrame for what is no such method,
    and for an index that is out of range.
    """
    try:
        for name, arguments in calls:
            if name == "=":
                mirror.put(Changes().heard(mirror.form, arguments))
                continue
            method = getattr(mirror.state, name, None) if name in MUTATORS else None
            if method is None:
                raise BadFrame(f"a state has no method {name!r:.40}")
            read = [_read(one, mirror.here) for one in arguments]
            # counting costs more than a reordering: only what makes more rows is counted
            grows = name not in ("crop", "reset") and sum(map(_count, read)) > FEW_ROWS
            with Allowance(most) if grows else nullcontext():
                method(*read)
            mirror.renew()
    except BadFrame:
        raise
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise BadFrame(f"{name}() of the state fails: {error!s:.160}") from error


def _count(argument: Any) -> int:
    return argument.numel() if isinstance(argument, torch.Tensor) else int(argument or 0)


def _read(argument: Any, here: torch.device) -> Any:
    if isinstance(argument, list):
        if len(argument) > MAX_NUMBERS or any(type(one) is not int for one in argument):
            raise BadFrame("malformed call of a state's method")
        return torch.tensor(argument, dtype=torch.int64, device=here)
    if argument is not None and type(argument) not in (int, bool):
        raise BadFrame("malformed call of a state's method")
    return argument
