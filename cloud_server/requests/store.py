"""Answers kept until the client has them, so that a request sent again after a lost connection is computed once.

What waits on streams to be fetched is kept here, too: an answer is counted until it is sent *and* acknowledged, or has
to go. So one bound holds for all of it, and a client that reads nothing fills nobody else's share.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cloud_server import wire
from cloud_server.limits import Limits
from cloud_server.models import Computed, join_reply
from cloud_server.requests.request import Answer, Key, Outlet, Request
from protos.frames import HeadedReply, cut
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError, ServerUnavailable
from shared_hooks.sharing import Party, Shares

# What a request is answered with: its result or its error, as frames.


class Handed(NamedTuple):
    """A part of a request that the next server of its chain has answered. ``took_ns``: from handing it on."""

    server: str
    cut: str
    bytes_up: int
    payload: bytes | bytearray
    took_ns: int
    sends: int


def answer(request: Request, computed: Computed, started_ns: int, load: split_pb2.Load) -> Answer:
    """The answer to a request whose tail was started at ``started_ns`` (perf_counter). Completes the engine's reply."""
    reply, buffers = computed.reply, computed.buffers
    request.reply = reply
    reply.id = request.id
    reply.load.CopyFrom(load)
    reply.observations = request.observations or reply.observations
    reply.durations.receive_ns = request.complete_ns - request.sent_ns
    reply.durations.complete_ns = request.complete_ns
    reply.durations.queue_ns = started_ns - request.complete_ns - request.read_ns
    if not computed.is_part and reply.payload_bytes <= request.inline_bytes:
        reply.payload, buffers = b"".join(buffers), ()
    return Answer(request.key, request.fingerprint, reply=reply, buffers=buffers, about=request.about)


def joined(request: Request, own: split_pb2.ReplyHeader, rest: split_pb2.ReplyHeader, hop: Handed) -> Answer:
    """The answer of a chain: this server's part is reported in ``own``, and ``rest`` answered from the next one on."""
    reply = request.reply = split_pb2.ReplyHeader()
    reply.CopyFrom(own)
    join_reply(reply, rest, hop.server, hop.cut, bytes_up=hop.bytes_up, sends=hop.sends, took_ns=hop.took_ns)
    buffers: tuple[memoryview, ...] = (memoryview(hop.payload),)
    if reply.payload_bytes <= request.inline_bytes:
        reply.payload, buffers = bytes(hop.payload), ()
    return Answer(request.key, request.fingerprint, reply=reply, buffers=buffers, about=request.about)


def failure(request: Request, error: IsthmusError, retry: bool | None = None) -> Answer:
    """The answer to a request that failed; ``retry``: of `wire.failed`."""
    return Answer(request.key, request.fingerprint, failed=wire.failed(request.id, error, retry), about=request.about)


def frames(answer: Answer, chunk_bytes: int, headed: bool = False) -> Iterator[wire.OutFrame]:
    """What is sent for an answer: its reply and the payload in chunks, or its failure. ``headed``: the first of these
    chunks is in the reply's message.
    """
    if answer.reply is None:
        yield split_pb2.ServerFrame(failed=answer.failed)
        return
    chunks = iter(()) if answer.reply.payload else cut(answer.reply.id, answer.buffers, chunk_bytes)
    first = next(chunks, None) if headed else None
    if first is None:
        yield split_pb2.ServerFrame(reply=answer.reply)
    else:
        yield HeadedReply(answer.reply, first.pieces)
    yield from chunks


class _Kept:
    """``lines``: the streams on which it waits or is being sent. ``acknowledged``: the client has it already."""

    __slots__ = ("acknowledged", "answer", "expires", "lines", "size")

    def __init__(self, answer: Answer, expires: float) -> None:
        self.answer = answer
        self.expires = expires
        self.size = answer.held_bytes
        self.lines: list[Outlet] = []
        self.acknowledged = False


