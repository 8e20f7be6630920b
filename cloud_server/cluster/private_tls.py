"""The way between fronts and replicas. Each replica makes a key and a certificate when it starts; fronts are given
the certificate by Ray, together with the address, so they know whom they talk to. On loopback all is in the clear.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Final

import grpc

from cloud_server.access import Tls
from cloud_server.cluster.census import Place

NAME: Final = "replica.isthmus"
"""In each certificate: addresses come and go."""
YEARS: Final = 20


def make(folder: Path) -> Tls:
    """A key and its certificate, in files of ``folder``."""
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
    """For `make`: nobody else may read it, and it is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="isthmus-replica-") as folder:
        yield Path(folder)


def channel(place: Place) -> grpc.Channel:
    """To a replica: a connection of its own for every stream, so that none waits behind another."""
    options: list[tuple[str, int | str]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # A replica whose machine is gone says nothing: its clients are to hear of it and come back.
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
