"""Certificates, as gRPC takes them, read again for a new connection when their files have changed."""

from __future__ import annotations

import logging
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
