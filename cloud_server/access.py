"""Callers and their permissions: authentication by tokens and certificates, and the quotas of each account.

The file of identities: their tokens, and their permissions.

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

The server's certificate and the authority behind its clients' (`Tls`) are files, checked when they are read. An
earlier server of a chain vouches for its callers if it is trusted to (`Register`).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import ssl
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date, datetime, timedelta, timezone
from datetime import time as time_of_day
from functools import cached_property, lru_cache
from ipaddress import AddressValueError, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import jwt

from cloud_server.limits import Limits
from shared_hooks.config import Table, kind_of
from shared_hooks.errors import AccessRefused, NotAuthenticated, QuotaExceeded, SpecError

# What one identity may do, and how much of it.


@dataclass(frozen=True)
class Policy:
    """What an identity may do. None: whatever the server has; 0: no limit of its own, within the server's limits."""

    models: tuple[str, ...] | None = None
    cuts: tuple[str, ...] | None = None
    """Names of layers, "input", and "cloud-only-file"."""
    observers: tuple[str, ...] | None = None
    profile: bool = True
    probe: bool = True
    max_in_flight: int = 0
    """The maximum number of concurrent requests."""
    max_bytes: int = 0
    """The payload bytes of these requests."""
    requests_per_minute: int = 0
    bytes_per_minute: int = 0
    """Payload bytes received."""
    weight: float = 1.0
    """Its share of the workers while others wait; 2 gets twice as much as 1."""
    manage: bool = False
    """Whether it may load and unload the models that it may use, and that the server's files name."""


EVERYTHING = Policy()


def granted(allowed: tuple[str, ...] | None, there: Iterable[str]) -> list[str]:
    """Return the models of ``there`` that a policy's list allows, sorted. A name without a version allows all its
    versions.
    """
    return sorted(one for one in there if allowed is None or one in allowed or one.partition(":")[0] in allowed)


# Tokens: long random strings that authenticate a caller. The server's file holds only their hashes.
#
# A token has 256 random bits, so a plain SHA-256 of it may be published: it cannot be guessed, and a slow password
# hash would add nothing. Passwords that people choose do not belong here.


PREFIX = "isthmus_"
"""By this prefix secret scanners recognise a token that was committed by mistake."""
HASH_BYTES = 32
MAX_CHARACTERS = 1024


def new_token() -> str:
    """Return a new random token."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> bytes:
    """Return the SHA-256 of a token; defined for any text that a caller sends."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


# The credentials of a caller: a token with the call, a certificate with the connection.


HEADER = "authorization"
SCHEME = "bearer"
PASSPORT = "isthmus-caller"
"""The metadata key for what a trusted front says of the caller (`cloud_server.cluster.passport`)."""


@dataclass(frozen=True)
class CallCredentials:
    """The credentials of a call. ``token``: its hash, or None. ``names``: of the verified certificate; None while they
    are not known. ``passport``: as received, and ignored unless passports are accepted.
    """

    token: bytes | None = None
    names: tuple[str, ...] | None = None
    passport: str = ""


def token_in(metadata: Iterable[tuple[str, str | bytes]]) -> bytes | None:
    """Return the hash of the token in a call's metadata, or None. Raises NotAuthenticated for a malformed one."""
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
    """Return the passport in a call's metadata, or ""."""
    found = next((value for key, value in metadata if key == PASSPORT), "")
    return found if isinstance(found, str) else ""


