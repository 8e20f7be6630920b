"""Tokens: long random words that prove who calls. The server's file holds their hashes only.

A token has 256 random bits, so a plain SHA-256 of it can be shown around: there is nothing to guess, and nothing that a
slow hash for passwords would add. Words that people thought up do not belong here.
"""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "isthmus_"
"""By which scanners for secrets find one that was committed by mistake."""
HASH_BYTES = 32
MAX_CHARACTERS = 1024


def new_token() -> str:
    """A token that nobody has seen."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> bytes:
    """SHA-256 of a token's characters; any text has one, whatever a stranger sends."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
