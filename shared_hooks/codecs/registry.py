"""Look up codecs by name: built-in ones, and plugins that this process was started with.

A plugin is a `Codec` found as ``module:Class`` or by an entry point::

    [project.entry-points."isthmus.codecs"]
    "acme:topk" = "acme_codecs:TopK"

Its code is trusted, as a model's is. Its results are not: an exception or a broken promise fails no request and is
reported by the codec's name (`Guarded`).
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import torch

from shared_hooks.codecs import learned, noise
from shared_hooks.codecs.basis import Basis, Frames
from shared_hooks.codecs.codec import (
    MAX_PARAMS,
    MAX_TEXT,
    RAW,
    Codec,
    Coded,
    Grain,
    Half,
    Lz4,
    Param,
    Shuffled,
    Sparse,
    Zstd,
    bytes_of,
)
from shared_hooks.codecs.quantised import Quantised
from shared_hooks.config import resolve
from shared_hooks.errors import CodecFailed, SpecError, near

GROUP: Final = "isthmus.codecs"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,30}:[a-zA-Z0-9][a-zA-Z0-9_.-]{0,30}")
_OURS: Final = ("learned", "noise")
MAX_WARNINGS: Final = 16
log = logging.getLogger(__name__)


class _Broken(Exception):
    """A plugin broke a promise; the message says which."""


class Guarded(Codec):
    """Checks a plugin's codec against its promises.

    On the edge, a piece is sent raw where the codec raises, exceeds its own `Codec.bound`, or claims to be lossless and
    is not, with one warning for each reason. Where it decodes, a failure raises `CodecFailed` with its name, and the
    edge sends the request once more without it.
    """

    def __init__(self, inner: Codec) -> None:
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]
        self.lossless, self.shrinks = bool(inner.lossless), bool(inner.shrinks)  # type: ignore[misc]
        self._warned: set[str] = set()

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        try:
            coded = self.inner.encode(tensor.clone(), grain)  # what it writes there is discarded
            return None if coded is None else self._checked(coded, tensor)
        except Exception as error:
            why = str(error) if isinstance(error, _Broken) else f"{type(error).__name__}: {error!s:.200}"
            if why not in self._warned and len(self._warned) < MAX_WARNINGS:
                self._warned.add(why)
                log.warning("codec %s: %s; such pieces are sent raw", self.name, why)
            return None

    def _checked(self, coded: Any, tensor: torch.Tensor) -> Coded:
        if not isinstance(coded, Coded):
            raise _Broken(f"encode() gives {type(coded).__name__}, not Coded")
        data, params = memoryview(coded.data).cast("B"), tuple(coded.params)
        most = self.inner.bound(tensor.dtype, tensor.numel())
        if most is not None and len(data) > most:
            raise _Broken(f"{len(data)} bytes where it promised {most} at most")
        if len(params) > MAX_PARAMS or not all(_is_param(one) for one in params):
            raise _Broken(f"its parameters are not {MAX_PARAMS} numbers and short texts at most")
        self.inner.check(params, tensor.dtype, tensor.numel(), len(data))
        if self.lossless and not self._round_trips(tensor, data, params):
            raise _Broken("it promises to keep every bit, and does not")
        return Coded(data, params)

    def _round_trips(self, tensor: torch.Tensor, data: memoryview, params: tuple[Param, ...]) -> bool:
        found = self.decode(data, params, tensor.dtype, tensor.numel())
        made = bytes_of(found) if isinstance(found, torch.Tensor) else found
        return made == bytes_of(tensor)

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        try:
            most = self.inner.bound(dtype, elements)
            self.inner.check(params, dtype, elements, nbytes)
        except ValueError:
            raise
        except Exception as error:
            raise CodecFailed(f"codec {self.name}: {type(error).__name__} in check(): {error!s:.200}") from error
        if most is not None and nbytes > most:
            raise ValueError(f"{nbytes} bytes where {most} are the most")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        try:
            found = self.inner.decode(data, params, dtype, elements)
            return self._decoded(found, dtype, elements)
        except CodecFailed:
            raise
        except Exception as error:
            raise CodecFailed(f"codec {self.name}: {type(error).__name__} in decode(): {error!s:.200}") from error

    def _decoded(self, found: Any, dtype: torch.dtype, elements: int) -> torch.Tensor | memoryview:
        if not isinstance(found, torch.Tensor):
            found = memoryview(found).cast("B")
            if found.nbytes != elements * dtype.itemsize or found.readonly:
                raise CodecFailed(
                    f"codec {self.name}: decode() gives {found.nbytes} bytes{' that are read-only' * found.readonly}; "
                    f"{elements * dtype.itemsize} writable ones are due"
                )
            plain: memoryview = found
            return plain
        if found.dtype is not dtype or found.shape != (elements,) or found.device.type != "cpu":
            raise CodecFailed(
                f"codec {self.name}: decode() gives {found.dtype} of shape {tuple(found.shape)} on {found.device}; "
                f"{dtype} of shape ({elements},) on the CPU is due"
            )
        flat: torch.Tensor = found.contiguous()
        return flat


def _is_param(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return type(value) in (int, float) and -(1 << 63) <= value < 1 << 63


def load_plugin(reference: str, folder: Path) -> Guarded:
    """Load a plugin by the name of an ``isthmus.codecs`` entry point, or as ``module:Class``, installed or in
    ``folder``.

    Raises SpecError.
    """
    found = next((one for one in entry_points(group=GROUP) if one.name == reference), None)
    where = f"codec plugin {reference}"
    try:
        made: Any = resolve(reference, folder, where) if found is None else found.load()
        made = made() if isinstance(made, type) else made
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(f"{where} cannot be loaded: {type(error).__name__}: {error!s:.200}") from error
    if not isinstance(made, Codec):
        raise SpecError(f"{where} is no shared_hooks.codecs.Codec, but {type(made).__name__}")
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.partition(":")[0] in _OURS:
        raise SpecError(f"{where} calls itself {name!r:.60}: a plugin's name is as in acme:topk")
    if found is not None and name != reference:
        raise SpecError(f"{where} calls itself {name}: an entry point is named as its codec")
    return Guarded(made)


def _is_plugin(name: str) -> bool:
    """Return whether an entry point has this name."""
    return any(one.name == name for one in entry_points(group=GROUP))


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
"""Codecs by name. `register` adds to this process's own; received bytes cannot add one."""

