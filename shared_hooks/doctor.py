"""Define a diagnosis's findings: ok, warning or wrong, and how to mend it; and checks that both commands share."""

from __future__ import annotations

import ctypes
import shutil
import stat
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from enum import Enum
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from shared_hooks.errors import IsthmusError
from shared_hooks.lifecycle.log import one_line
from shared_hooks.metrics.energy import Machine, find_meters
from shared_hooks.metrics.sampler import throttling
from shared_hooks.version import __version__

if TYPE_CHECKING:
    from cryptography import x509


WIDEST: Final = 120
INDENT: Final = 22


class CheckLevel(str, Enum):
    OK = "ok"
    WARNING = "warning"  # it works, but perhaps not for long, or not as well as it could
    WRONG = "wrong"  # it does not work, or is not safe


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding. ``about``: a word or two, the same on every run; ``mend``: what to do, empty if nothing."""

    level: CheckLevel
    about: str
    says: str
    mend: str = ""

    @property
    def line(self) -> str:
        return f"{self.says}. To mend: {self.mend}" if self.mend else self.says


def ok(about: str, says: str) -> Finding:
    return Finding(CheckLevel.OK, about, says)


def warning(about: str, says: str, mend: str) -> Finding:
    return Finding(CheckLevel.WARNING, about, says, mend)


def wrong(about: str, says: str, mend: str) -> Finding:
    return Finding(CheckLevel.WRONG, about, says, mend)


def contained(about: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield ``findings``; an exception becomes a finding, so that a failing check does not prevent others."""
    try:
        yield from findings
    except IsthmusError as error:
        yield wrong(about, f"{type(error).__name__}: {error}", "mend that, and look again")
    except Exception as error:
        yield wrong(about, f"looking at it failed: {type(error).__name__}: {error}", "please report it")


def report(findings: Iterable[Finding], out: TextIO | None) -> list[Finding]:
    """Collect all findings; each is written to ``out``, if given, as soon as it is found."""
    found: list[Finding] = []
    width = min(shutil.get_terminal_size().columns, WIDEST) if out is not None and out.isatty() else None
    for one in findings:
        found.append(one)
        if out is not None:
            print(_shown(one, width), file=out, flush=True)
    if out is not None:
        print(", ".join(f"{count} {level}" for level, count in counts(found).items()), file=out, flush=True)
    return found


def counts(found: Iterable[Finding]) -> dict[str, int]:
    """Count the findings of each level, the worst first."""
    levels = Counter(one.level for one in found)
    return {level.value: levels[level] for level in reversed(CheckLevel)}


def as_json(found: Iterable[Finding]) -> dict[str, Any]:
    """Return the data of ``--json``."""
    found = list(found)
    return {**counts(found), "findings": [asdict(one) for one in found]}


def _shown(one: Finding, width: int | None) -> str:
    """Format a line; on a terminal of ``width`` columns wrapped with an indent. The other side's text may hold
    anything.
    """
    text = f"{one.level.value:<8} {one.about:<12} {one_line(one.line)}"
    if width is None:
        return text
    return textwrap.fill(text, width, subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False)


# Certificates and keys in files: readable, valid, matching, signed, not expired. Needs the extra ``tls``.


SOON_DAYS: Final = 14
EXTRA: Final = 'pip install "isthmus[tls]"'


def readable(about: str, path: Path) -> Finding | None:
    """Return what prevents reading it; None if nothing."""
    try:
        path.read_bytes()
    except OSError as error:
        return wrong(about, f"{path}: {error.strerror or error}", "give the right path, and let this user read it")
    return None


