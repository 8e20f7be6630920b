"""Who calls: made at the door, once for each call, and known to all that is done for it."""

from __future__ import annotations

from dataclasses import dataclass

from cloud_server.access.policy import EVERYTHING, Policy
from cloud_server.limits import Limits


@dataclass(frozen=True)
class Caller:
    """One who calls, with the credentials that were checked."""

    peer: str
    """As gRPC says it: ``ipv4:127.0.0.1:50000``."""
    identity: str = ""
    """The name that its credentials prove; empty where none were asked for."""
    policy: Policy = EVERYTHING

    def max_request_bytes(self, limits: Limits) -> int:
        """Payload of one of its requests: the server's limit, or what it may have of all its requests together."""
        return min(limits.max_request_bytes, self.policy.max_bytes or limits.max_request_bytes)

    def max_in_flight(self, limits: Limits) -> int:
        """Requests of one of its clients at a time."""
        return min(limits.max_in_flight, self.policy.max_in_flight or limits.max_in_flight)

    @property
    def address(self) -> str:
        """Of its machine, without the port."""
        return self.peer.rpartition(":")[0] or self.peer

    @property
    def account(self) -> str:
        """On whom it is charged: its identity, or the address of one without. Client ids cost nothing, so they never
        count. What it asked for belongs to the same: nobody else fetches or cancels it.
        """
        return f"identity {self.identity}" if self.identity else f"address {self.address}"
