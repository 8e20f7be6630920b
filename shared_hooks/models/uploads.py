"""Input files that come as bytes from elsewhere: read as the same file would be read here, and within bounds.

Both sides must read alike for an answer to be the model's own, so they compare a digest of how they read: the spec's
settings, the code of its own callable, and the libraries that decode. Nothing is written to disk, except for a spec's
own callable, which takes a path.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from shared_hooks.errors import InputMismatch
from shared_hooks.models.inputs import IMAGE_SUFFIXES, TENSOR_SUFFIXES
from shared_hooks.models.picture import MAX_PIXELS as MAX_PIXELS

SUFFIXES = IMAGE_SUFFIXES | TENSOR_SUFFIXES
BYTES_PER_PIXEL = 4


def check_suffix(suffix: str) -> str:
    """``suffix`` in lower case. Raises InputMismatch for one that input files do not have."""
    if suffix.lower() not in SUFFIXES:
        raise InputMismatch(
            f"{suffix[:20]!r} is not a suffix of an input file; expected one of {', '.join(sorted(SUFFIXES))}"
        )
    return suffix.lower()


@contextmanager
def as_path(suffix: str, data: bytes) -> Iterator[Path]:
    """The bytes as a file for a callable that takes a path; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="isthmus-input-") as folder:
        path = Path(folder) / f"input{suffix}"
        path.write_bytes(data)
        yield path


def digest(settings: Any, own: Callable[..., Any] | None, constants: Mapping[str, Any]) -> str:
    """A digest (hexadecimal) of how files are read: ``settings`` and ``constants`` by their text, ``own`` by its
    source.
    """
    known = {
        "settings": repr(settings),
        "constants": repr(sorted(constants.items())),
        "own": _source(own) if own else None,
        "libraries": libraries(),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def libraries() -> dict[str, str | None]:
    """Versions of what decodes files."""
    import PIL
    from PIL import features

    return {
        "Pillow": PIL.__version__,
        **{name: features.version(name) for name in ("jpg", "libjpeg_turbo", "zlib", "webp", "libtiff")},
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
    }


def _source(own: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(own)
    except (OSError, TypeError):
        return f"{own.__module__}:{getattr(own, '__qualname__', type(own).__qualname__)}, whose source is not at hand"
