"""The libraries that only sweeps need, so that a device that runs the client alone stays light."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from shared_hooks.errors import SpecError

NEEDED: Final = ("polars", "jinja2")


def check(*names: str) -> None:
    """SpecError, before any work is done, naming what is missing and how to get it."""
    missing = [name for name in names or NEEDED if find_spec(name) is None]
    if missing:
        raise SpecError(f'{" and ".join(missing)} missing: pip install "isthmus[sweep]"')
