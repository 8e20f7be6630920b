"""What a client does around a head: the answer before becomes tensors, and the next input is read.

It is done before every measurement on the edge, and not only to time it: in a request the head begins with caches,
clocks and a CPU quota as these leave them. Heads of a small model on a quarter of a core, measured by themselves, took
a third of what they take after their input was read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from shared_hooks.crossing import Parcel


class Around:
    """``answer``: header and payload of one. ``prepare`` reads and preprocesses ``path``; None: inputs are tensors."""

    def __init__(
        self, answer: tuple[bytes, bytes], path: Path | None, prepare: Callable[[Path], object] | None
    ) -> None:
        self.path = path
        self._answer = answer
        self._prepare = prepare
        self.finish_ns: list[int] = []
        self.prepare_ns: list[int] = []

    def run(self) -> None:
        """Raises what reading the input raises."""
        started = time.perf_counter_ns()
        Parcel.to_value(*self._answer)
        finished = time.perf_counter_ns()
        self.finish_ns.append(finished - started)
        if self._prepare is not None and self.path is not None:
            self._prepare(self.path)
            self.prepare_ns.append(time.perf_counter_ns() - finished)
