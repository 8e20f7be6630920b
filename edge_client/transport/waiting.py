"""Who waits on a connection: requests without an answer, and callers of `open` without a Welcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Final

from edge_client.transport.exchange import Exchange
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import Disagreement, IsthmusError, RemoteError, TooLarge

SUSPECT_BREAKS: Final = 2  # a request that two streams broke under may be the cause: one at a time from then on
MAX_BREAKS: Final = 5  # a request that five streams broke under is the cause

Opener = Future[split_pb2.Welcome]


class Waiting:
    """`changed` guards all of it, and the connection's own state; all methods but `fail` are called with it held."""

    def __init__(self, address: str, max_in_flight: int) -> None:
        self.changed = threading.Condition()
        self._requests: dict[int, Exchange] = {}
        self._openers: list[Opener] = []
        self._since: dict[Exchange | Opener, float] = {}
        self._address = address
        self._most = max_in_flight

    def __len__(self) -> int:
        return len(self._requests) + len(self._openers)

    def add(self, who: Exchange | Opener) -> None:
        """A request that wants an answer, or a caller who wants a Welcome."""
        self._since.setdefault(who, time.monotonic())
        if isinstance(who, Exchange):
            self._requests[who.id] = who
        else:
            self._openers.append(who)

    def find(self, request_id: int) -> Exchange | None:
        """The request that waits under this id; None for one that does not wait, or no longer."""
        return self._requests.get(request_id)

    def leave(self, who: Exchange | Opener) -> None:
        """Nobody waits for it any more; may be repeated."""
        self._since.pop(who, None)
        if isinstance(who, Exchange):
            self._requests.pop(who.id, None)
        elif who in self._openers:
            self._openers.remove(who)

    def in_order(self) -> list[Exchange]:
        """The requests in the order in which they were submitted."""
        return [exchange for _, exchange in sorted(self._requests.items())]

    def take_openers(self) -> list[Opener]:
        """The callers of `open`, who wait no longer: whoever takes them gives them the Welcome."""
        openers, self._openers = self._openers, []
        for opener in openers:
            self._since.pop(opener, None)
        return openers

    def left(self, lost: float, patience: float) -> float:
        """Seconds until the first has waited for ``patience`` without a stream, 0 or more.

        There is none since ``lost``; each counts from when it came, for its patience is its own.
        """
        now = time.monotonic()
        return max(0.0, min((patience - (now - max(lost, since)) for since in self._since.values()), default=patience))

    def take_late(self, lost: float, patience: float) -> list[Exchange | Opener]:
        """Who has waited for that long, and waits no longer: whoever takes them tells them why."""
        now = time.monotonic()
        late = [who for who, since in self._since.items() if now - max(lost, since) >= patience]
        for who in late:
            self.leave(who)
        return late

    def limit(self, welcome: split_pb2.Welcome) -> int:
        """How many requests may go unanswered on the stream: one, while one is suspected to break streams.

        Else the innocent that happen to be on the stream would be given up together with the culprit.
        """
        if any(exchange.breaks >= SUSPECT_BREAKS for exchange in self._requests.values()):
            return 1
        return min(self._most, welcome.max_in_flight or self._most)

    def refuse(self, exchange: Exchange, welcome: split_pb2.Welcome | None) -> bool:
        """Whether the server would not take this request, which then has ended."""
        if welcome is not None and exchange.is_step and not welcome.inline_bytes:
            self.leave(exchange)
            return exchange.settle(Disagreement(f"{self._address} is older than decoding sessions, and has none"))
        limit = welcome.max_request_bytes if welcome else 0
        if not limit or exchange.payload_bytes <= limit:
            return False
        self.leave(exchange)
        return exchange.settle(
            TooLarge(f"the frontier has {exchange.payload_bytes} bytes; {self._address} takes {limit} at most")
        )

    def interrupted(self, reason: str, suspect: bool = True) -> None:
        """The stream broke: half-received answers are forgotten, and requests that broke too many are given up.

        ``suspect``: no doing of this side, so that a request may have been the cause.
        """
        for exchange in list(self._requests.values()):
            exchange.interrupted(suspect)
            if exchange.breaks >= MAX_BREAKS:
                self.leave(exchange)
                exchange.settle(
                    RemoteError(
                        f"{self._address}: the stream broke {exchange.breaks} times while request {exchange.id} was "
                        f"on it (last: {reason})"
                    )
                )

    def fail(self, error: IsthmusError) -> None:
        """Everybody gets ``error``."""
        with self.changed:
            requests, self._requests = list(self._requests.values()), {}
            openers = self.take_openers()
            self._since.clear()
        settle([*requests, *openers], error)


def settle(waiting: Iterable[Exchange | Opener], error: IsthmusError) -> None:
    """Each gets ``error`` as its own: an exception collects its raiser's traceback."""
    for who in waiting:
        own = type(error)(str(error))
        if isinstance(who, Exchange):
            who.settle(own)
        else:
            who.set_exception(own)
