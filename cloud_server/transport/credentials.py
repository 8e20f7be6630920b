"""Certificates, as gRPC and HTTP take them, read again for a new connection when their files have changed."""

from __future__ import annotations

import logging
import ssl
import threading
from typing import Any

import grpc

from cloud_server.access import Certificates, State, Tls, state_of
from shared_hooks.errors import SpecError

log = logging.getLogger(__name__)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Raises SpecError when the files cannot be used now."""
    files = CertificateFiles(tls)

    def changed() -> Any:
        found = files.changed()
        return None if found is None else _as_grpc(found)

    return grpc.dynamic_ssl_server_credentials(
        _as_grpc(files.first), changed, require_client_authentication=tls.client_ca is not None
    )


class CertificateFiles:
    """The files. What cannot be used later is logged, once for each change, and what was read before stays."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._state: State = state_of(tls.paths)
        self.first = self._known = tls.read()

    def changed(self) -> Certificates | None:
        """What is new since the last call, or None; asked before each handshake."""
        with self._lock:
            state = state_of(self._tls.paths)
            if state == self._state:
                return None
            self._state = state
            try:
                found = self._tls.read()
            except SpecError as error:
                log.error("%s; what was read before stays", error)
                return None
            if found == self._known:
                return None
            self._known = found
        log.info("%s was read again", self._tls.certificate)
        return found


def _as_grpc(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.chain)], root_certificates=found.client_ca)


def server_context(tls: Tls) -> ssl.SSLContext:
    """TLS for HTTP, by the same files as for gRPC. Raises SpecError when the files cannot be used now."""
    files = CertificateFiles(tls)
    outer = current = _as_ssl(tls)

    def newest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal current
        if files.changed() is not None:
            current = _as_ssl(tls)
        connection.context = current

    outer.sni_callback = newest  # asked in every handshake, whether the client names a server or not
    return outer


def _as_ssl(tls: Tls) -> ssl.SSLContext:
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
