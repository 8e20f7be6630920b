"""The server's certificate, and the authority behind its clients': files, checked when they are read."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared_hooks.errors import SpecError

# Files that are read again when they change.


_CLOCKS_DIFFER = 60.0
"""A time of change that lies further ahead is of another clock, and says nothing."""

State = tuple[tuple[int, int, int] | None, ...]


def state_of(paths: Iterable[Path]) -> State:
    """Compares equal while nobody touched the files; None stands for one that is not there."""
    return tuple(_state(path) for path in paths)


def written_since(paths: Iterable[Path], when: float) -> bool:
    """Whether any of them was written to since then (seconds since 1970): somebody may be in the middle of it."""
    states = (one for one in state_of(paths) if one is not None)
    return any(when < changed / 1e9 <= when + _CLOCKS_DIFFER for changed, _, _ in states)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()  # behind links, too: a mounted secret is replaced by moving one
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


TRIES = 3
"""To read files of which none changes meanwhile."""


@dataclass(frozen=True)
class Certificates:
    """PEM. ``client_ca``: None = clients need no certificate."""

    key: bytes
    chain: bytes
    client_ca: bytes | None


@dataclass(frozen=True)
class Tls:
    """``certificate``: the server's, with those between it and the authority behind it; ``key``: its private key,
    without a password; ``client_ca``: of the authorities whose clients are let in, None = clients need no certificate.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> list[Path]:
        return [self.certificate, self.key, *([] if self.client_ca is None else [self.client_ca])]

    def read(self) -> Certificates:
        """What the files hold now. Raises SpecError for files that cannot be read or do not belong together."""
        for _ in range(TRIES):
            before = state_of(self.paths)
            found = Certificates(
                _read(self.key), _read(self.certificate), None if self.client_ca is None else _read(self.client_ca)
            )
            try:
                self._check(found)
            except SpecError:
                if state_of(self.paths) == before:
                    raise
                continue
            if state_of(self.paths) == before:
                return found
        raise SpecError(f"tls: {self.certificate} and its key change while they are read")

    def _check(self, found: Certificates) -> None:
        """By OpenSSL, so that what gRPC would only call a failed handshake has a name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")  # else it would ask the terminal
        except (OSError, ValueError) as error:
            reason = f"{getattr(error, 'reason', None) or error}"
            text = _REASONS.get(reason, reason)
            raise SpecError(f"tls: {self.certificate} and {self.key} cannot be used: {text}") from error
        if found.client_ca is None:
            return
        try:
            context.load_verify_locations(cadata=found.client_ca.decode("ascii", "replace"))
            if not context.get_ca_certs():
                raise ValueError("it holds no certificate of an authority")
        except (OSError, ValueError) as error:
            reason = f"{getattr(error, 'reason', None) or error}"
            raise SpecError(f"tls.client_ca: {self.client_ca} cannot be used: {reason}") from error


_REASONS = {
    "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
    "BAD_DECRYPT": "the key has a password; take it off, and keep the file to yourself (chmod 600)",
    "BAD_PASSWORD_READ": "the key has a password; take it off, and keep the file to yourself (chmod 600)",
    "PEM_LIB": "one of them is not PEM",
    "NO_START_LINE": "one of them is not PEM",
}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"tls: {path}: cannot be read: {error.strerror or error}") from error
