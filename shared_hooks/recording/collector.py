"""Python's garbage collector, put off while very many objects are made that all stay.

A recording makes some dozen small objects an operation. The collector looks at the young ones again and again, and now
and then at every object of the process, to find that nothing can go: half of the time of planning.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def put_off() -> Iterator[None]:
    """No collection inside; reference counts free what they free. In threads at a time, the first to leave ends it."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
