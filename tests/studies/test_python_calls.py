"""Python calls of a request and of a token do not grow unseen: counts do not depend on how busy a machine is."""

from __future__ import annotations

import json
import sys
import time

import pytest

from tests.starts import ROOT, run

MOST = {
    "request": {"edge": 630, "cloud": 870},
    "metrics": {"edge": 790, "cloud": 1100},
    "layers": {"fixed": 1580, "behind": 8, "before": 16},
}
"""A few percent more than what a busy machine counts, where threads meet elsewhere (docs/results/benchmarks.md).
What a layer adds is a difference of two networks by their sixteen layers, so a few calls more of one change it by one.
"""
PATIENCE = 60.0
"""Where threads miss each other they wait once more, which adds calls: counted again for so many seconds, the least
counts.
"""


@pytest.mark.parametrize("what", MOST)
def test_calls(what: str) -> None:
    """In a process of its own: other tests leave threads that are at work."""
    words = [sys.executable, "-m", "studies.benchmarks.python_calls", "--what", what, "--json"]
    least: dict[str, float] = {}
    began = time.monotonic()
    while not least or time.monotonic() - began < PATIENCE:
        done = run(words, cwd=ROOT, timeout=300)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found.keys() == MOST[what].keys() and min(found.values()) > 0
        least = {name: min(count, least.get(name, count)) for name, count in found.items()}
        if all(least[name] <= most for name, most in MOST[what].items()):
            return
    raise AssertionError(f"{least} calls; at most {MOST[what]}")
