"""Exit statuses of ``edge-client``."""

from __future__ import annotations

from typing import Final

OK: Final = 0
SOME_FAILED: Final = 1  # an input failed, or a cut is not exact
USAGE: Final = 2  # the command line, a file it names, the model spec, the cut
CONNECTION: Final = 3  # no server, or it disagrees
INTERRUPTED: Final = 130  # Ctrl-C
