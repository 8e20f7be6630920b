"""A request of HTTP in its thread, from the complete body to the fetched answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial

from cloud_server.access import Caller
from cloud_server.inference import Asking, Inference
from cloud_server.transport.guests import Guests
from cloud_server.transport.rest import messages
from cloud_server.transport.rest.connections import Peer
from shared_hooks.lifecycle import on_behalf_of

Deliver = Callable[[list[bytes], list[memoryview]], object]
"""Takes the answer's JSON and what stands behind it, and returns when they are fetched."""


class Work:
    """``request``: by what `Guests` knows it."""

    def __init__(self, inference: Inference, guests: Guests, request: Hashable, caller: Caller, peer: Peer) -> None:
        self._inference = inference
        self._guests = guests
        self._request = request
        self._caller = caller
        self._peer = peer
        self._lock = threading.Lock()
        self._asking: Asking | None = None
        self._gone = False

    def gone(self) -> None:
        """The client left. Any thread may call."""
        with self._lock:
            self._gone = True
            if self._asking is not None:
                self._asking.gone()

    def run(self, model: str, version: str, body: memoryview, json_bytes: int | None, deliver: Deliver) -> None:
        """Raises what the request fails by."""
        inference, leave = self._inference, self._peer.leave
        with on_behalf_of(self._caller.account), inference.asking(self._caller, leave) as asking:
            self._peer.works()
            with self._lock:
                self._asking = asking
                if self._gone:
                    asking.gone()
            self._guests.when_sent_away(self._request, asking.refuse)
            query, wanted = asking.read(partial(messages.read, model, version, body, json_bytes))
            result = inference.infer(asking, query)
            del body, query
            with inference.held.hold(asking.party, leave) as hold:
                hold.more(messages.answer_bytes(result, wanted))
                head, behind = asking.read(partial(messages.answer, result, wanted))
                deliver(head, behind)
