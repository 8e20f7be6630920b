"""Who is let in: the file of identities as it is now, and what certificates prove."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from cloud_server.access.identities import EVERYTHING, Caller, Credentials, Identities, read_identities
from cloud_server.access.tls import state_of, written_since
from shared_hooks.errors import NotAuthenticated, SpecError

SETTLE_SECONDS = 0.2
"""After the last change to a file, until it is read."""

log = logging.getLogger(__name__)


class Register:
    """``path``: the file of identities; ``certificates``: whether connections bring verified ones. Without both, nobody
    is asked who he is. Any thread may call. Raises SpecError when the file cannot be used.
    """

    def __init__(self, path: Path | None = None, *, certificates: bool = False) -> None:
        self.certificates = certificates
        self._path = path
        self._state = state_of(self._paths)
        self._identities = None if path is None else read_identities(path)
        self._next_expiry = 0.0

    @property
    def asks(self) -> bool:
        """Whether callers have to prove who they are."""
        return self._path is not None or self.certificates

    @property
    def _paths(self) -> Iterable[Path]:
        return [] if self._path is None else [self._path]

    def caller(self, peer: str, shown: Credentials) -> Caller:
        """Who shows these credentials. Raises AccessRefused, mostly NotAuthenticated, with the reason."""
        if not self.asks:
            return Caller(peer)
        identities = self._identities
        if identities is None:
            if not shown.names:
                raise NotAuthenticated("the certificate has no name")
            return Caller(peer, shown.names[0])
        identity = identities.prove(shown, time.time())
        return Caller(peer, identity, identities.policies.get(identity, EVERYTHING))

    def check_token(self, token: bytes | None) -> None:
        """As `caller`, before anything is known but a call's metadata: for who needs no second look."""
        if self._identities is not None:
            self._identities.prove(Credentials(token, None if self.certificates else ()), time.time())

    def refresh(self) -> bool:
        """Whether anybody may be somebody else since the last call: the file changed, or a token expired.

        What cannot be read is logged, and what was read before stays.
        """
        if self._path is None:
            return False
        state, now = state_of(self._paths), time.time()
        if state != self._state:
            if written_since(self._paths, now - SETTLE_SECONDS):
                return False  # half a file may be a valid one, which would send everybody away
            self._state = state
            try:
                self._identities = _told(self._path, read_identities(self._path))
            except SpecError as error:
                log.error("%s; what was read before stays", error)
                return False
            except Exception:  # the one who watches must not die of a file
                log.exception("%s: cannot be read; what was read before stays", self._path)
                return False
        elif now < self._next_expiry:
            return False
        assert self._identities is not None
        self._next_expiry = self._identities.next_expiry(now)
        return True


def _told(path: Path, found: Identities) -> Identities:
    log.info("%s was read again: %d identities, %d tokens", path, len(found.policies), len(found.tokens))
    return found
