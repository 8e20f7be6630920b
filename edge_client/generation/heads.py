"""Heads of several generations at once: copies of one model, whose steps share row-wise computations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context

from torch import nn

from edge_client.generation.link import SessionLink
from shared_hooks.generation.together import Lockstep, Outcome

IN_HALVES = 8
"""The number of generations from which half of them run here while the server computes the other half."""
FIRST_PATIENCE, MOST_PATIENCE = 0.02, 0.5
"""How long heads wait for those of other generations whose steps are in progress: before a step was measured, and at
most.
"""


class SharedHeads:
    """Runs the heads of steps in lockstep (`shared_hooks.generation.together`), so last bits may differ. Thread-safe:
    one of the waiting threads runs all heads.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """``models``: copies with the same weights, one for each generation."""
        self._together = Lockstep(models[0], models[1:])
        self._changed = threading.Condition()
        self._waiting: list[_Head] = []
        self._expected: dict[TextHeads, float] = {}
        """Generations whose next head is due, and since when: their last one is done, or their prompt is answered."""
        self._patience = FIRST_PATIENCE
        self._runs = False

    def of_text(self, link: SessionLink) -> TextHeads:
        """Return the heads of one copy of the model, whose steps use ``link``."""
        return TextHeads(self, link)

    def close(self) -> None:
        """Restore the models; no head may be in progress."""
        self._together.close()

    def run(self, text: TextHeads, head: Callable[[], None]) -> int:
        """As `TextHeads.run`."""
        mine = _Head(text, head, copy_context())
        with self._changed:
            self._waiting.append(mine)
            if (since := self._expected.pop(text, None)) is not None:
                self._patience += 0.1 * (2 * (time.monotonic() - since) - self._patience)
            self._changed.notify_all()
            leads = False
            try:
                self._changed.wait_for(lambda: mine.outcome is not None or not self._runs)
                leads = mine.outcome is None
                if leads:
                    self._runs = True
                    if not self._changed.wait_for(self._enough, min(self._patience, MOST_PATIENCE)):
                        self._expected.clear()  # they are late: the next run does not wait for them
                    batch, self._waiting = self._waiting, []
            except BaseException:  # an interrupt: others neither run this head nor wait for this thread
                if mine in self._waiting:
                    self._waiting.remove(mine)
                self._runs = self._runs and not leads
                self._changed.notify_all()
                raise
        if leads:
            self._run(batch)
        assert mine.outcome is not None
        mine.outcome.result()
        text.link.at_once = mine.beside
        return mine.outcome.batch_size

    def _enough(self) -> bool:
        """Return whether enough heads wait to run together: half of many, while the server has the other half."""
        waiting, all_ = len(self._waiting), len(self._waiting) + len(self._expected)
        return waiting == all_ or (all_ >= IN_HALVES and 2 * waiting >= all_)

    def _run(self, batch: Sequence[_Head]) -> None:
        error: BaseException | None = None
        try:
            found = self._together.run([one.run for one in batch], contexts=[one.context for one in batch])
        except BaseException as wrong:  # raised from outside, not by any of them
            found, error = [], wrong
        with self._changed:
            now = time.monotonic()
            for number, one in enumerate(batch):
                one.beside = len(batch)
                self._expected[one.text] = now
                one.outcome = found[number] if found else Outcome(None, error, batch_size=1, meetings=0)
            self._runs = False
            self._changed.notify_all()

    def answered(self, text: TextHeads) -> None:
        """As `TextHeads.answered`."""
        with self._changed:
            self._expected.setdefault(text, time.monotonic())

    def ended(self, text: TextHeads) -> None:
        """As `TextHeads.ended`."""
        with self._changed:
            self._expected.pop(text, None)
            self._changed.notify_all()


class TextHeads:
    """The heads of one generation: a `shared_hooks.generation.split.HeadRunner`."""

    def __init__(self, shared: SharedHeads, link: SessionLink) -> None:
        self._shared = shared
        self.link = link

    def run(self, head: Callable[[], None]) -> int:
        """As `Heads.run`, together with waiting heads of other generations."""
        return self._shared.run(self, head)

    def answered(self) -> None:
        """As `Heads.answered`."""
        self._shared.answered(self)

    def ended(self) -> None:
        """The generation is over: no further head comes."""
        self._shared.ended(self)


class _Head:
    def __init__(self, text: TextHeads, run: Callable[[], None], context: Context) -> None:
        self.text = text
        self.run = run
        self.context = context
        self.beside = 1
        """The heads in its batch."""
        self.outcome: Outcome[None] | None = None