class AnswerStore:
    """Answers by `Key`, bounded in number, bytes and age. Beyond a bound the client that holds the most, of the account
    that holds the most, loses its oldest; what it has not fetched it may ask for again. The caller locks.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._of: dict[Party, OrderedDict[Key, None]] = {}
        self._numbers = Shares(limits.max_answers)
        self._bytes = Shares(limits.max_answer_bytes)

    def put(self, answer: Answer) -> None:
        """Keeps it; at its size it may be no larger than all answers together."""
        if answer.key in self._kept:
            self._remove(answer.key)
        kept, party = _Kept(answer, time.monotonic() + self._limits.answer_seconds), Party(*answer.key[:2])
        self._numbers.add(party, 1)
        self._bytes.add(party, kept.size)
        while self._kept and not (self._numbers.has_room() and self._bytes.has_room()):
            self._make_room(self._bytes if self._numbers.has_room() else self._numbers)
        self._kept[answer.key] = kept
        self._of.setdefault(party, OrderedDict())[answer.key] = None

    def send(self, answer: Answer, outlet: Outlet) -> None:
        """Puts it in line on a stream, whether it is kept or not."""
        kept = self._kept.get(answer.key)
        if kept is not None and not outlet.is_over:
            kept.lines.append(outlet)
        outlet.send(answer)

    def sent(self, answer: Answer, outlet: Outlet) -> None:
        """All of it went out on this stream."""
        kept = self._kept.get(answer.key)
        if kept is not None and kept.answer is answer:
            self._leaves(kept, outlet)

    def left(self, outlet: Outlet) -> None:
        """The stream is gone; what waited on it is kept for whoever comes back."""
        for key in list(self._of.get(outlet.party, ())):
            self._leaves(self._kept[key], outlet)

    def get(self, key: Key) -> Answer | None:
        found = self._kept.get(key)
        return found.answer if found else None

    def forget(self, keys: Iterable[Key]) -> None:
        """The client has these answers; unknown keys are ignored. One that is said to be there before it is sent goes
        when it is.
        """
        for key in keys:
            kept = self._kept.get(key)
            if kept is None:
                continue
            kept.acknowledged = True
            if not kept.lines:
                self._remove(key)

    def sweep(self) -> None:
        """Drops the answers that nobody fetched or acknowledged in time, and streams that stand still for as long."""
        now, seconds = time.monotonic(), self._limits.answer_seconds
        for key, kept in list(self._kept.items()):
            if kept.expires > now:
                break
            if self._withdraw(kept, f"it was not fetched within {seconds:g} s (answer_seconds)"):
                self._remove(key)
            elif all(outlet.stuck_seconds > seconds for outlet in kept.lines):
                self._drop(kept, f"nothing of an answer was fetched for {seconds:g} s (answer_seconds)")

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """What they take in memory."""
        return self._bytes.total

    def _make_room(self, shares: Shares) -> None:
        """One of those goes that the fullest account's fullest client has: the oldest that was sent; else the last
        in a line; else one that is being sent, and with it a stream that does not read.
        """
        bound = "max_answers" if shares is self._numbers else "max_answer_bytes"
        why = f"the server keeps answers up to its limit ({bound}), and this client has most of them: fetch them sooner"
        fullest = shares.fullest()
        if fullest not in self._of:  # all that it has is the one that is being put
            fullest = max(self._of, key=lambda party: (shares.account(party.account), shares.client(party)))
        mine = [self._kept[key] for key in self._of[fullest]]
        for kept in mine:
            if not kept.lines:
                self._remove(kept.answer.key)
                return
        for kept in reversed(mine):
            if self._withdraw(kept, why):
                self._remove(kept.answer.key)
                return
        slowest = max(mine, key=lambda kept: min(outlet.stuck_seconds for outlet in kept.lines))
        self._drop(slowest, why)

    def _withdraw(self, kept: _Kept, why: str) -> bool:
        """Takes an answer out of every line in which it waits; False where it is being sent."""
        error = ServerUnavailable(f"the answer gave way: {why}; ask again")
        failure = wire.failed(kept.answer.key[2], error)
        kept.lines = [outlet for outlet in kept.lines if not outlet.withdraw(kept.answer, failure)]
        return not kept.lines

    def _drop(self, kept: _Kept, why: str) -> None:
        """Gives up an answer that is being sent, and the streams that do not take it."""
        for outlet in kept.lines:
            outlet.drop(ServerUnavailable(f"this stream does not fetch what is sent on it: {why}"))
        self._remove(kept.answer.key)

    def _leaves(self, kept: _Kept, outlet: Outlet) -> None:
        if outlet in kept.lines:
            kept.lines.remove(outlet)
            if kept.acknowledged and not kept.lines:
                self._remove(kept.answer.key)

    def _remove(self, key: Key) -> None:
        kept, party = self._kept.pop(key), Party(*key[:2])
        self._numbers.remove(party, 1)
        self._bytes.remove(party, kept.size)
        mine = self._of[party]
        del mine[key]
        if not mine:
            del self._of[party]
