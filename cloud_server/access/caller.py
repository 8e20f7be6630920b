"""Who calls: made by the interceptor, once for each call, and known to all that is done for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from ipaddress import AddressValueError, IPv6Address, IPv6Network
from urllib.parse import unquote

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

    @cached_property
    def address(self) -> str:
        """The address of its machine, without the port; for IPv6 its network (64 bits): one address there stands for
        all.
        """
        return _address(self.peer)

    @cached_property
    def account(self) -> str:
        """On whom it is charged: its identity, or the address of one without. Client ids cost nothing, so they never
        count. What it asked for belongs to the same: nobody else fetches or cancels it.
        """
        return f"identity {self.identity}" if self.identity else f"address {self.address}"


@lru_cache(1024)
def _address(peer: str) -> str:
    host = peer.rpartition(":")[0] or peer
    scheme, _, rest = unquote(host).partition(":")
    try:
        found = IPv6Address(rest.strip("[]")) if scheme == "ipv6" else None
    except AddressValueError:
        found = None
    if found is None:
        return host
    if found.ipv4_mapped is not None:
        return f"ipv4:{found.ipv4_mapped}"
    # On one's own machine and link there is but one network, of all.
    if found.is_loopback or found.is_link_local:
        return f"ipv6:[{found}]"
    return f"ipv6:{IPv6Network((found.packed[:8] + bytes(8), 64))}"