def names_in(auth_context: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the peer's certificate, as gRPC reports them: the alternative names, or else the
    common name.
    """
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        names = [name.decode("utf-8", "replace") for name in auth_context.get(key, ())]
        if names:
            return tuple(names)
    return ()


# The identity of a caller: made by the interceptor once per call, and passed to everything done for that call.


@dataclass(frozen=True)
class Caller:
    """An authenticated caller."""

    peer: str
    """gRPC's name, such as ``ipv4:127.0.0.1:50000``."""
    identity: str = ""
    """The name that its credentials prove; empty if none were required."""
    policy: Policy = EVERYTHING

    def max_request_bytes(self, limits: Limits) -> int:
        """Return the largest payload of one of its requests: the server's limit, or that for all its requests
        together.
        """
        return min(limits.max_request_bytes, self.policy.max_bytes or limits.max_request_bytes)

    def max_in_flight(self, limits: Limits) -> int:
        """Return the maximum number of concurrent requests of one of its clients."""
        return min(limits.max_in_flight, self.policy.max_in_flight or limits.max_in_flight)

    @cached_property
    def address(self) -> str:
        """The address of its machine, without the port; for IPv6 the network (64 bits), all of which may belong to one
        machine.
        """
        return _address(self.peer)

    @cached_property
    def account(self) -> str:
        """What it is charged as: its identity, or the address of an anonymous caller. Client ids are free to invent, so
        they do not count. Only the same account can fetch or cancel its requests.
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
    # on loopback and link-local addresses there is only one network
    if found.is_loopback or found.is_link_local:
        return f"ipv6:[{found}]"
    return f"ipv6:{IPv6Network((found.packed[:8] + bytes(8), 64))}"


MAX_TOKENS = 4096
"""Each of them is compared with every caller's token."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+*-]{0,127}")


@dataclass(frozen=True)
class Token:
    """A token of an identity. ``expires``: seconds since 1970, None: never."""

    identity: str
    sha256: bytes
    expires: float | None = None
    revoked: bool = False


@dataclass(frozen=True)
class Identities:
    """The content of a file of identities. ``policies`` includes those that are ``disabled``."""

    tokens: tuple[Token, ...] = ()
    policies: Mapping[str, Policy] = field(default_factory=dict)
    disabled: frozenset[str] = frozenset()

    def prove(self, shown: CallCredentials, now: float) -> str:
        """Return the identity that these credentials prove; "" if only the certificate can tell, and it is not known
        yet.

        Raises NotAuthenticated with the reason, AccessRefused for a disabled identity.
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
            raise NotAuthenticated(_no_credentials(shown.names))
        if any(token.identity == certified[0] for token in self.tokens):
            raise NotAuthenticated(f'no token came: identity "{certified[0]}" has one to show beside its certificate')
        return certified[0]

    def _token(self, shown: bytes, now: float) -> Token:
        """Find a token. Every hash is compared, in constant time, so that the duration reveals nothing."""
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
        """When the next token expires; infinity if none does."""
        times = [token.expires for token in self.tokens if token.expires is not None and token.expires > after]
        return min(times, default=float("inf"))


def read_identities(path: Path) -> Identities:
    """Read a file of identities. Raises SpecError with the file, the key, what was expected and found."""
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
    if len(sha256) != HASH_BYTES:  # never print the value: it may be the token itself
        table.fail("sha256", f"expected {2 * HASH_BYTES} hexadecimal digits, as cloud-server token prints them")
    return Token(identity, sha256, expires, bool(revoked))


def _time(table: Table, key: str) -> float | None:
    value = table.take_any(key)
    if value is None:
        return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    if isinstance(value, date):
        return datetime.combine(value, time_of_day(), timezone.utc).timestamp()
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


def _no_credentials(names: tuple[str, ...]) -> str:
    if not names:
        return "no token came, and no certificate with a name: this server wants one (authorization: Bearer TOKEN)"
    shown = ", ".join(f'"{name[:128]}"' for name in names[:4])
    return f"the certificate of {shown} is of no identity here, and no token came"


def token_command(argv: Sequence[str]) -> int:
    """``cloud-server token NAME``: write a new token to a file for the edge, and print its entry for the file of
    identities.

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
    """Return the lines for the file of identities."""
    lines = ["", "[[tokens]]", f'identity = "{identity}"', f'sha256 = "{sha256.hex()}"']
    if days is not None:
        when = datetime.now(timezone.utc) + timedelta(days)
        lines.append(f"expires = {when.strftime('%Y-%m-%dT%H:%M:%SZ')}")
    return "\n".join(lines)


# Files that are reloaded when they change.


_CLOCKS_DIFFER = 60.0
"""A modification time that lies further in the future comes from another clock, and is ignored."""

State = tuple[tuple[int, int, int] | None, ...]


def state_of(paths: Iterable[Path]) -> State:
    """Return the states of files, which compare equal while the files are unchanged; None for a file that does not
    exist.
    """
    return tuple(_state(path) for path in paths)


def written_since(paths: Iterable[Path], when: float) -> bool:
    """Return whether a file was written to since ``when`` (seconds since 1970), so that it may be incomplete."""
    states = (one for one in state_of(paths) if one is not None)
    return any(when < changed / 1e9 <= when + _CLOCKS_DIFFER for changed, _, _ in states)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()  # follows links, because a mounted secret is replaced by moving one
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


TRIES = 3
"""Attempts to read files of which none changes meanwhile."""


@dataclass(frozen=True)
class Certificates:
    """PEM data. ``client_ca``: None if clients need no certificate."""

    key: bytes
    chain: bytes
    client_ca: bytes | None


@dataclass(frozen=True)
class Tls:
    """The server's TLS files. ``certificate``: with the intermediate ones; ``key``: without a password; ``client_ca``:
    the authorities of clients' certificates, None if clients need no certificate.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> list[Path]:
        return [self.certificate, self.key, *([] if self.client_ca is None else [self.client_ca])]

    def read(self) -> Certificates:
        """Read the files. Raises SpecError for files that cannot be read or do not belong together."""
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
        """Check the files with OpenSSL: gRPC would only report a failed handshake."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # without this OpenSSL would prompt on the terminal
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
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


SETTLE_SECONDS = 0.2
"""How long a file must be unchanged before it is read."""

log = logging.getLogger(__name__)


# What a server of a chain vouches for to the next one about its caller: a JSON Web Token (RFC 7519), signed with a
# secret that the two share (HS256). It is made for one connection and valid for a minute.

AUDIENCE: Final = "isthmus"
PASSPORT_SECONDS: Final = 60
LEEWAY_SECONDS: Final = 30
"""The tolerated difference between the clocks of the two machines."""
MIN_SECRET_BYTES: Final = 32


def read_secret(path: Path) -> bytes:
    """Read a secret from a file, without surrounding whitespace. Raises SpecError, also for one that is too short."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise SpecError(f"{path}: a secret of {len(secret)} bytes; {MIN_SECRET_BYTES} or more are wanted, at random")
    return secret


@dataclass(frozen=True)
class Signer:
    """Signs passports as the server called ``issuer``."""

    issuer: str
    secret: bytes = field(repr=False)

    def sign(self, caller: Caller) -> str:
        """Return a passport for one connection on behalf of a caller."""
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": AUDIENCE, "sub": caller.identity, "peer": caller.peer}
        return jwt.encode({**claims, "iat": now, "exp": now + PASSPORT_SECONDS}, self.secret, "HS256")


def read_passport(passport: str, trusted: Mapping[str, bytes]) -> tuple[str, str, str]:
    """(issuer, the caller's peer, the caller's identity or "") of a passport. Raises NotAuthenticated."""
    if not trusted:
        raise NotAuthenticated("this server takes no other server's word on its callers ([trust] in its file)")
    try:
        issuer = jwt.decode(passport, options={"verify_signature": False}).get("iss")
        if not isinstance(issuer, str) or issuer not in trusted:
            raise NotAuthenticated(f'this server does not take the word of "{str(issuer)[:128]}" on its callers')
        claims = jwt.decode(
            passport,
            trusted[issuer],
            algorithms=["HS256"],
            audience=AUDIENCE,
            leeway=LEEWAY_SECONDS,
            options={"require": ["exp", "iat", "iss", "aud", "sub"]},
        )
    except (jwt.InvalidTokenError, TypeError, ValueError) as error:
        raise NotAuthenticated(f"the token that another server signed for its caller is invalid: {error}") from error
    peer, identity = claims.get("peer"), claims["sub"]
    if not isinstance(peer, str) or not isinstance(identity, str) or (identity and not NAME.fullmatch(identity)):
        raise NotAuthenticated("the token that another server signed for its caller is invalid: sub or peer is missing")
    return issuer, peer[:256], identity


class Register:
    """Authenticates callers. Thread-safe. Raises SpecError if the file cannot be used.

    ``path``: the file of identities; ``certificates``: whether connections have verified ones. Without both, callers
    need no credentials. ``trusted``: servers that may vouch for their callers, and the secret that each signs with.
    """

    def __init__(
        self, path: Path | None = None, *, certificates: bool = False, trusted: Mapping[str, bytes] | None = None
    ) -> None:
        self.certificates = certificates
        self._trusted = dict(trusted or {})
        self._path = path
        self._state = state_of(self._paths)
        self._identities = None if path is None else read_identities(path)
        self._next_expiry = 0.0

    @property
    def requires_credentials(self) -> bool:
        """Whether callers must authenticate."""
        return self._path is not None or self.certificates

    @property
    def _paths(self) -> Iterable[Path]:
        return [] if self._path is None else [self._path]

    def caller(self, peer: str, shown: CallCredentials) -> Caller:
        """Return the caller with these credentials, or that a trusted server vouches for.

        Raises AccessRefused, usually NotAuthenticated, with the reason.
        """
        if shown.passport:
            return self._vouched(shown.passport)
        if not self.requires_credentials:
            return Caller(peer)
        identities = self._identities
        if identities is None:
            if not shown.names:
                raise NotAuthenticated("the certificate has no name")
            return Caller(peer, shown.names[0])
        identity = identities.prove(shown, time.time())
        return Caller(peer, identity, identities.policies.get(identity, EVERYTHING))

    def check(self, shown: CallCredentials) -> None:
        """As `caller`, with only a call's metadata, before its certificate is known."""
        if shown.passport:
            self._vouched(shown.passport)
        elif self._identities is not None:
            self._identities.prove(CallCredentials(shown.token, None if self.certificates else ()), time.time())

    def _vouched(self, passport: str) -> Caller:
        """Return the caller that another server vouches for. Raises NotAuthenticated, and AccessRefused for a disabled
        identity.
        """
        issuer, peer, identity = read_passport(passport, self._trusted)
        known = self._identities
        if not identity and self.requires_credentials:
            raise NotAuthenticated(f"{issuer} forwards a request of {peer}, which it has not authenticated")
        if known is None or not identity:
            return Caller(peer, identity)
        if identity in known.disabled:
            raise AccessRefused(f'identity "{identity}" is disabled')
        if identity not in known.policies:
            raise NotAuthenticated(f'{issuer} asks for identity "{identity[:128]}", which is not known here')
        return Caller(peer, identity, known.policies[identity])

    def refresh(self) -> bool:
        """Read the file again if it has changed; returns whether any identity may have changed, or a token expired.

        An unreadable file is logged, and the previous content stays in use.
        """
        if self._path is None:
            return False
        state, now = state_of(self._paths), time.time()
        if state != self._state:
            if written_since(self._paths, now - SETTLE_SECONDS):
                return False  # half a file may be a valid file that refuses every caller
            self._state = state
            try:
                self._identities = _log_reloaded(self._path, read_identities(self._path))
            except SpecError as error:
                log.error("%s; what was read before stays", error)
                return False
            except Exception:  # the watching thread must survive a broken file
                log.exception("%s: cannot be read; what was read before stays", self._path)
                return False
        elif now < self._next_expiry:
            return False
        assert self._identities is not None
        self._next_expiry = self._identities.next_expiry(now)
        return True


def _log_reloaded(path: Path, found: Identities) -> Identities:
    log.info("%s was read again: %d identities, %d tokens", path, len(found.policies), len(found.tokens))
    return found


# Quotas per minute and what was used of them: an identity's requests and bytes (`Policy.requests_per_minute`,
# `bytes_per_minute`), and the bounds of every account.
#
# A quota is a token bucket: at most `BURST_SECONDS` of it are saved up, so in no minute does an identity get more
# than that beyond its quota.


BURST_SECONDS = 10.0
KEPT = 4096
"""The number of remembered accounts."""


class Bucket:
    """A token bucket: tokens per second, of which at most ``most`` are kept. Not thread-safe.

    A request larger than that is granted when the bucket is full, and paid for afterwards.
    """

    def __init__(self, per_second: float, most: float, now: float) -> None:
        self._rate = per_second
        self._most = most
        self._tokens = most
        self._at = now

    def wait(self, tokens: float, now: float) -> float:
        """Return seconds until ``tokens`` are available; 0 if they are."""
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now
        missing = min(tokens, self._most) - self._tokens
        return missing / self._rate if missing > 1e-9 else 0.0

    def take(self, tokens: float) -> None:
        self._tokens -= tokens


class Quotas:
    """The quotas of all accounts. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._used: OrderedDict[tuple[str, str, int], Bucket] = OrderedDict()

    def spend(self, caller: Caller, nbytes: int) -> None:
        """Charge one request of ``nbytes``. Raises QuotaExceeded without charging it."""
        policy = caller.policy
        wanted = [
            ("requests", policy.requests_per_minute, 1),
            ("bytes", policy.bytes_per_minute, nbytes),
        ]
        self.take(caller, [(what, quota, count) for what, quota, count in wanted if quota])

    def take(self, caller: Caller, wanted: list[tuple[str, int, int]], burst_seconds: float = BURST_SECONDS) -> None:
        """Take (what, quota per minute, amount) of all, or none. Raises QuotaExceeded with the time until more is
        available.

        ``burst_seconds``: how much is kept; always the same for one quota.
        """
        if not wanted:
            return
        with self._lock:
            now = self._clock()
            buckets = [self._bucket(caller.account, what, quota, burst_seconds, now) for what, quota, _ in wanted]
            for bucket, (what, quota, count) in zip(buckets, wanted, strict=True):
                wait = bucket.wait(count, now)
                if wait > 0:
                    error = QuotaExceeded(
                        f"{caller.account} has used up its {quota} {what} a minute; {count} more in {wait:.1f} s"
                    )
                    error.retry_after_seconds = wait
                    raise error
            for bucket, (_, _, count) in zip(buckets, wanted, strict=True):
                bucket.take(count)

    def _bucket(self, account: str, what: str, quota: int, burst_seconds: float, now: float) -> Bucket:
        """Return the bucket of a quota; a changed quota starts a new one."""
        key = account, what, quota
        found = self._used.get(key)
        if found is None:
            rate = quota / 60
            found = self._used[key] = Bucket(rate, max(1.0, rate * burst_seconds), now)
            if len(self._used) > KEPT:
                self._used.popitem(last=False)
        self._used.move_to_end(key)
        return found
