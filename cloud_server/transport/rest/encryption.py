"""TLS for HTTP, by the same files as for gRPC, read again for a new connection when they have changed."""

from __future__ import annotations

import ssl

from cloud_server.access import Tls
from cloud_server.transport.credentials import CertificateFiles


def server_context(tls: Tls) -> ssl.SSLContext:
    """Raises SpecError when the files cannot be used now."""
    files = CertificateFiles(tls)
    outer = current = _made(tls)

    def newest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal current
        if files.changed() is not None:
            current = _made(tls)
        connection.context = current

    outer.sni_callback = newest  # asked in every handshake, whether the client names a server or not
    return outer


def _made(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # No tickets: with one a client would come back without the handshake in which its authority is looked for.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    if tls.client_ca is not None:
        context.minimum_version = ssl.TLSVersion.TLSv1_3  # TLS 1.2 has sessions without tickets, too
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=str(tls.client_ca))
    return context