NOISE: Final = noise.PREFIX.rstrip(":")
_DIGEST = re.compile(r"learned:[0-9a-f]{12}")
_lock = threading.Lock()
_added: dict[str, str] = {}


def register(reference: str, folder: Path | None = None) -> str:
    """Add a codec to those of this process and return its name.

    ``reference``: a plugin's entry point or ``module:Class``, ``learned:FILE``, or ``noise:SIGMA``. ``folder``: where
    files and modules that are not installed are found; None: the current one. Registering the same codec again has no
    effect. Raises SpecError, also for a second codec of one name.
    """
    folder = Path.cwd() if folder is None else folder
    if reference.startswith(learned.PREFIX):
        file = (folder / os.path.expanduser(reference.removeprefix(learned.PREFIX))).resolve()
        found: Codec = learned.read(file)
        reference = f"{learned.PREFIX}{file}"
    else:
        found = noise.named(reference) or load_plugin(reference, folder)
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
    """Keep ``codec`` in `CODECS` while in the block."""
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
    """Return the references passed to `register`, for another process that needs the same codecs."""
    return [reference for reference in _added.values() if not reference.startswith(noise.PREFIX)]


def _kind(codec: Codec) -> type:
    return type(codec.inner) if isinstance(codec, Guarded) else type(codec)


def check(name: str) -> str:
    """Return the name of the codec a user specified: one of `CODECS`, or what `register` accepts. Raises SpecError."""
    if name in CODECS:
        return name
    if _DIGEST.fullmatch(name):
        raise SpecError(f'codec="{name}": this process has no such file; name it as learned:FILE')
    if name.startswith((learned.PREFIX, noise.PREFIX)) or _is_plugin(name):
        return register(name)
    raise SpecError(
        f'codec="{name}": must be one of {", ".join(CODECS)}, learned:FILE, noise:SIGMA, or a plugin\'s.'
        f"{near(name, CODECS)}"
    )


def by_wire(name: object) -> Codec | None:
    """Return the codec that received data names, or None if this process has no such codec."""
    if not isinstance(name, str):
        return None
    try:
        return CODECS.get(name) or noise.named(name)
    except SpecError:
        return None


def offered() -> list[str]:
    """Return the names of the codecs that this side can decode, for the handshake."""
    return [*(name for name in list(CODECS) if not name.startswith(noise.PREFIX)), NOISE]


def is_offered(name: str, by: Collection[str]) -> bool:
    """Return whether the other side, which offers ``by``, can decode data of this codec."""
    return name in by or (name.startswith(noise.PREFIX) and NOISE in by)
