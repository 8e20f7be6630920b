"""PyAV, which only videos and cameras need."""

from __future__ import annotations

from importlib.util import find_spec

from shared_hooks.errors import SpecError


def check(what: str) -> None:
    """SpecError where PyAV is missing: to read ``what`` takes it."""
    if find_spec("av") is None:
        raise SpecError(f'{what}: videos and cameras need PyAV: pip install "isthmus[video]"')
