"""Who waits on a connection: requests without an answer, and callers of `open` without a Welcome."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Final

from edge_client.transport.exchange import Exchange
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError, RemoteError, TooLarge

SUSPECT_BREAKS: Final = 2  # a request that two streams broke under may be the cause: one at a time from then on
MAX_BREAKS: Final = 5  # a request that five streams broke under is the cause

Opener = Future[split_pb2.Welcome]


class Waiting:
    """`changed` guards all of it, and the connection's own state; all methods but `fail` are called with it held."""

    def __init__(self, address: str, max_in_flight: int) -> None:
        self.changed = threading.Condition()
        self._requests: dict[int, Exchange] = {}
        self._openers: list[Opener] = []
        self._address = address
        self._most = max_in_flight

    def __len__(self) -> int:
        return len(self._requests) + len(self._openers)

    def add(self, who: Exchange | Opener) -> None:
        """A request that wants an answer, or a caller who wants a Welcome."""
        if isinstance(who, Exchange):
            self._requests[who.id] = who
        else:
            self._openers.append(who)

    def find(self, request_id: int) -> Exchange | None:
        """The request that waits under this id; None for one that does not wait, or no longer."""
        return self._requests.get(request_id)

    def leave(self, who: Exchange | Opener) -> None:
        """Nobody waits for it any more; may be repeated."""
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
        return openers

    def limit(self, welcome: split_pb2.Welcome) -> int:
        """How many requests may go unanswered on the stream: one, while one is suspected to break streams.

        Else the innocent that happen to be on the stream would be given up together with the culprit.
        """
        if any(exchange.breaks >= SUSPECT_BREAKS for exchange in self._requests.values()):
            return 1
        return min(self._most, welcome.max_in_flight or self._most)

    def refuse_if_too_large(self, exchange: Exchange, welcome: split_pb2.Welcome | None) -> bool:
        """Whether the server would not take this request, which then has ended."""
        limit = welcome.max_request_bytes if welcome else 0
        if not limit or exchange.payload_bytes <= limit:
            return False
        self.leave(exchange)
        return exchange.settle(
            TooLarge(f"the frontier has {exchange.payload_bytes} bytes; {self._address} takes {limit} at most")
        )

    def interrupted(self, reason: str) -> None:
        """The stream broke: half-received answers are forgotten, and requests that broke too many are given up."""
        for exchange in list(self._requests.values()):
            exchange.interrupted()
            if exchange.breaks >= MAX_BREAKS:
                del self._requests[exchange.id]
                exchange.settle(
                    RemoteError(
                        f"{self._address}: the stream broke {exchange.breaks} times while request {exchange.id} was "
                        f"on it (last: {reason})"
                    )
                )

    def fail(self, error: IsthmusError) -> None:
        """Everybody gets ``error``, each its own: an exception collects its raiser's traceback."""
        with self.changed:
            requests, self._requests = list(self._requests.values()), {}
            openers = self.take_openers()
        for exchange in requests:
            exchange.settle(type(error)(str(error)))
        for opener in openers:
            opener.set_exception(type(error)(str(error)))
