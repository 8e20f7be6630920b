"""The certificates and token that this side presents to a server, and what it requires of the server's.

Does not load torch (see `dial`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edge_client.user_text import either
from shared_hooks.showing import short

if TYPE_CHECKING:
    from shared_hooks.errors import SpecError

TOKEN: Final = "ISTHMUS_TOKEN"
"""The environment variable with the token, unless it is given otherwise."""


@short
@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials for connections. Files are PEM, and read again for every connection. Raises SpecError for
    contradictions.

    The connection is encrypted with ``tls``, or with any of the four fields after it.
    """

    tls: bool = False
    """Encrypt; the server's certificate must be signed by an authority that gRPC knows, unless ``ca`` is given."""
    ca: str | Path | None = None
    """Certificates of the authorities for the server's certificate."""
    certificate: str | Path | None = None
    """This side's certificate, for a server that requires one; with ``key``."""
    key: str | Path | None = None
    server_name: str | None = None
    """The name in the server's certificate; None: the host that is connected to."""
    token: str | None = field(default=None, repr=False)
    token_file: str | Path | None = None
    """The file with the token; without both, the environment variable ISTHMUS_TOKEN."""
    insecure: bool = False
    """Whether the token may be sent unencrypted to another machine, where any reader can use it."""
    passport: Callable[[], str] | None = field(default=None, repr=False)
    """Returns what a server of a chain says of its caller, for each connection (`cloud_server.chain`)."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise _wrong("credentials: a certificate needs its key, and a key its certificate")
        if self.token is not None and self.token_file is not None:
            raise _wrong("credentials: a token and a file of one; one of them is enough")

    @property
    def encrypted(self) -> bool:
        """Whether connections use TLS."""
        return self.tls or any(one is not None for one in (self.ca, self.certificate, self.server_name))

    def read_token(self) -> str | None:
        """Return the current token, or None. Raises SpecError, which never shows it."""
        if self.token_file is not None:
            token, where = read(self.token_file).decode("utf-8", "replace").strip(), f"{self.token_file}"
        elif self.token is not None:
            token, where = self.token.strip(), "credentials: token"
        else:
            token, where = os.environ.get(TOKEN, "").strip(), TOKEN
            if not token:
                return None
        if not token or not (token.isascii() and token.isprintable()) or " " in token:
            raise _wrong(f"{where}: one word of ASCII characters is expected, as cloud-server token makes it")
        return token

    def with_passport(self, passport: Callable[[], str]) -> Credentials:
        """Return a copy with ``passport``."""
        return replace(self, passport=passport)

    def check_clear(self, server: str) -> None:
        """Raise SpecError if a token would be sent unencrypted to another machine."""
        if not self.insecure and (self.passport is not None or self.read_token() is not None):
            raise _wrong(
                f"the token would travel to {server} in the clear, where any reader can use it: connect by TLS "
                f"({either('--tls, or --ca FILE', 'tls=True, or ca=FILE')}), or say "
                f"{either('--insecure', 'insecure=True')} if every machine on that network is trusted"
            )


def read(path: str | Path) -> bytes:
    """Return a file's content. Raises SpecError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _wrong(f"{path}: cannot be read: {error.strerror or error}") from error


def _wrong(text: str) -> SpecError:
    from shared_hooks.errors import SpecError  # imports torch

    return SpecError(text)
