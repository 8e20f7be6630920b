"""A plugin of pytest: coverage starts again where a test has taken its trace function away."""

from __future__ import annotations

import sys

import coverage


def pytest_runtest_setup() -> None:
    """Before each test."""
    found = coverage.Coverage.current()
    if found is not None and sys.gettrace() is None:
        found.stop()
        found.start()
