"""Which names a request by HTTP may call this machine.

A page of somebody else's, open in a browser on this machine, may have its own name resolve to 127.0.0.1 and then read
what is served there (DNS rebinding). Its name stands in `Host`; an address is nobody's to rebind.
"""

from __future__ import annotations

import ipaddress

FORMS = frozenset({"text/plain", "multipart/form-data", "application/x-www-form-urlencoded"})
"""Content types that any page may send anywhere without asking first."""


def is_own(host: str, listened: str) -> bool:
    """Whether a `Host` header names this machine: localhost, what is listened on, or an address (of loopback, where
    that alone is listened on).
    """
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("localhost", listened.lower()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not is_loopback(listened)


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def why_not(host: str | None, reached: str, origin: str | None, kind: str) -> str:
    """Why a request is not answered; empty where it is. ``reached``: the address of this machine at which it came;
    ``kind``: of its body. Who comes from another machine may call this one as it likes.
    """
    if host is not None and is_loopback(reached) and not is_own(host, reached):
        return f"the host {host[:100]!r} is not this machine: ask by its address, or localhost"
    if origin is not None and (host is None or origin.partition("://")[2] != host):
        return "another origin's page may not ask here"
    if kind.partition(";")[0].strip().lower() in FORMS:
        return "a request's body is application/json, or application/octet-stream: say so in Content-Type"
    return ""
