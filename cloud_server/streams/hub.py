"""What all streams share, as one stream sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cloud_server.access import Caller
from cloud_server.decoding import Sessions
from cloud_server.limits import Limits
from cloud_server.models import Engine
from cloud_server.requests import Request, RequestTable
from cloud_server.scheduling import Payer
from cloud_server.streams.crossings import CrossingCache
from cloud_server.streams.pace import Pace
from shared_hooks.lifecycle import Lifecycle


class Hub(Protocol):
    """What a session and its uploads ask of the server. `core.Core` is one. Any thread may call."""

    @property
    def limits(self) -> Limits: ...

    def engines_for(self, caller: Caller) -> Mapping[str, Engine]:
        """The served models that ``caller`` may use, by id."""
        ...

    @property
    def crossings(self) -> CrossingCache: ...

    @property
    def pace(self) -> Pace: ...

    @property
    def requests(self) -> RequestTable: ...

    @property
    def decoding(self) -> Sessions: ...

    @property
    def observers(self) -> frozenset[str]:
        """Observers that clients may ask for."""
        ...

    @property
    def lifecycle(self) -> Lifecycle: ...

    @property
    def draining(self) -> bool: ...

    def check_open(self) -> None:
        """Raises ServerUnavailable while draining."""
        ...

    def turned_away(self, payer: Payer) -> None:
        """A request of it was refused because there is too much to do."""
        ...

    def submit(self, request: Request) -> None:
        """The payload is complete: the request waits for a worker."""
        ...
