"""In the server: one line for each request that was computed, on the disk before its answer is sent."""

from __future__ import annotations

import os

from shared_hooks.lifecycle import Event


class Computed:
    """Appends ``process client request`` to a file; survives the process, however that ends."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def on_result(self, event: Event) -> None:
        if event.request is not None:
            os.write(self._file, f"{os.getpid()} {event.request.client} {event.request.id}\n".encode())
