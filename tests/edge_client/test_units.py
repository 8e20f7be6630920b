"""Sizes, rates and durations as people write them."""

from __future__ import annotations

import pytest

from edge_client import spoken
from shared_hooks.errors import SpecError


def test_what_people_write_is_understood() -> None:
    assert spoken.size("--x", "64MiB") == 64 * 2**20
    assert spoken.size("--x", "1.5 kB") == 1500
    assert spoken.size("--x", "12") == 12
    assert spoken.rate("--x", "5mbit") == 625_000
    for text in ("20Mbit/s", "20 Mbit/s", "20Mbps", "20mbit"):
        assert spoken.rate("--x", text) == 2_500_000
    assert spoken.nanoseconds("--x", "30ms") == 30e6


@pytest.mark.parametrize("text", ["", "fast", "5", "-5mbit", "5 mbitt", "0mbit", "1e3mbit"])
def test_another_rate_is_refused_by_the_options_name(text: str) -> None:
    with pytest.raises(SpecError, match="--uplink"):
        spoken.rate("--uplink", text)
