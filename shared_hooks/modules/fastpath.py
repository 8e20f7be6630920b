"""Keep PyTorch's MultiheadAttention fast path off while Isthmus runs a model.

The fast path fuses a whole encoder layer into one kernel and so skips the modules inside; with another kernel the last
bits differ. The switch is global to the process, so it is counted: off while any forward of ours runs, in any thread,
and back to what it was afterwards.
"""

from __future__ import annotations

import threading

import torch

_lock = threading.Lock()
_running = 0
_before = True


class fast_path_off:  # used as a function
    """Switch the fast path off for the duration; nests, and counts over threads."""

    def __enter__(self) -> None:
        global _running, _before
        with _lock:
            if _running == 0:
                _before = torch.backends.mha.get_fastpath_enabled()
                if _before:
                    torch.backends.mha.set_fastpath_enabled(False)
            _running += 1

    def __exit__(self, *_: object) -> None:
        global _running
        with _lock:
            _running -= 1
            if _running == 0 and _before:
                torch.backends.mha.set_fastpath_enabled(True)
