"""Who is let in: the file of identities as it is now, what certificates prove, and what servers before this one in a
chain say of their callers; and how much of its quotas each account has used.

The server's certificate and the authority behind its clients' (`Tls`) are files, checked when they are read.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import jwt

from cloud_server.access.identities import EVERYTHING, NAME, Caller, Credentials, Identities, read_identities
from shared_hooks.errors import AccessRefused, NotAuthenticated, QuotaExceeded, SpecError

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


SETTLE_SECONDS = 0.2
"""After the last change to a file, until it is read."""

log = logging.getLogger(__name__)


# What a server of a chain says to the next one of its caller: a JSON Web Token (RFC 7519), signed with a secret that
# the two share (HS256). It is made for one connection and good for a minute.

AUDIENCE: Final = "isthmus"
PASSPORT_SECONDS: Final = 60
LEEWAY_SECONDS: Final = 30
"""By which the clocks of the two may differ."""
MIN_SECRET_BYTES: Final = 32


def read_secret(path: Path) -> bytes:
    """A secret in a file, without the spaces around it. Raises SpecError, also for one that can be guessed."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise SpecError(f"{path}: a secret of {len(secret)} bytes; {MIN_SECRET_BYTES} or more are wanted, at random")
    return secret


@dataclass(frozen=True)
class Signer:
    """Says, as the server called ``issuer``, for whom it asks."""

    issuer: str
    secret: bytes = field(repr=False)

    def sign(self, caller: Caller) -> str:
        """For one connection."""
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": AUDIENCE, "sub": caller.identity, "peer": caller.peer}
        return jwt.encode({**claims, "iat": now, "exp": now + PASSPORT_SECONDS}, self.secret, "HS256")


def read_passport(passport: str, trusted: Mapping[str, bytes]) -> tuple[str, str, str]:
    """(who signed it, the caller's peer, the caller's identity or ""). Raises NotAuthenticated."""
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
    """``path``: the file of identities; ``certificates``: whether connections bring verified ones. Without both, nobody
    is asked who he is. ``trusted``: servers whose word on their callers is taken, and the secret that each signs it
    with. Any thread may call. Raises SpecError when the file cannot be used.
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
    def asks(self) -> bool:
        """Whether callers have to prove who they are."""
        return self._path is not None or self.certificates

    @property
    def _paths(self) -> Iterable[Path]:
        return [] if self._path is None else [self._path]

    def caller(self, peer: str, shown: Credentials) -> Caller:
        """Who shows these credentials, or for whom a trusted server asks. Raises AccessRefused, mostly
        NotAuthenticated, with the reason.
        """
        if shown.passport:
            return self._vouched(shown.passport)
        if not self.asks:
            return Caller(peer)
        identities = self._identities
        if identities is None:
            if not shown.names:
                raise NotAuthenticated("the certificate has no name")
            return Caller(peer, shown.names[0])
        identity = identities.prove(shown, time.time())
        return Caller(peer, identity, identities.policies.get(identity, EVERYTHING))

    def check(self, shown: Credentials) -> None:
        """As `caller`, before anything is known but a call's metadata: for who needs no second look."""
        if shown.passport:
            self._vouched(shown.passport)
        elif self._identities is not None:
            self._identities.prove(Credentials(shown.token, None if self.certificates else ()), time.time())

    def _vouched(self, passport: str) -> Caller:
        """For whom another server asks. Raises NotAuthenticated, and AccessRefused for one who is disabled."""
        issuer, peer, identity = read_passport(passport, self._trusted)
        known = self._identities
        if not identity and self.asks:
            raise NotAuthenticated(f"{issuer} asks for somebody at {peer} who has proven no identity to it")
        if known is None or not identity:
            return Caller(peer, identity)
        if identity in known.disabled:
            raise AccessRefused(f'identity "{identity}" is disabled')
        if identity not in known.policies:
            raise NotAuthenticated(f'{issuer} asks for identity "{identity[:128]}", which is not known here')
        return Caller(peer, identity, known.policies[identity])

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


# What one may use in a minute, and what it has used: an identity's requests and bytes (`Policy.requests_per_minute`,
# `bytes_per_minute`), and what is bounded for every account.
#
# A quota fills up evenly (a token bucket): what is saved up is at most `BURST_SECONDS` of it, so in no minute does an
# identity get more than that beyond its quota.


BURST_SECONDS = 10.0
KEPT = 4096
"""Accounts that are remembered."""


class Bucket:
    """So many tokens a second, of which ``most`` are kept. What is larger than all that it keeps is taken when it is
    full, and paid for afterwards. One thread at a time.
    """

    def __init__(self, per_second: float, most: float, now: float) -> None:
        self._rate = per_second
        self._most = most
        self._tokens = most
        self._at = now

    def wait(self, tokens: float, now: float) -> float:
        """Seconds until ``tokens`` are available; 0: they are now."""
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now
        missing = min(tokens, self._most) - self._tokens
        return missing / self._rate if missing > 1e-9 else 0.0

    def take(self, tokens: float) -> None:
        self._tokens -= tokens


class Quotas:
    """The quotas of all accounts. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._used: OrderedDict[tuple[str, str, int], Bucket] = OrderedDict()

    def spend(self, caller: Caller, nbytes: int) -> None:
        """Charges one request of ``nbytes``. Raises QuotaExceeded without charging it."""
        policy = caller.policy
        wanted = [
            ("requests", policy.requests_per_minute, 1),
            ("bytes", policy.bytes_per_minute, nbytes),
        ]
        self.take(caller, [(what, quota, count) for what, quota, count in wanted if quota])

    def take(self, caller: Caller, wanted: list[tuple[str, int, int]], burst_seconds: float = BURST_SECONDS) -> None:
        """(what, how many a minute, how many of it now), all or nothing. Raises QuotaExceeded, which says when there is
        more. ``burst_seconds``: how much is saved up; always the same for one thing.
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
        """A changed quota begins with a bucket of its own."""
        key = account, what, quota
        found = self._used.get(key)
        if found is None:
            rate = quota / 60
            found = self._used[key] = Bucket(rate, max(1.0, rate * burst_seconds), now)
            if len(self._used) > KEPT:
                self._used.popitem(last=False)
        self._used.move_to_end(key)
        return found
