"""Answers kept until the client has them, so that a request sent again after a lost connection is computed once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from cloud_server.limits import Limits
from protos.isthmus.v1 import split_pb2
from shared_hooks.lifecycle import About

Key = tuple[str, str, int]
"""(account, client id, request id): what makes a request unique, and nobody else's."""


@dataclass(frozen=True)
class Answer:
    """A reply or a failure, ready to be sent as often as it is asked for."""

    key: Key
    fingerprint: bytes
    """Of the request it answers (`request.fingerprint`): an id that comes again with other content is not answered."""
    reply: split_pb2.ReplyHeader | None = None
    buffers: tuple[memoryview, ...] = ()
    failed: split_pb2.RequestFailed | None = None
    about: About | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.reply is None else self.reply.payload_bytes


class AnswerStore:
    """Answers by `Key`, bounded in number, bytes and age; the oldest go first. The caller locks."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: OrderedDict[Key, tuple[Answer, float]] = OrderedDict()
        self._bytes = 0

    def put(self, answer: Answer) -> None:
        self.forget([answer.key])
        self._kept[answer.key] = (answer, time.monotonic() + self._limits.answer_seconds)
        self._bytes += answer.nbytes
        while len(self._kept) > self._limits.max_answers or self._bytes > self._limits.max_answer_bytes:
            self.forget([next(iter(self._kept))])

    def get(self, key: Key) -> Answer | None:
        found = self._kept.get(key)
        return found[0] if found else None

    def forget(self, keys: Iterable[Key]) -> None:
        """Drops the answers with these keys; unknown keys are ignored."""
        for key in keys:
            found = self._kept.pop(key, None)
            if found:
                self._bytes -= found[0].nbytes

    def sweep(self) -> None:
        """Drops the answers that nobody acknowledged in time."""
        now = time.monotonic()
        while self._kept:
            key, (_, expires) = next(iter(self._kept.items()))
            if expires > now:
                break
            self.forget([key])

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return self._bytes
