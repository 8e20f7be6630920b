"""What a front reports to a replica about a caller, with each call: the front has checked credentials, and the replica
trusts those that have its secret. Each replica has its own, which fronts receive with its address.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final

import grpc

from cloud_server.access import (
    HEADER,
    PASSPORT,
    SCHEME,
    CallCredentials,
    Caller,
    Policy,
    Register,
    Tls,
    hash_of,
    read_identities,
)
from cloud_server.cluster.census import ReplicaPlace
from cloud_server.config import ServerConfig
from cloud_server.limits import NEVER
from shared_hooks.errors import AccessRefused, NotAuthenticated, SpecError

MAX_CHARACTERS = 6000
"""Most characters of a passport: gRPC accepts 8 KiB of metadata."""


def stamp(caller: Caller, secret: str) -> list[tuple[str, str]]:
    """Return the metadata of a call that is passed on for ``caller``. Raises NotAuthenticated if it is too long."""
    text = json.dumps({"peer": caller.peer, "identity": caller.identity, **_changed(caller.policy)})
    if len(text) > MAX_CHARACTERS:
        raise NotAuthenticated(
            f'identity "{caller.identity}": its lists of models, cuts and observers take {len(text)} characters; '
            f"behind Ray Serve at most {MAX_CHARACTERS} do"
        )
    return [(HEADER, f"{SCHEME} {secret}"), (PASSPORT, text)]


def _changed(policy: Policy) -> dict[str, object]:
    """Return the fields that differ from the default policy."""
    return {
        each.name: getattr(policy, each.name)
        for each in dataclasses.fields(Policy)
        if getattr(policy, each.name) != each.default
    }


class Passports(Register):
    """The register of a replica, which authenticates fronts and believes what they say of callers."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._hash = hash_of(secret)

    @property
    def requires_credentials(self) -> bool:
        return True

    def check(self, shown: CallCredentials) -> None:
        if shown.token != self._hash:  # comparing two hashes: the time it takes reveals nothing
            raise NotAuthenticated("this is a replica's private port: clients connect to the front")

    def caller(self, peer: str, shown: CallCredentials) -> Caller:
        """Return the caller that the front names. Raises NotAuthenticated."""
        self.check(shown)
        try:
            reported: dict[str, Any] = json.loads(shown.passport)
            reported |= {name: tuple(reported[name]) for name in ("models", "cuts", "observers") if name in reported}
            return Caller(reported.pop("peer"), reported.pop("identity"), Policy(**reported))
        except (ValueError, KeyError, TypeError) as error:
            raise NotAuthenticated(f"not a passport: {error}") from error


# Options that work on one machine and not behind Ray Serve: refused by name before anything is started.


COUNTED = ("max_in_flight", "max_bytes", "requests_per_minute", "bytes_per_minute")
"""Limits of an identity that must be counted in one place."""


def check(config: ServerConfig) -> None:
    """Raise SpecError that names everything that is not supported."""
    found = list(refused(config))
    if found:
        raise SpecError("--on ray: " + "; ".join(found))


def refused(config: ServerConfig) -> Iterator[str]:
    """Yield one text for each setting that is not supported, with an alternative."""
    if config.worker_processes:
        yield "worker_processes: every replica is a process already; say how many with --replicas"
    if config.reuse_port:
        yield "reuse_port: an update is Ray Serve's, which drains replicas (docs/ray.md); leave it out"
    if config.rest:
        yield "rest: fronts speak gRPC alone, where they hand on this protocol, too (docs/ray.md); leave it out"
    if config.limits.max_model_bytes != NEVER:
        yield "limits.max_model_bytes: each replica has one model, which stays; say how many with --replicas"
    for name in ("max_worker_bytes", "max_worker_requests"):
        if getattr(config.limits, name) != NEVER:
            yield f"limits.{name}: there are no worker processes; Ray Serve replaces replicas that end"
    if config.device.startswith("cuda") and not config.scale.gpus:
        yield f"device {config.device}: Ray hides GPUs from a replica that asks for none; say gpus = 1 in [ray]"
    if config.next or config.trusted:
        yield "next, trust: chains run on servers of one machine each; leave them out"
    if config.scale.fronts > 1 and config.listen.endswith(":0"):
        yield "listen: several fronts share one port, so port 0 (any free one) cannot be had"
    if config.metrics.endswith(":0") and config.scale.fronts > 1:
        yield "metrics: port 0 (any free one) cannot be found by a scraper of several fronts"
    if config.identities is not None and len(config.models) > 1:
        yield from (
            f"identities: {name} has {bound}, and {several(config)}" for name, bound in bounds(config.identities)
        )


def several(config: ServerConfig) -> str:
    """Return why no identity may have a limit that must be counted."""
    return (
        f"{len(config.models)} models are served: each model's replicas count for themselves; serve one model to an "
        "application, or leave the bound out"
    )


def bounds(path: Path) -> Iterator[tuple[str, str]]:
    """(identity, its counted limit) of those that have one."""
    for name, policy in read_identities(path).policies.items():
        if bound := counted(policy):
            yield name, bound


def counted(policy: Policy) -> str:
    """Return the first limit that must be counted; empty if there is none."""
    return next((name for name in COUNTED if getattr(policy, name)), "")


class Uncounted(Register):
    """The register of a front of several models, which cannot count: an identity with a counted limit is refused."""

    def __init__(self, config: ServerConfig, *, certificates: bool) -> None:
        super().__init__(config.identities, certificates=certificates)
        self._why = several(config) if len(config.models) > 1 else ""

    def caller(self, peer: str, shown: CallCredentials) -> Caller:
        """As `Register.caller`."""
        found = super().caller(peer, shown)
        if self._why and (bound := counted(found.policy)):
            raise AccessRefused(f'identity "{found.identity}" has {bound}, and {self._why}')
        return found


# The channel between fronts and replicas. Each replica makes a key and a certificate when it starts; Ray gives fronts
# the certificate together with the address, so fronts can authenticate replicas. On loopback everything is
# unencrypted.


NAME: Final = "replica.isthmus"
"""The name in each certificate, because addresses change."""
YEARS: Final = 20


def make(folder: Path) -> Tls:
    """Create a key and its certificate in files of ``folder``."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    made = Tls(folder / "replica.pem", folder / "replica.key", None)
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.touch(0o600)
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


@contextmanager
def private_folder() -> Iterator[Path]:
    """A temporary folder for `make` that only this user can read."""
    with tempfile.TemporaryDirectory(prefix="isthmus-replica-") as folder:
        yield Path(folder)


def channel(place: ReplicaPlace) -> grpc.Channel:
    """Return a channel to a replica, with a connection for every stream, so that none waits behind another."""
    options: list[tuple[str, int | str]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # A replica whose machine is gone sends nothing: keep-alive lets its clients notice and reconnect.
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if not place.certificate:
        return grpc.insecure_channel(place.address, options)
    known = grpc.ssl_channel_credentials(place.certificate.encode())
    return grpc.secure_channel(place.address, known, [*options, ("grpc.ssl_target_name_override", NAME)])
