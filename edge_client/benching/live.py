"""A client that runs its heads: an `EdgeClient`, asked by as many threads as it may have requests under way."""

from __future__ import annotations

import queue
import threading
import time

from edge_client.benching.lane import Over
from edge_client.benching.load import Load
from edge_client.benching.shot import Ended, Shot
from edge_client.client import EdgeClient
from edge_client.request import Pending
from shared_hooks.errors import DeadlineExceeded

Order = tuple[Shot, float, int, Over]


class LiveLane:
    """What is due while all threads are busy waits here: its time continues from when it was to begin."""

    def __init__(self, load: Load, client: int) -> None:
        self._load = load
        self._client = EdgeClient(
            load.server,
            load.choice,
            load.cuts[0],
            codec=load.codecs[client],
            metrics=False,
            exact=load.exact,
            deadline=load.give_up,
            connection=load.connection(),
        )
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        self._client.open()
        for cut in self._load.cuts:
            self._client.infer(self._load.calls[0], split=cut, deadline=60.0)
        for _ in range(self._load.in_flight):
            self._threads.append(threading.Thread(target=self._work, name="bench", daemon=True))
            self._threads[-1].start()

    def send(self, shot: Shot, intended: float, over: Over) -> None:
        self._orders.put((shot, intended, int(1e9 * (time.monotonic() - intended)), over))

    def tick(self) -> None:
        pass  # each request has its deadline, and a thread that waits for it

    def close(self) -> None:
        for _ in self._threads:
            self._orders.put(None)
        self._client.close()
        for thread in self._threads:
            thread.join(1.0)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            shot, intended, late_ns, over = order
            ended = self._ask(shot, intended)
            ended.late_ns = late_ns
            over(ended)

    def _ask(self, shot: Shot, intended: float) -> Ended:
        pending: Pending | None = None
        error, company, bytes_up, load = "", 1, 0, None
        try:
            left = intended + self._load.give_up - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded("it waited here, behind others, until then")
            pending = self._client.submit(self._load.calls[shot.input], split=self._load.cuts[shot.cut], deadline=left)
            answer = pending.result()
            company, bytes_up, load = answer.company, answer.bytes_up, answer.load
        except Exception as failed:  # whatever it is, it is counted
            error = type(failed).__name__
        took_ns = int(1e9 * (time.monotonic() - intended))
        exchange = None if pending is None else getattr(pending.request, "exchange", None)
        ended = Ended(shot.number, 0, took_ns, error, 0 if exchange is None else exchange.put_offs, bytes_up)
        ended.company = company
        if load is not None:
            ended.pending, ended.workers, ended.queue_ns = load.pending, load.workers, int(load.queue_ns)
        return ended
