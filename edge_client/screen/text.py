"""Numbers as text; and what comes from elsewhere - file names, labels, a server's errors - made fit to be shown."""

from __future__ import annotations

import math
from typing import Any

from shared_hooks.showing import size as size


def printable(text: str) -> str:
    """``text`` with what does not print escaped: control characters would clear, colour or rewrite a terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def one_line(text: str) -> str:
    """``text`` as one printable line."""
    return printable(" ".join(text.split()))


def milliseconds(ns: float) -> str:
    """Nanoseconds as milliseconds with microseconds shown."""
    return f"{ns / 1e6:.3f}"


def number(value: float) -> str:
    """Four digits without an exponent; 0 for what only rounding has left."""
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "without limit"
    if abs(value) < 1e-6:
        return "0"
    places = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def finite(value: Any) -> Any:
    """``value`` for JSON: NaN and infinities as None, tuples as lists, keys as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
