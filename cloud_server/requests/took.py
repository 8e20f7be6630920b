"""What one request took here: what its client is told, and what metrics and traces are made of."""

from __future__ import annotations

from dataclasses import dataclass

from protos.isthmus.v1 import split_pb2
from shared_hooks.metrics import NOT_SAMPLED, Reading


@dataclass(frozen=True, slots=True)
class Took:
    """Nanoseconds, one after the other, and joules."""

    receive: int = 0
    queue: int = 0
    decode: int = 0
    inject: int = 0
    compute: int = 0
    encode: int = 0
    energy: Reading = NOT_SAMPLED

    def durations(self) -> split_pb2.Durations:
        """As they travel."""
        return split_pb2.Durations(
            receive_ns=self.receive,
            queue_ns=self.queue,
            decode_ns=self.decode,
            inject_ns=self.inject,
            compute_ns=self.compute,
            encode_ns=self.encode,
        )
