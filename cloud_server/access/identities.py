"""The file of identities: which tokens prove them, and what each may do.

[[tokens]]                           # as `cloud-server token edge-1` prints it; as many as wanted, also of one identity
identity = "edge-1"
sha256 = "<64 hexadecimal digits>"
expires = 2027-01-31                 # a date or a time, UTC unless it says otherwise; absent: never
revoked = false                      # true: refused by name. Without its entry a token is unknown

[identities.edge-1]                  # absent: everything that the server has
disabled = false                     # true: refused, by token and by certificate
models = ["digits"]                  # names of models, cuts and observers; absent: all
cuts = ["stage2.0.conv2", "input"]   # and "cloud-only-file"
observers = []
profile = false                      # may ask for profiles; absent: true
probe = true                         # may measure the link; absent: true
max_in_flight = 8                    # absent, or 0: no bound but the server's
max_bytes = 100000000
requests_per_minute = 600
bytes_per_minute = 1000000000
weight = 1.0                         # its share where several wait
manage = true                        # may load and unload models (docs/operations.md); absent: false

An identity that has tokens proves itself by one of them; one without, by a certificate with its name.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import date, datetime, time, timezone
from pathlib import Path
from typing import Any

from cloud_server.access.credentials import Credentials
from cloud_server.access.policy import Policy
from cloud_server.access.tokens import HASH_BYTES
from shared_hooks.config import Table, kind_of
from shared_hooks.errors import AccessRefused, NotAuthenticated

MAX_TOKENS = 4096
"""Each of them is compared with every caller's."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+*-]{0,127}")


@dataclass(frozen=True)
class Token:
    """One way to prove an identity. ``expires``: seconds since 1970, None = never."""

    identity: str
    sha256: bytes
    expires: float | None = None
    revoked: bool = False


@dataclass(frozen=True)
class Identities:
    """What a file says. ``policies`` also has those that are ``disabled``."""

    tokens: tuple[Token, ...] = ()
    policies: Mapping[str, Policy] = field(default_factory=dict)
    disabled: frozenset[str] = frozenset()

    def prove(self, shown: Credentials, now: float) -> str:
        """The identity that these credentials prove; "" where only the certificate can tell, and is not known yet.

        Raises NotAuthenticated saying why they do not hold, AccessRefused for an identity that is disabled.
        """
        token = None if shown.token is None else self._token(shown.token, now)
        certified = [name for name in shown.names or () if name in self.policies]
        identities = {*certified, *([] if token is None else [token.identity])}
        for identity in sorted(identities):
            if identity in self.disabled:
                raise AccessRefused(f'identity "{identity}" is disabled')
        if len(identities) > 1:
            both = ", ".join(f'"{name}"' for name in sorted(identities))
            raise NotAuthenticated(f"token and certificate are of several identities: {both}")
        if token is not None:
            return token.identity
        if shown.names is None:
            return ""
        if not certified:
            raise NotAuthenticated(_nobody(shown.names))
        if any(token.identity == certified[0] for token in self.tokens):
            raise NotAuthenticated(f'no token came: identity "{certified[0]}" has one to show beside its certificate')
        return certified[0]

    def _token(self, shown: bytes, now: float) -> Token:
        """Every hash is compared, and in constant time, so that no answer comes sooner than another."""
        found: Token | None = None
        for token in self.tokens:
            if hmac.compare_digest(token.sha256, shown):
                found = token
        if found is None:
            raise NotAuthenticated("the token is not known here")
        if found.revoked:
            raise NotAuthenticated(f'this token of "{found.identity}" was revoked')
        if found.expires is not None and found.expires <= now:
            when = datetime.fromtimestamp(found.expires, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
            raise NotAuthenticated(f'this token of "{found.identity}" expired at {when}')
        return found

    def next_expiry(self, after: float) -> float:
        """When the next token expires (infinity: none does)."""
        times = [token.expires for token in self.tokens if token.expires is not None and token.expires > after]
        return min(times, default=float("inf"))


def read_identities(path: Path) -> Identities:
    """The file's content. Raises SpecError with the file, the key, what was expected and found."""
    table = Table.read(path)
    entries = table.take("tokens", list) or []
    identities = table.table("identities")
    table.done()
    if len(entries) > MAX_TOKENS:
        table.fail("tokens", f"{len(entries)} of them; at most {MAX_TOKENS} are taken")
    tokens: dict[bytes, Token] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            table.fail("tokens", f"expected tables ([[tokens]]), found {kind_of(entry)}")
        token = _token(Table(entry, table.origin, f"tokens[{number}]"))
        if token.sha256 in tokens:
            table.fail(f"tokens[{number}].sha256", "the same hash as of an earlier token")
        tokens[token.sha256] = token
    policies: dict[str, Policy] = {}
    disabled: set[str] = set()
    for name, values in ({} if identities is None else identities.rest()).items():
        if not isinstance(values, dict):
            table.fail(f"identities.{name}", f"expected a table, found {kind_of(values)}")
        inner = Table(values, table.origin, f"identities.{name}")
        _check_name(inner, "name", name)
        if inner.take("disabled", bool):
            disabled.add(name)
        policies[name] = _policy(inner)
    for token in tokens.values():
        policies.setdefault(token.identity, Policy())
    return Identities(tuple(tokens.values()), policies, frozenset(disabled))


def _token(table: Table) -> Token:
    identity, digits = table.need("identity", str), table.need("sha256", str)
    expires, revoked = _time(table, "expires"), table.take("revoked", bool)
    table.done()
    _check_name(table, "identity", identity)
    try:
        sha256 = bytes.fromhex(digits)
    except ValueError:
        sha256 = b""
    if len(sha256) != HASH_BYTES:  # and never the value: it may be the token itself
        table.fail("sha256", f"expected {2 * HASH_BYTES} hexadecimal digits, as cloud-server token prints them")
    return Token(identity, sha256, expires, bool(revoked))


def _time(table: Table, key: str) -> float | None:
    value = table.take_any(key)
    if value is None:
        return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    if isinstance(value, date):
        return datetime.combine(value, time(), timezone.utc).timestamp()
    table.fail(key, f"expected a date or a time without quotes, found {kind_of(value)}")


def _policy(table: Table) -> Policy:
    values: dict[str, Any] = {}
    for each in fields(Policy):
        if each.name in ("models", "cuts", "observers"):
            names = table.take_list(each.name, str, "a list of names")
            values[each.name] = None if names is None else tuple(names)
            continue
        kind: type[Any] = type(each.default)
        values[each.name] = value = table.take(each.name, kind)
        if value is not None and value < 0:
            table.fail(each.name, f"expected at least 0, found {value}")
    table.done()
    if values["weight"] is not None and not 0 < values["weight"] < float("inf"):
        table.fail("weight", f"expected a number above 0, found {values['weight']}")
    return Policy(**{name: value for name, value in values.items() if value is not None})


def _check_name(table: Table, key: str, name: str) -> None:
    if not NAME.fullmatch(name):
        table.fail(key, f"an identity's name has 1 to 128 letters, digits and ._:/@+*-, found {name[:140]!r}")


def _nobody(names: tuple[str, ...]) -> str:
    if not names:
        return "no token came, and no certificate with a name: this server wants one (authorization: Bearer TOKEN)"
    shown = ", ".join(f'"{name[:128]}"' for name in names[:4])
    return f"the certificate of {shown} is of no identity here, and no token came"
