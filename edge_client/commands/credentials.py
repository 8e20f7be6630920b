"""The options by which a command proves who it is, and says whom it trusts; they load nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_client.credentials import Credentials


def add_credentials(command: argparse.ArgumentParser) -> None:
    """The options, in a group of their own."""
    group = command.add_argument_group("who may", "for a server that asks (docs/access.md); files are PEM")
    group.add_argument("--tls", action="store_true", help="connect by TLS, trusting the authorities that gRPC brings")
    group.add_argument("--ca", metavar="FILE", help="connect by TLS, trusting the authorities in FILE instead")
    group.add_argument("--cert", metavar="FILE", help="this side's certificate, for a server that wants one")
    group.add_argument("--key", metavar="FILE", help="its private key")
    group.add_argument("--server-name", metavar="NAME", help="in the server's certificate (default: --server's host)")
    group.add_argument("--token-file", metavar="FILE", help="holds the token (default: the variable ISTHMUS_TOKEN)")
    group.add_argument("--insecure", action="store_true", help="let the token travel to other machines in the clear")


def credentials_of(options: argparse.Namespace) -> Credentials:
    """What they say. Raises SpecError for what does not go together."""
    from edge_client.credentials import Credentials  # it is more than --help needs

    return Credentials(
        tls=options.tls,
        ca=options.ca,
        certificate=options.cert,
        key=options.key,
        server_name=options.server_name,
        token_file=options.token_file,
        insecure=options.insecure,
    )
