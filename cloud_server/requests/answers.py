"""An answer to a request: its result or its failure, and whose it is."""

from __future__ import annotations

from dataclasses import dataclass

from protos.isthmus.v1 import split_pb2
from shared_hooks.lifecycle import About

Key = tuple[str, str, int]
"""(account, client id, request id): what makes a request unique, and nobody else's."""


@dataclass(frozen=True)
class Answer:
    """A reply or a failure, ready to be sent as often as it is asked for."""

    key: Key
    fingerprint: bytes
    """The fingerprint of the request it answers (`request.fingerprint`): an id that comes again with other content is
    not answered.
    """
    reply: split_pb2.ReplyHeader | None = None
    buffers: tuple[memoryview, ...] = ()
    failed: split_pb2.RequestFailed | None = None
    about: About | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.reply is None else self.reply.payload_bytes

    @property
    def held_bytes(self) -> int:
        """What it takes in memory: messages are objects, about twice as large as their bytes."""
        message = self.reply or self.failed
        inline = 0 if self.reply is None else len(self.reply.payload)
        besides = 0 if message is None else message.ByteSize() - inline
        return OVERHEAD + self.nbytes + 2 * besides


OVERHEAD = 1 << 10
"""Bytes that an answer takes besides its content."""
