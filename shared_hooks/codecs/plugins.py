"""Codecs that live in packages of their own: a `Codec` found by an entry point or as ``module:Class``.

    [project.entry-points."isthmus.codecs"]
    "acme:topk" = "acme_codecs:TopK"

Its code is trusted, as a model's is; its answers are not: what it raises, and what is not as it said, costs no request
and is reported by its name (`Guarded`).
"""

from __future__ import annotations

import logging
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import torch

from shared_hooks.codecs.codec import MAX_PARAMS, MAX_TEXT, Codec, Coded, Grain, Param
from shared_hooks.codecs.lossless import bytes_of
from shared_hooks.config import resolve
from shared_hooks.errors import CodecFailed, SpecError

GROUP: Final = "isthmus.codecs"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,30}:[a-zA-Z0-9][a-zA-Z0-9_.-]{0,30}")
_OURS: Final = ("learned", "noise")
MAX_WARNINGS: Final = 16
log = logging.getLogger(__name__)


class _Broken(Exception):
    """A promise, in words for people."""


class Guarded(Codec):
    """A plugin's codec, held to its word.

    On the edge, a piece that it raises for, whose bytes are more than its own `Codec.bound` allows, or which does not
    come back where it promises to lose nothing, goes raw, with one warning for each reason. Where it decodes,
    `CodecFailed` names it: the edge then sends the request once more without it.
    """

    def __init__(self, inner: Codec) -> None:
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]
        self.lossless, self.shrinks = bool(inner.lossless), bool(inner.shrinks)  # type: ignore[misc]
        self._warned: set[str] = set()

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        try:
            coded = self.inner.encode(tensor.clone(), grain)  # what it writes there is nobody's
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
        if self.lossless and not self._comes_back(tensor, data, params):
            raise _Broken("it promises to keep every bit, and does not")
        return Coded(data, params)

    def _comes_back(self, tensor: torch.Tensor, data: memoryview, params: tuple[Param, ...]) -> bool:
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


def load(reference: str, folder: Path) -> Guarded:
    """By the name of an entry point of the group ``isthmus.codecs``, or as ``module:Class``, which is installed or lies
    in ``folder``. Raises SpecError.
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


def is_installed(name: str) -> bool:
    """Whether an entry point is named so."""
    return any(one.name == name for one in entry_points(group=GROUP))
