"""Sizes, rates and durations as people write them."""

from __future__ import annotations

import pytest

from edge_client import user_text
from shared_hooks.errors import SpecError


def test_units_as_people_write_them() -> None:
    assert user_text.size("--x", "64MiB") == 64 * 2**20
    assert user_text.size("--x", "1.5 kB") == 1500
    assert user_text.size("--x", "12") == 12
    assert user_text.rate("--x", "5mbit") == 625_000
    for text in ("20Mbit/s", "20 Mbit/s", "20Mbps", "20mbit"):
        assert user_text.rate("--x", text) == 2_500_000
    assert user_text.nanoseconds("--x", "30ms") == 30e6


@pytest.mark.parametrize("text", ["", "fast", "5", "-5mbit", "5 mbitt", "0mbit", "1e3mbit"])
def test_another_rate_is_refused_by_the_options_name(text: str) -> None:
    with pytest.raises(SpecError, match="--uplink"):
        user_text.rate("--uplink", text)
