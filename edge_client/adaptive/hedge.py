"""The whole model run here beside a request that is late; given up in the middle when that is answered after all.

A forward is left between two modules: a global hook of torch, there only while something runs, raises in the thread of
the one that nobody wants any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Final

from torch.nn.modules.module import register_module_forward_pre_hook

from edge_client.answer import Answer
from edge_client.planning.candidate import Candidate
from shared_hooks.errors import Cancelled

SLACK: Final = 1.5
SLACK_NS: Final = 50_000_000
"""A request is hedged when it has taken so many times what was predicted of network and server, and so much more."""


def expected_ns(candidate: Candidate) -> float:
    """What a request should take from here to its answer, once its head has run."""
    return sum(candidate.stages_ns.get(stage, 0.0) for stage in ("network", "queue", "tail"))


def is_late(candidate: Candidate, waited_ns: float) -> bool:
    """Whether the whole model had better run here, too."""
    return waited_ns > SLACK * expected_ns(candidate) + SLACK_NS


class _Abandoned(BaseException):
    """Leaves the model; derived so that a model's own ``except Exception`` lets it through."""


class Hedge:
    """Runs one thing at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="edge-hedge")
        self._unwanted: set[Future[Answer]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def run(self, work: Callable[[], Answer]) -> Future[Answer]:
        """``work()``, as soon as what ran before is done or left; Cancelled after `close`."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:  # while a request was under way in another thread
                future.set_exception(Cancelled("closed"))
                return future
            queued = self._worker.submit(self._run, work, future)
        queued.add_done_callback(lambda one: future.set_exception(Cancelled("closed")) if one.cancelled() else None)
        return future

    def abandon(self, future: Future[Answer]) -> None:
        """Nobody waits for it: it ends with Cancelled at its next module, or does not begin."""
        self._unwanted.add(future)
        if future.done():  # it ended before it was unwanted, and nothing else will forget it
            self._unwanted.discard(future)

    def close(self) -> None:
        """Returns when nothing runs any more; what has not begun ends with Cancelled."""
        with self._lock:
            self._closed = True
        self._worker.shutdown(cancel_futures=True)

    def _run(self, work: Callable[[], Answer], future: Future[Answer]) -> None:
        mine = threading.get_ident()

        def check(*_: object) -> None:
            if threading.get_ident() == mine and future in self._unwanted:
                raise _Abandoned

        hook = register_module_forward_pre_hook(check)
        try:
            check()
            future.set_result(work())
        except (_Abandoned, CancelledError):
            future.set_exception(Cancelled("it was answered elsewhere first"))
        except BaseException as error:
            future.set_exception(error)
        finally:
            hook.remove()
            self._unwanted.discard(future)
