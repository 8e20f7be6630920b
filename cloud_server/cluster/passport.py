"""What a front tells a replica of a caller, beside each call: the front has looked at credentials, and the replica
believes who knows its secret. The secret is the replica's own, and fronts learn it where they learn its address.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from cloud_server.access import Caller, Credentials, Policy, Register
from cloud_server.access.credentials import HEADER, PASSPORT, SCHEME
from cloud_server.access.tokens import hash_of
from shared_hooks.errors import NotAuthenticated

MAX_CHARACTERS = 6000
"""Most characters of a passport: gRPC takes 8 KiB of metadata."""


def stamp(caller: Caller, secret: str) -> list[tuple[str, str]]:
    """The metadata of a call that is handed on for ``caller``. Raises NotAuthenticated for one of too many words."""
    text = json.dumps({"peer": caller.peer, "identity": caller.identity, **_changed(caller.policy)})
    if len(text) > MAX_CHARACTERS:
        raise NotAuthenticated(
            f'identity "{caller.identity}": its lists of models, cuts and observers take {len(text)} characters; '
            f"behind Ray Serve at most {MAX_CHARACTERS} do"
        )
    return [(HEADER, f"{SCHEME} {secret}"), (PASSPORT, text)]


def _changed(policy: Policy) -> dict[str, object]:
    """What differs from what everybody may."""
    return {
        each.name: getattr(policy, each.name)
        for each in dataclasses.fields(Policy)
        if getattr(policy, each.name) != each.default
    }


class Passports(Register):
    """Who is let in to a replica: fronts, for whom they say."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._hash = hash_of(secret)

    @property
    def asks(self) -> bool:
        return True

    def check_token(self, token: bytes | None) -> None:
        if token != self._hash:  # two hashes: how long that takes tells nothing
            raise NotAuthenticated("this is a replica's private port: clients connect to the front")

    def caller(self, peer: str, shown: Credentials) -> Caller:
        """Whom the front speaks for. Raises NotAuthenticated."""
        self.check_token(shown.token)
        try:
            said: dict[str, Any] = json.loads(shown.passport)
            said |= {name: tuple(said[name]) for name in ("models", "cuts", "observers") if name in said}
            return Caller(said.pop("peer"), said.pop("identity"), Policy(**said))
        except (ValueError, KeyError, TypeError) as error:
            raise NotAuthenticated(f"not a passport: {error}") from error
