"""What a caller shows: a token with the call, a certificate with the connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cloud_server.access.tokens import MAX_CHARACTERS, hash_of
from shared_hooks.errors import NotAuthenticated

HEADER = "authorization"
SCHEME = "bearer"
PASSPORT = "isthmus-caller"
"""What a front that this server trusts says of the caller (`cloud_server.cluster.passport`)."""


@dataclass(frozen=True)
class Credentials:
    """``token``: its hash, None without one. ``names``: of the certificate that the handshake verified; None while they
    are not known. ``passport``: as it came; whoever asks for none does not look at it.
    """

    token: bytes | None = None
    names: tuple[str, ...] | None = None
    passport: str = ""


def token_in(metadata: Iterable[tuple[str, str | bytes]]) -> bytes | None:
    """The hash of the token in a call's metadata, None without one. Raises NotAuthenticated for what is none."""
    found = [value for key, value in metadata if key == HEADER]
    if not found:
        return None
    if len(found) > 1:
        raise NotAuthenticated(f"{len(found)} authorization headers came; one is taken")
    header = found[0]
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    scheme, _, token = text.partition(" ")
    token = token.strip(" ")
    if scheme.lower() != SCHEME or not token:
        raise NotAuthenticated('the authorization header is not of the form "Bearer TOKEN"')
    if len(token) > MAX_CHARACTERS:
        raise NotAuthenticated(f"a token of {len(token)} characters; none has more than {MAX_CHARACTERS}")
    return hash_of(token)


def passport_in(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """What came as a passport, empty without one."""
    found = next((value for key, value in metadata if key == PASSPORT), "")
    return found if isinstance(found, str) else ""


def names_in(auth_context: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the peer's certificate, from what gRPC says of the connection: the alternative names where there are
    any, else the common name.
    """
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        names = [name.decode("utf-8", "replace") for name in auth_context.get(key, ())]
        if names:
            return tuple(names)
    return ()