def pair(about: str, certificate: Path, key: Path, *, server: bool) -> Iterator[Finding]:
    """Check one side's own certificate, intermediate ones in the same file, and its key."""
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
        yield wrong(
            about, f"{certificate}: no PEM certificate: {error}", "make certs, or ask your certificate authority"
        )
        return
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except TypeError:
        yield wrong(
            about, f"{key}: has a password, which cannot be typed when a server starts", "take it off (openssl pkey)"
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
    """Check a file of authorities, one of which has signed ``own`` if that is given."""
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
    """Check when each certificate of a file expires; one line if all is well."""
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
    """Return the names that it is for, else its subject."""
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


# This machine: versions, processor, memory, energy sensors, clock.
#
# Sources: /proc and /sys (cpufreq), adjtimex(2).


GIB: Final = 1 << 30
PACKAGES: Final = ("isthmus", "torch", "grpcio", "protobuf", "numpy")
TIME_ERROR: Final = 5
"""A state of adjtimex(2): the clock is not synchronised."""
STEADY: Final = ("performance", "schedutil", "ondemand")
OWN: Final = ("intel_pstate", "amd-pstate-epp")
"""Drivers whose "powersave" still raises the frequency with the load."""


def versions(protocol: int) -> Finding:
    """List versions of everything on which both sides must agree."""
    found = [f"{name} {_version(name)}" for name in PACKAGES]
    return ok("versions", ", ".join([*found, f"protocol {protocol}"]))


def processor(about: dict[str, Any], threads: int, root: Path = Path("/")) -> Iterator[Finding]:
    """Check the processor. ``about``: `shared_hooks.profiling.machine.describe`; ``threads``: within one operation."""
    cores, quota = about["cores_usable"] or 1, about["cpu_quota"]
    may = cores if quota is None else min(cores, quota)
    shown = f"{about['cpu'] or 'processor unknown'}, {cores} cores"
    shown += "" if quota is None else f", of whose time a control group allows {quota:g}"
    if threads > may:
        yield warning(
            "processor", f"{shown}; {threads} threads", f"--threads {max(1, int(may))}: more wait for each other"
        )
    else:
        yield ok("processor", f"{shown}; {threads} thread{'s' if threads > 1 else ''}")
    yield from _governor(root)


def _governor(root: Path) -> Iterator[Finding]:
    folders = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"))
    governors = sorted({text for folder in folders if (text := _text(folder / "scaling_governor"))})
    if not governors:
        yield ok("frequency", "the machine does not tell how it sets the processor's (a virtual one?)")
        return
    driver = _text(folders[0] / "scaling_driver")
    if set(governors) <= set(STEADY) or driver in OWN:
        yield ok("frequency", f"governor {', '.join(governors)}" + (f", driver {driver}" if driver else ""))
        return
    yield warning("frequency", f"governor {', '.join(governors)}", "cpupower frequency-set -g performance: else slow")


def memory(needed: int, what: str) -> Iterator[Finding]:
    """Check whether the machine has the bytes that ``what`` may take."""
    import psutil

    found = psutil.virtual_memory()
    has = f"{found.total / GIB:.1f} GiB, {found.available / GIB:.1f} of them free"
    if needed > found.total:
        yield warning("memory", f"{has}; {what} may take {needed / GIB:.1f} GiB", "lower them, or add memory")
    else:
        yield ok("memory", f"{has}; {what} may take {needed / GIB:.1f} GiB" if needed else has)


def sensors() -> Iterator[Finding]:
    """List energy meters: which can be read, and which cannot and why."""
    meters = find_meters()
    for meter in meters.found:
        yield ok("energy", f"{meter.name} ({meter.scope}) can be read")
    for name, why in meters.missing:
        yield warning(
            "energy", f"{name}: {why}", "docs/energy.md lists their requirements; without one, energy is unavailable"
        )
    if not meters.found and not meters.missing:
        names = ", ".join(name for name, _ in meters.absent)
        yield ok("energy", f"this machine has no sensor that is known here ({names}); energy is unavailable")


def held_back(machine: Machine | None = None) -> Iterator[Finding]:
    """Check whether heat, the power supply or a current limit slows this machine."""
    found = throttling(machine)
    hottest = (
        f"hottest: {found.hottest[0]}, {found.hottest[1]:.0f} degrees" if found.hottest else "no temperature shown"
    )
    mend = "cooling, or a stronger power supply; a profile that is made meanwhile holds for a slow machine"
    if found.now:
        yield warning("throttling", f"{', '.join(found.now)}; {hottest}", mend)
    elif happened := [reason for reason, count in found.counts.items() if count]:
        yield warning("throttling", f"not now, but since boot: {', '.join(happened)}; {hottest}", mend)
    else:
        yield ok("throttling", f"none; {hottest}")


def clock() -> Iterator[Finding]:
    """Check whether the clock is synchronised: certificates and tokens depend on it; durations do not."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))  # reads, and sets nothing
    except (OSError, AttributeError):
        state = -1
    if state == TIME_ERROR:
        yield warning(
            "clock", f"{now}; the kernel reports that it is not synchronised", "start chrony or systemd-timesyncd"
        )
    else:
        yield ok("clock", now if state < 0 else f"{now}, set by the network")


def _version(name: str) -> str:
    try:
        return __version__ if name == "isthmus" else metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
