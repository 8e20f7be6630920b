"""Certificates and keys in files: readable, sound, belonging together, signed, not expired. Needs the extra ``tls``."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shared_hooks.doctor.finding import Finding, ok, warning, wrong

if TYPE_CHECKING:
    from cryptography import x509

SOON_DAYS: Final = 14
EXTRA: Final = 'pip install "isthmus[tls]"'


def readable(about: str, path: Path) -> Finding | None:
    """What is wrong with reading it; None if nothing is."""
    try:
        path.read_bytes()
    except OSError as error:
        return wrong(about, f"{path}: {error.strerror or error}", "give the right path, and let this user read it")
    return None


def pair(about: str, certificate: Path, key: Path, *, server: bool) -> Iterator[Finding]:
    """One side's own certificate, what lies between it and its authority in the same file, and its key."""
    for path in (certificate, key):
        if (finding := readable(about, path)) is not None:
            yield finding
            return
    yield from _private(about, key)
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        yield warning(about, "not looked at more closely: the package cryptography is missing", EXTRA)
        return
    try:
        chain = x509.load_pem_x509_certificates(certificate.read_bytes())
    except ValueError as error:
        yield wrong(about, f"{certificate}: no PEM certificate: {error}", "make certs, or ask who signs yours")
        return
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except TypeError:
        yield wrong(
            about, f"{key}: has a password, which nobody types when a server starts", "take it off (openssl pkey)"
        )
        return
    except ValueError as error:
        yield wrong(about, f"{key}: no PEM private key: {str(error).splitlines()[0][:80]}", "give the key's file")
        return
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if chain[0].public_key().public_bytes(*form) != private.public_key().public_bytes(*form):
        yield wrong(about, f"{certificate} and {key} do not belong together", "give the key of this certificate")
    yield from _signed(about, chain)
    yield from _purpose(about, chain[0], server)
    yield from dates(about, certificate, chain)


def authorities(about: str, path: Path, own: Path | None = None) -> Iterator[Finding]:
    """A file of authorities, one of which has signed ``own`` if that is given."""
    if (finding := readable(about, path)) is not None:
        yield finding
        return
    try:
        from cryptography import x509
    except ImportError:
        return
    try:
        known = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        yield wrong(about, f"{path}: no PEM certificate: {error}", "give the authority's certificate (ca.pem)")
        return
    yield from dates(about, path, known)
    if own is not None:
        try:
            last = x509.load_pem_x509_certificates(own.read_bytes())[-1]
        except (OSError, ValueError):
            return
        if not any(_issued(last, one) for one in known):
            yield warning(about, f"{own} is not signed by {path}", "right where the sides have different authorities")


def dates(about: str, path: Path, certificates: list[x509.Certificate]) -> Iterator[Finding]:
    """When each certificate of a file ends; one line where all is well."""
    now, soon = datetime.now(timezone.utc), []
    for one in certificates:
        name, left = named(one), (one.not_valid_after_utc - now).total_seconds() / 86400
        if one.not_valid_before_utc > now:
            begins = f"{one.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
            yield wrong(about, f"{path}: {name} is not valid before {begins}", "set this machine's clock, or wait")
        elif left < 0:
            yield wrong(about, f"{path}: {name} expired {_days(-left)} ago", "sign it again, and put it in its place")
        elif left < SOON_DAYS:
            yield warning(about, f"{path}: {name} expires in {_days(left)}", "sign it again, and put it in its place")
        else:
            soon.append((left, name))
    if len(soon) == len(certificates) and soon:
        left, name = min(soon)
        yield ok(about, f"{path}: {name}, {_days(left)} left")


def named(certificate: x509.Certificate) -> str:
    """The names that it is for, else its subject."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = [str(one.value) for one in names]
    except (x509.ExtensionNotFound, ValueError):
        found = []
    return ", ".join(found[:6]) or certificate.subject.rfc4514_string() or "without a name"


def _private(about: str, key: Path) -> Iterator[Finding]:
    mode = key.stat().st_mode
    if mode & stat.S_IRWXO:
        yield wrong(about, f"{key}: every user may read it ({mode & 0o777:o})", f"chmod 600 {key}")
    elif mode & stat.S_IWGRP:
        yield warning(about, f"{key}: its group may replace it ({mode & 0o777:o})", f"chmod 640 {key}")


def _signed(about: str, chain: list[x509.Certificate]) -> Iterator[Finding]:
    for lower, upper in pairwise(chain):
        if not _issued(lower, upper):
            says = f"the chain is broken: {named(lower)} is not signed by {named(upper)}, which follows it"
            yield wrong(about, says, "order: own certificate first, each signed by the next")


def _issued(lower: x509.Certificate, upper: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        lower.verify_directly_issued_by(upper)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _purpose(about: str, certificate: x509.Certificate, server: bool) -> Iterator[Finding]:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    wanted = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, ValueError):
        return
    if wanted not in uses:
        says = f"the certificate is not for {'servers' if server else 'clients'} (extended key usage)"
        yield wrong(about, says, f"sign one with {'serverAuth' if server else 'clientAuth'}")


def _days(days: float) -> str:
    return f"{days:.0f} days" if days >= 2 else f"{24 * days:.1f} hours"
