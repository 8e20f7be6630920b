"""Who waits on a connection: requests without an answer, and callers of `open` without a Welcome."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Final

from edge_client.exchange import Exchange
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError, RemoteError, TooLarge

SUSPECT_BREAKS: Final = 2  # a request that two streams broke under may be the cause: one at a time from then on
MAX_BREAKS: Final = 5  # a request that five streams broke under is the cause

Opener = Future[split_pb2.Welcome]


class Waiting:
    """`changed` guards all of it, and the connection's own state; all methods but `fail` are called with it held."""

    def __init__(self, address: str, max_in_flight: int) -> None:
        self.changed = threading.Condition()
        self.requests: dict[int, Exchange] = {}
        self.openers: list[Opener] = []
        self._address = address
        self._most = max_in_flight

    def __len__(self) -> int:
        return len(self.requests) + len(self.openers)

    def limit(self, welcome: split_pb2.Welcome) -> int:
        """How many requests may go unanswered on the stream: one, while one is suspected to break streams.

        Else the innocent that happen to be on the stream would be given up together with the culprit.
        """
        if any(exchange.breaks >= SUSPECT_BREAKS for exchange in self.requests.values()):
            return 1
        return min(self._most, welcome.max_in_flight or self._most)

    def refuse_if_too_large(self, exchange: Exchange, welcome: split_pb2.Welcome | None) -> bool:
        """Whether the server would not take this request, which then has ended."""
        limit = welcome.max_request_bytes if welcome else 0
        if not limit or exchange.payload_bytes <= limit:
            return False
        self.requests.pop(exchange.id, None)
        return exchange.settle(
            TooLarge(f"the frontier has {exchange.payload_bytes} bytes; {self._address} takes {limit} at most")
        )

    def interrupted(self, reason: str) -> None:
        """The stream broke: half-received answers are forgotten, and requests that broke too many are given up."""
        for exchange in list(self.requests.values()):
            exchange.interrupted()
            if exchange.breaks >= MAX_BREAKS:
                del self.requests[exchange.id]
                exchange.settle(
                    RemoteError(
                        f"{self._address}: the stream broke {exchange.breaks} times while request {exchange.id} was "
                        f"on it (last: {reason})"
                    )
                )

    def fail(self, error: IsthmusError) -> None:
        """Everybody gets ``error``, each its own: an exception collects its raiser's traceback."""
        with self.changed:
            requests, self.requests = list(self.requests.values()), {}
            openers, self.openers = self.openers, []
        for exchange in requests:
            exchange.settle(type(error)(str(error)))
        for opener in openers:
            opener.set_exception(type(error)(str(error)))
