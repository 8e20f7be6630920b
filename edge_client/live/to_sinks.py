"""`ToSinks`: a hook that hands every answer's numbers to sinks.

    client = EdgeClient("127.0.0.1:50051", "digits", split="stage2.0.conv2")
    client.lifecycle.register(ToSinks(TensorBoardSink("runs/first")))

It ends, and its sinks with it, when the client is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from edge_client.answer import Answer
from edge_client.live.aside import Aside
from edge_client.live.values import of_answer
from shared_hooks.lifecycle import Event
from shared_hooks.sinks import Sink

log = logging.getLogger(__name__)


class ToSinks:
    """Hooks. The step is the answer's number, from 0. Sinks are written in a thread beside the requests; where they are
    slower than these, answers are left out (`left_out`).
    """

    name = "sinks"
    built_in = True
    priority = "LOWEST"

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks
        self._steps = 0
        self._asides = [Aside(f"sink {type(sink).__name__}", self._writer(sink)) for sink in sinks]

    @property
    def left_out(self) -> int:
        """Answers that some sink was too slow for."""
        return max((one.left_out for one in self._asides), default=0)

    @property
    def failures(self) -> int:
        """Writes that failed."""
        return sum(one.failures for one in self._asides)

    def after_request(self, event: Event) -> None:
        """An answer, or none."""
        if event.answer is not None:
            step, self._steps = self._steps, self._steps + 1
            answer = replace(event.answer, output=None)  # it may be large, and is not told
            for aside in self._asides:
                aside.put((step, answer))

    def after_shutdown(self, event: Event) -> None:
        """The client is closed."""
        self.close()

    def close(self) -> None:
        """What waits is written, and the sinks are closed. May be called again."""
        sinks, self._sinks = self._sinks, ()
        for aside in self._asides:
            aside.close()
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:
                log.warning("sink %s did not close: %s: %s", type(sink).__name__, type(error).__name__, error)

    @staticmethod
    def _writer(sink: Sink) -> Callable[[tuple[int, Answer]], None]:
        def write(item: tuple[int, Answer]) -> None:
            step, answer = item
            sink.write(of_answer(answer), step)

        return write
