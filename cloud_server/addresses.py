"""Addresses to listen on: how they are written, and who reaches them."""

from __future__ import annotations

import ipaddress

from shared_hooks.errors import SpecError

DEFAULT_LISTEN = "127.0.0.1:50051"  # nobody is asked who he is by default, so other machines are let in on request only


def with_host(address: str) -> str:
    """``address``, of which a port alone is one of loopback."""
    return f"127.0.0.1:{address}" if address.isdigit() else address


def check_address(address: str, what: str = "listen") -> None:
    """Raises SpecError unless ``address`` is ``HOST:PORT`` or ``[IPV6]:PORT``."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise SpecError(f'{what}: expected HOST:PORT with a port from 0 to 65535, found "{address}"')


def check_network(listen: str, *, tokens: bool, what: str = "listen") -> None:
    """Raises SpecError for an address that other machines reach, where all is in the clear."""
    if is_loopback(listen.rpartition(":")[0]):
        return
    also = ", tokens included, which whoever reads them can use" if tokens else ", and use the models"
    raise SpecError(
        f"{what}: {listen} is open to other machines in the clear: whoever is on the way can read and change what "
        f"crosses{also}. Give a certificate and a key ([tls], or --cert and --key; `make certs` makes some for "
        "trying), listen on 127.0.0.1 behind a tunnel, or say --insecure if everybody on that network is trusted"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
