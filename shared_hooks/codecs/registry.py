"""Codecs by name: those that are built in, and those that this process was started with."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from shared_hooks.codecs import learned, noise, plugins
from shared_hooks.codecs.basis import Basis, Frames
from shared_hooks.codecs.codec import Codec
from shared_hooks.codecs.lossless import RAW, Half, Lz4, Shuffled, Sparse, Zstd
from shared_hooks.codecs.quantised import Quantised
from shared_hooks.errors import SpecError, near

CODECS: Final[dict[str, Codec]] = {
    codec.name: codec
    for codec in (
        RAW,
        Lz4(),
        Zstd(),
        Shuffled(Lz4()),
        Shuffled(Zstd()),
        Sparse(),
        Half("bf16", torch.bfloat16),
        Half("fp16", torch.float16),
        *(Quantised(bits) for bits in (8, 6, 5, 4, 3, 2, 1)),
        Basis(),
        Frames(),
    )
}
"""By name. What `register` adds is this process's own: nobody who sends bytes can add one."""

NOISE: Final = noise.PREFIX.rstrip(":")
_DIGEST = re.compile(r"learned:[0-9a-f]{12}")
_lock = threading.Lock()
_added: dict[str, str] = {}


def register(reference: str, folder: Path | None = None) -> str:
    """Add a codec to those of this process; its name.

    ``reference``: a plugin's entry point or ``module:Class``, ``learned:FILE``, or ``noise:SIGMA``. ``folder``: where
    files and modules that are not installed lie; None: the current one. The same one again changes nothing. Raises
    SpecError, also for a second codec of one name.
    """
    folder = Path.cwd() if folder is None else folder
    if reference.startswith(learned.PREFIX):
        file = (folder / Path(reference.removeprefix(learned.PREFIX)).expanduser()).resolve()
        found: Codec = learned.read(file)
        reference = f"{learned.PREFIX}{file}"
    else:
        found = noise.named(reference) or plugins.load(reference, folder)
    with _lock:
        known = CODECS.get(found.name)
        if known is None:
            CODECS[found.name] = found
            _added[found.name] = reference
        elif type(known) is not type(found) or _kind(known) is not _kind(found):
            raise SpecError(f"codec plugin {reference} calls itself {found.name}, as another one does")
    return found.name


@contextmanager
def temporary(codec: Codec) -> Iterator[None]:
    """The codec is one of `CODECS` in the block."""
    with _lock:
        is_new = codec.name not in CODECS
        CODECS.setdefault(codec.name, codec)
    try:
        yield
    finally:
        if is_new:
            with _lock:
                del CODECS[codec.name]


def added() -> list[str]:
    """What `register` was called with, for another process that is to have the same codecs."""
    return [reference for reference in _added.values() if not reference.startswith(noise.PREFIX)]


def _kind(codec: Codec) -> type:
    return type(codec.inner) if isinstance(codec, plugins.Guarded) else type(codec)


def check(name: str) -> str:
    """The name of a codec that a user means: one of `CODECS`, or what `register` takes. Raises SpecError."""
    if name in CODECS:
        return name
    if _DIGEST.fullmatch(name):
        raise SpecError(f'codec="{name}": this process has no such file; name it as learned:FILE')
    if name.startswith((learned.PREFIX, noise.PREFIX)) or plugins.is_installed(name):
        return register(name)
    raise SpecError(
        f'codec="{name}": must be one of {", ".join(CODECS)}, learned:FILE, noise:SIGMA, or a plugin\'s.'
        f"{near(name, CODECS)}"
    )


def by_wire(name: object) -> Codec | None:
    """The codec that bytes say they are of; None where this process has none of that name."""
    if not isinstance(name, str):
        return None
    try:
        return CODECS.get(name) or noise.named(name)
    except SpecError:
        return None


def offered() -> list[str]:
    """What this side can decode, as it tells the other."""
    return [*(name for name in list(CODECS) if not name.startswith(noise.PREFIX)), NOISE]


def is_offered(name: str, by: Collection[str]) -> bool:
    """Whether the other side, which offers ``by``, can decode what this codec makes."""
    return name in by or (name.startswith(noise.PREFIX) and NOISE in by)
