"""What kernels give, by the form of what they take: remembered by all rehearsals of one model.

Cuts of one model see the same kernels on the same forms, and torch works a form out in Python, which takes most of a
rehearsal. Kept are torch's own kernels, whose results depend on nothing else; others are asked in every rehearsal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch

KEPT: Final = 8192
LARGEST: Final = 256
"""Parts of a call's key; a list of a million numbers is not kept."""


class KernelForms:
    """Bounded; what was not used for longest goes first. One thread at a time."""

    def __init__(self, most: int = KEPT) -> None:
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, func: Any, key: Any, work_out: Callable[[], Any]) -> Any:
        """What ``work_out`` gives, or gave before for this ``func`` and ``key`` (of `call_key`). What it raises is not
        remembered.
        """
        if func.namespace != "aten":
            return work_out()
        whole = torch.get_default_dtype(), key
        if whole in self._kept:
            self._kept.move_to_end(whole)
            return self._kept[whole]
        found = work_out()
        if _parts(key) <= LARGEST:
            self._kept[whole] = found
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found


def _parts(key: Any) -> int:
    if not isinstance(key, tuple):
        return 1 + (len(key) // 32 if isinstance(key, str) else 0)
    return sum(map(_parts, key))
