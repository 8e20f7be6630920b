"""Certificates for tests, good ones and bad ones, made once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from cloud_server.access import Tls
from deploy import certs


class Pair(NamedTuple):
    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """The files NAME.pem and NAME.key."""
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        for path, data in zip(paths, self, strict=True):
            certs.write(path, data, private=path.suffix == ".key")
        return paths


@cache
def authority(name: str = "for tests") -> tuple[certs.x509.Certificate, certs.Key]:
    return certs.new_authority(name)


@cache
def server(*names: str, ca: str = "for tests", days: float = 1) -> Pair:
    return _pair(certs.leaf(authority(ca), "server", names or ("localhost", "127.0.0.1"), days=days, server=True))


@cache
def client(name: str, ca: str = "for tests", days: float = 1) -> Pair:
    return _pair(certs.leaf(authority(ca), name, (name,), days=days, server=False))


def _pair(made: tuple[certs.x509.Certificate, certs.Key]) -> Pair:
    return Pair(certs.pem(made[0]), certs.secret(made[1]))


def ca_file(folder: Path, name: str = "for tests") -> Path:
    path = folder / f"{name}.ca.pem"
    path.write_bytes(certs.pem(authority(name)[0]))
    return path


def tls(folder: Path, pair: Pair | None = None, *, mutual: bool = False) -> Tls:
    """The server's side, in files of ``folder``."""
    certificate, key = (pair or server()).write(folder, "server")
    return Tls(certificate, key, ca_file(folder) if mutual else None)
