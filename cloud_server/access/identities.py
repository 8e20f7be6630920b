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

import hashlib
import hmac
import os
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date, datetime, time, timedelta, timezone
from functools import cached_property, lru_cache
from ipaddress import AddressValueError, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from cloud_server.limits import Limits
from shared_hooks.config import Table, kind_of
from shared_hooks.errors import AccessRefused, NotAuthenticated

# What one identity may do, and how much of it.


@dataclass(frozen=True)
class Policy:
    """None = whatever the server has; 0 = without a bound of its own, within the server's limits."""

    models: tuple[str, ...] | None = None
    cuts: tuple[str, ...] | None = None
    """Names of layers, "input", and "cloud-only-file"."""
    observers: tuple[str, ...] | None = None
    profile: bool = True
    probe: bool = True
    max_in_flight: int = 0
    """Requests that are received, waiting or running at a time."""
    max_bytes: int = 0
    """Payload bytes of these."""
    requests_per_minute: int = 0
    bytes_per_minute: int = 0
    """Payload bytes received."""
    weight: float = 1.0
    """Its share of the workers while others wait, too: 2 gets twice as much as 1."""
    manage: bool = False
    """Whether it may load and unload the models that it may use, and that the server's files name."""


EVERYTHING = Policy()


def granted(allowed: tuple[str, ...] | None, there: Iterable[str]) -> list[str]:
    """The models of ``there`` that a policy's list allows, sorted. A name without a version allows all its versions."""
    return sorted(one for one in there if allowed is None or one in allowed or one.partition(":")[0] in allowed)


# Tokens: long random words that prove who calls. The server's file holds their hashes only.
#
# A token has 256 random bits, so a plain SHA-256 of it can be shown around: there is nothing to guess, and nothing
# that a slow hash for passwords would add. Words that people thought up do not belong here.


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


# What a caller shows: a token with the call, a certificate with the connection.


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


# Who calls: made by the interceptor, once for each call, and known to all that is done for it.


@dataclass(frozen=True)
class Caller:
    """One who calls, with the credentials that were checked."""

    peer: str
    """As gRPC says it: ``ipv4:127.0.0.1:50000``."""
    identity: str = ""
    """The name that its credentials prove; empty where none were asked for."""
    policy: Policy = EVERYTHING

    def max_request_bytes(self, limits: Limits) -> int:
        """Payload of one of its requests: the server's limit, or what it may have of all its requests together."""
        return min(limits.max_request_bytes, self.policy.max_bytes or limits.max_request_bytes)

    def max_in_flight(self, limits: Limits) -> int:
        """Requests of one of its clients at a time."""
        return min(limits.max_in_flight, self.policy.max_in_flight or limits.max_in_flight)

    @cached_property
    def address(self) -> str:
        """The address of its machine, without the port; for IPv6 its network (64 bits): one address there stands for
        all.
        """
        return _address(self.peer)

    @cached_property
    def account(self) -> str:
        """On whom it is charged: its identity, or the address of one without. Client ids cost nothing, so they never
        count. What it asked for belongs to the same: nobody else fetches or cancels it.
        """
        return f"identity {self.identity}" if self.identity else f"address {self.address}"


@lru_cache(1024)
def _address(peer: str) -> str:
    host = peer.rpartition(":")[0] or peer
    scheme, _, rest = unquote(host).partition(":")
    try:
        found = IPv6Address(rest.strip("[]")) if scheme == "ipv6" else None
    except AddressValueError:
        found = None
    if found is None:
        return host
    if found.ipv4_mapped is not None:
        return f"ipv4:{found.ipv4_mapped}"
    # On one's own machine and link there is but one network, of all.
    if found.is_loopback or found.is_link_local:
        return f"ipv6:[{found}]"
    return f"ipv6:{IPv6Network((found.packed[:8] + bytes(8), 64))}"


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


def token_command(argv: Sequence[str]) -> int:
    """``cloud-server token NAME``: a new token in a file for the edge; prints its hash for the file of identities.
    Returns the exit status.
    """
    from cloud_server.arguments import token as token_parser

    parser = token_parser()
    options = parser.parse_args(argv)
    if not NAME.fullmatch(options.identity):
        parser.error(f"an identity's name has 1 to 128 letters, digits and ._:/@+*-, found {options.identity!r}")
    if options.days is not None and not 0 < options.days <= 36500:
        parser.error(f"--days {options.days:g}: expected more than 0, and at most 36500")
    out: Path = options.output or Path(f"{options.identity.replace('/', '_')}.token")
    token = new_token()
    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        print(f"cloud-server token: {out} is there already: remove it, or give --output another name", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cloud-server token: {out}: {error.strerror}", file=sys.stderr)
        return 1
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{token}\n")
    print(entry(options.identity, hash_of(token), options.days))
    print(f"cloud-server token: the token of {options.identity} is in {out}", file=sys.stderr)
    return 0


def entry(identity: str, sha256: bytes, days: float | None) -> str:
    """The lines for the file of identities."""
    lines = ["", "[[tokens]]", f'identity = "{identity}"', f'sha256 = "{sha256.hex()}"']
    if days is not None:
        when = datetime.now(timezone.utc) + timedelta(days)
        lines.append(f"expires = {when.strftime('%Y-%m-%dT%H:%M:%SZ')}")
    return "\n".join(lines)
