"""Honest requests, recorded once and kept in a file: what a stranger could have seen on a wire of his own.

The hostile process starts from this file and the protocol's definition, so it loads neither torch nor the engine.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

DIGITS = "digits"
SHAPES = 48
"""Batch sizes 1 to this many of digits: forms that a server has not seen."""


@dataclass(frozen=True)
class Recorded:
    """One request: the cut's description (JSON), the parcel's header and its payload."""

    model_id: str
    crossing: bytes
    header: bytes
    payload: bytes

    @property
    def digest(self) -> str:
        return digest_of(self.crossing)


@dataclass
class Material:
    """``requests`` by name: "digits/1" has one row. ``environment``: settings that a greeting states, by model."""

    requests: dict[str, Recorded] = field(default_factory=dict)
    environment: dict[str, dict[str, str]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        reported = {
            name: [one.model_id, *(base64.b64encode(part).decode() for part in (one.crossing, one.header, one.payload))]
            for name, one in self.requests.items()
        }
        path.write_text(json.dumps({"requests": reported, "environment": self.environment}))

    @classmethod
    def read(cls, path: Path) -> Material:
        reported = json.loads(path.read_text())
        requests = {
            name: Recorded(model_id, *(base64.b64decode(part) for part in parts))
            for name, (model_id, *parts) in reported["requests"].items()
        }
        return cls(requests, reported["environment"])


def digest_of(crossing: bytes) -> str:
    """By which a cut is named on the wire."""
    return hashlib.blake2b(crossing, digest_size=16).hexdigest()


def header_of(body: Any) -> bytes:
    """A parcel's header: a checksum, and JSON."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return xxhash.xxh3_64_intdigest(text).to_bytes(8, "little") + text


def file_header(nbytes: int, checksum: int = 0) -> bytes:
    """The header of an input file of so many bytes; they count as read when the checksum is theirs."""
    return header_of({"v": 1, "meta": None, "sections": [["raw", "uint8", [nbytes], [1], nbytes, checksum]]})


def make(shapes: Iterable[int] = range(1, SHAPES + 1)) -> Material:
    """Records: this loads torch. ``shapes``: rows of the requests for digits."""
    import torch

    from shared_hooks import WrappedModel
    from shared_hooks.models import load_spec
    from studies.siege.models import WIDE, Wide

    material = Material()
    generator = torch.Generator().manual_seed(8)
    with WrappedModel(load_spec(DIGITS).load_model()) as digits, torch.no_grad():
        material.environment[DIGITS] = dict(digits.environment())
        for rows in shapes:
            early = digits.head("input", torch.randn(rows, 1, 32, 32, generator=generator))
            material.requests[f"{DIGITS}/{rows}"] = _recorded(DIGITS, early)
    with WrappedModel(Wide().eval()) as wide, torch.no_grad():
        material.environment[WIDE] = dict(wide.environment())
        for rows in (1, 8):
            early = wide.head("input", torch.randn(rows, 16, generator=generator))
            material.requests[f"{WIDE}/{rows}"] = _recorded(WIDE, early)
    return material


def _recorded(model_id: str, early: Any) -> Recorded:
    parcel = early.pack()
    return Recorded(model_id, early.crossing.to_bytes(), parcel.header, b"".join(parcel.buffers))
