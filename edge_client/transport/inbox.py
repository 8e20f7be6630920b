"""What comes on one welcomed stream: answers in pieces, failures, and the word that the server drains."""

from __future__ import annotations

from typing import Final

from edge_client.transport.exchange import Exchange
from edge_client.transport.outbox import Outbox
from edge_client.transport.state import Counters
from edge_client.transport.waiting import Waiting
from protos.chunks import ChunkFrame
from protos.frames import ServerFrame
from protos.headed import HeadedReply, reply_of
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import by_name
from shared_hooks.lifecycle import Lifecycle, Stage

PUT_OFF_SECONDS: Final = (0.1, 2.0)  # first and longest delay before a request is sent again that the server put off


class Inbox:
    """Gives frames to the requests they belong to. One thread calls `take`."""

    def __init__(
        self,
        address: str,
        welcome: split_pb2.Welcome,
        waiting: Waiting,
        outbox: Outbox,
        counters: Counters,
        lifecycle: Lifecycle,
    ) -> None:
        self._address = address
        self._welcome = welcome
        self._waiting = waiting
        self._outbox = outbox
        self._counters = counters
        self._lifecycle = lifecycle

    def take(self, frame: ServerFrame) -> None:
        """A frame of a kind this version does not know is skipped: a later server may say more."""
        if isinstance(frame, ChunkFrame):
            if exchange := self._find(frame.id):
                exchange.take_chunk(frame)
                self._if_settled(exchange)
            return
        if isinstance(frame, HeadedReply):
            self._take_reply(frame)
            return
        kind = frame.WhichOneof("frame")
        if kind == "reply":
            self._take_reply(reply_of(frame.reply))
        elif kind == "failed":
            self._take_failure(frame.failed)
        elif kind == "draining":
            self._lifecycle.emit(Stage.BEFORE_DRAIN, address=self._address)
            self._outbox.drain()

    def _take_reply(self, frame: HeadedReply) -> None:
        if exchange := self._find(frame.header.id):
            exchange.take_reply(frame.header, frame.pieces)
            self._if_settled(exchange)
        else:
            self._counters.stray += 1
            self._outbox.answered(frame.header.id)

    def _take_failure(self, failed: split_pb2.RequestFailed) -> None:
        exchange = self._find(failed.id)
        if exchange is None:
            self._outbox.refused(failed.id)
            return
        error = by_name(failed.error)(f"{failed.message} (reported by {self._address})")
        error.retry_after_seconds = failed.retry_after_ms / 1e3 or None
        if failed.retry:  # until the deadline, which then names this error
            first, longest = PUT_OFF_SECONDS
            delay = min(longest, first * 2**exchange.put_offs)
            exchange.put_off(error)
            self._outbox.forget_cut(exchange.cut_digest)  # it may be what the server misses
            self._outbox.put(exchange, delay)
        else:
            exchange.settle(error)
            self._if_settled(exchange)

    def _find(self, request_id: int) -> Exchange | None:
        with self._waiting.changed:
            return self._waiting.find(request_id)

    def _if_settled(self, exchange: Exchange) -> None:
        if exchange.settled:
            with self._waiting.changed:
                self._waiting.leave(exchange)
                if exchange.breaks:  # it may have been what the others wait for
                    self._outbox.open(self._waiting.limit(self._welcome))
            self._outbox.answered(exchange.id)
