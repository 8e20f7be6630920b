"""``make certs``: an authority, a server's certificate and a client's, for trying TLS. Needs the extra ``tls``.

    python -m deploy.certs certs/ --server cloud.example --server 10.0.0.5 --client edge-1

makes ``ca.pem`` (which both sides need), ``server.pem`` and ``server.key``, ``edge-1.pem`` and ``edge-1.key``, and
keeps the authority's own key, ``ca.key``, to sign more with later. What is asked for again is made again. For more than
trying, let an authority of your own sign (step-ca, cert-manager, Vault), and keep its key off the server.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Key = ec.EllipticCurvePrivateKey

CA_DAYS, LEAF_DAYS = 3650, 90
CLOCKS = timedelta(minutes=5)
"""By which the clocks of two machines may differ."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.certs", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("certs"), help="(default: certs)")
    parser.add_argument("--server", action="append", metavar="NAME|IP", help="as clients call it; may be repeated")
    parser.add_argument("--client", action="append", metavar="NAME", help="the identity; may be repeated")
    parser.add_argument("--days", type=int, default=LEAF_DAYS, metavar="N", help=f"until they expire ({LEAF_DAYS})")
    options = parser.parse_args(arguments)
    if options.days < 1:
        parser.error(f"--days {options.days}: expected at least 1")
    folder: Path = options.folder
    wanted = {name: [name] for name in options.client or ([] if options.server else ["edge-1"])}
    if options.server or not (folder / "server.pem").exists():
        wanted["server"] = options.server or ["localhost", "127.0.0.1", "::1"]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ca = authority(folder / "ca.pem", folder / "ca.key")
        for name, names in wanted.items():
            path = folder / f"{name}.pem"
            certificate, key = leaf(ca, name, names, days=options.days, server=name == "server")
            write(path.with_suffix(".key"), secret(key), private=True)
            write(path, pem(certificate))
            print(f"{path}: {', '.join(names)}; until {certificate.not_valid_after_utc:%Y-%m-%d}")
    except (OSError, ValueError) as error:
        print(f"certs: {error}", file=sys.stderr)
        return 1
    return 0


def authority(certificate: Path, key: Path, days: int = CA_DAYS) -> tuple[x509.Certificate, Key]:
    """The one in these files, or a new one. Raises ValueError for files that hold something else."""
    if certificate.exists():
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        if not isinstance(loaded, Key):
            raise ValueError(f"{key}: not a key of an elliptic curve")
        return x509.load_pem_x509_certificate(certificate.read_bytes()), loaded
    made, own = new_authority(days=days)
    write(key, secret(own), private=True)
    write(certificate, pem(made))
    return made, own


def new_authority(name: str = "Isthmus for trying", days: int = CA_DAYS) -> tuple[x509.Certificate, Key]:
    """A certificate that signs others and itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, subject, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return builder.sign(key, hashes.SHA256()), key


def leaf(
    ca: tuple[x509.Certificate, Key], name: str, names: Sequence[str], *, days: float = LEAF_DAYS, server: bool
) -> tuple[x509.Certificate, Key]:
    """A certificate for a server or a client that is called ``names``. Negative ``days``: it has expired."""
    issuer, signing = ca
    key = ec.generate_private_key(ec.SECP256R1())
    usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), issuer.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general(one) for one in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )
    return builder.sign(signing, hashes.SHA256()), key


def _builder(subject: x509.Name, issuer: x509.Name, key: Key, days: float) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    began = now - CLOCKS if days > 0 else now + 2 * timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(began)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def secret(key: Key) -> bytes:
    """Without a password: nobody would be there to type it when a server starts."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replaces the file as a whole; ``private``: only its owner may read it, from its first byte on."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644), "wb") as file:
        file.write(data)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
