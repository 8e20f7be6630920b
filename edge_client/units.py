"""Sizes, rates and durations as people write them on a command line, and a check of seconds."""

from __future__ import annotations

import re
from typing import Final

from shared_hooks.errors import SpecError

_SIZES: Final = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BITS: Final = ("bit", "bit/s", "bps")  # 20mbit, 20 Mbit/s as all output says it, 20Mbps
_RATES: Final = {
    prefix + bit: bytes_ for prefix, bytes_ in (("", 0.125), ("k", 125.0), ("m", 125e3), ("g", 125e6)) for bit in _BITS
}
LONGEST_SECONDS: Final = 1_000_000.0  # in milliseconds it fits 32 bits, which is what gRPC has
_TIMES: Final = {"us": 1e3, "ms": 1e6, "s": 1e9}


def size(name: str, text: str) -> float:
    """Bytes of "64MiB". Raises SpecError naming ``name``."""
    return _parse(name, text, _SIZES, "64MiB, 500kB or a number of bytes")


def rate(name: str, text: str) -> float:
    """Bytes per second of "5mbit", "5 Mbit/s" or "5Mbps"."""
    value = _parse(name, text, _RATES, "5mbit, 800kbit or 1gbit")
    if value <= 0:
        raise SpecError(f"{name} {text}: must be above 0")
    return value


def nanoseconds(name: str, text: str) -> float:
    """Nanoseconds in "30ms"."""
    return _parse(name, text, _TIMES, "30ms, 0.5s or 200us")


def _parse(name: str, text: str, units: dict[str, float], expected: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z/]*)\s*", str(text).lower())
    if match is None or match[2] not in units:
        raise SpecError(f"{name} {text!r}: expected {expected}")
    return float(match[1]) * units[match[2]]


def check_seconds(name: str, value: float) -> float:
    """``value``, or SpecError unless it is above 0 and at most `LONGEST_SECONDS`."""
    if not 0 < value <= LONGEST_SECONDS:  # rejects NaN, too
        raise SpecError(f"{name}={value}: must be more than 0 and at most {LONGEST_SECONDS:.0f} seconds")
    return value
