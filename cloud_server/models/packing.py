"""A tail's output as the bytes of an answer."""

from __future__ import annotations

import time
from typing import Any

from cloud_server.models.engine import Computed, owned
from shared_hooks import Parcel
from shared_hooks.lifecycle import Lifecycle, Stage


def packed(lifecycle: Lifecycle, output: Any, **facts: Any) -> Computed:
    """What `Computed.of` makes of it; ``facts`` are its own, but for what packing takes."""
    started = time.perf_counter_ns()
    lifecycle.emit(Stage.BEFORE_ENCODE, value=output)
    parcel = Parcel.of_value(output)
    lifecycle.emit(Stage.AFTER_ENCODE, nbytes=parcel.nbytes)
    buffers = owned(parcel)
    return Computed.of(parcel.header, buffers, parcel.nbytes, encode_ns=time.perf_counter_ns() - started, **facts)
