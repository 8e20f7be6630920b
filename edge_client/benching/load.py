"""The instructions of one run's generators: the server, the model, the clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_client.call import Call
from edge_client.credentials import Credentials
from edge_client.model_choice import ModelChoice
from edge_client.transport import ConnectionOptions


@dataclass(frozen=True)
class Load:
    """``codecs``: one for each client. ``give_up``: seconds after which a request is lost. ``exact``: else the server
    may compute requests as rows of a batch.
    """

    server: str
    choice: ModelChoice
    cuts: Sequence[str]
    codecs: Sequence[str]
    calls: Sequence[Call]
    give_up: float
    in_flight: int
    patience: float
    exact: bool = True
    credentials: Credentials = field(default_factory=Credentials)

    def connection(self) -> ConnectionOptions:
        """One client's connection."""
        return ConnectionOptions(patience=self.patience, max_in_flight=self.in_flight, credentials=self.credentials)
