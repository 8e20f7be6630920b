"""Tables: what a model computes with and no state dictionary names: tensors and arrays of frequencies, masks, windows.

They are made by code from numbers, such as buffers that are not persistent, so nothing else tells that two sides have
other ones. Where they were made by another release of torch, or on another processor, they differ in their last bits:
so a fact has besides a hash some values, and `compared` says whether two sides' are equal but for rounding.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shared_hooks.modules import agreement
from shared_hooks.modules.attach import Shim

WHOLE: Final = 256
"""Values of a table that are given one by one; of a larger one half as many, and the means of as many parts."""
LONGEST: Final = 4096
"""An angle is known as well as its position is large: a table of sines is trusted by its length, to this length."""
ULPS: Final = 16
"""By which two machines' functions may differ, of each value; `FEW` of the largest one, where values cancel out."""
FEW: Final = 4
FLIPPED: Final = 0.01
"""Share of a table's values that may be rounded to another neighbour where they are kept in half the bits."""

Tables = Mapping[tuple[str, str], str]
"""By the module's path and a name."""


def tables(model: nn.Module) -> dict[tuple[str, str], str]:
    """The tables of a model: each one's form, a hash, and some values of fractions. Ask before the first forward."""
    modules = list(model.named_modules())
    stated = {id(parameter) for parameter in model.parameters()}
    for _, module in modules:
        own = module._non_persistent_buffers_set
        stated |= {id(buffer) for name, buffer in module.named_buffers(recurse=False) if name not in own}
    found = {}
    for path, module in modules:
        kept: dict[str, Any] = dict(module.named_buffers(recurse=False))
        kept |= {name: value for name, value in vars(module).items() if name not in agreement.OF_EVERY_MODULE}
        package = type(module).__module__.partition(".")[0]
        for name, value in kept.items():
            for number, table in enumerate(_in(value, package)):
                if id(table) not in stated:
                    found[path, f"{name}.{number}" if number else name] = _fact(table)
    return found


def _in(value: Any, package: str) -> Iterator[torch.Tensor]:
    """Through containers, and objects of the module's own package, however deep they lie in each other."""
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, (bool, int, float, str, bytes, type, nn.Module, Shim)) or value is None:
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        inner: Iterable[Any] = ()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, np.ndarray):
            if value.dtype.kind in "biufc" and value.dtype.isnative:
                yield torch.from_numpy(np.array(value))
        elif isinstance(value, (list, tuple)):
            inner = value
        elif isinstance(value, Mapping):
            inner = value.values()
        elif type(value).__module__.partition(".")[0] == package and hasattr(value, "__dict__"):
            inner = vars(value).values()
        left += reversed([*inner])


def digest(found: Tables) -> str:
    """A digest of forms and hashes."""
    return agreement.digest_of([[*place, fact.rpartition(" ")[0]] for place, fact in sorted(found.items())])


def _fact(value: torch.Tensor) -> str:
    """``float32[64] HASH VALUES``; the last is "-" for what must be equal in every bit."""
    name, shape = agreement.form_of(value)
    form = f"{name}{shape}".replace(" ", "")
    if value.is_meta:
        return f"{form} meta -"
    try:
        exact = agreement.tensor_hash(value)
    except (RuntimeError, TypeError, NotImplementedError):  # of a kind that does not show its bytes
        return f"{form} unreadable -"
    is_plain = value.layout == torch.strided and not value.is_quantized and value.numel()
    if not is_plain or not (value.is_floating_point() or value.is_complex()):
        return f"{form} {exact} -"
    with torch.no_grad():
        value = value.detach().cpu().resolve_conj().resolve_neg()
        return f"{form} {exact} {_told((torch.view_as_real(value) if value.is_complex() else value).reshape(-1))}"


def _told(flat: torch.Tensor) -> str:
    """Which values are not finite (a hash), in how many bits they fit, how many of the sample are no means, and the
    sample, after the largest magnitude of all.
    """
    odd, largest, narrow = hashlib.blake2b(digest_size=8), 0.0, True
    means: list[float] = []
    spots: list[float] = []
    count = flat.numel()
    parts = 1 if count <= WHOLE else WHOLE // 2
    for part in range(parts):
        begin, end = part * count // parts, (part + 1) * count // parts
        values: NDArray[np.float64] = flat[begin:end].double().numpy()
        finite = np.isfinite(values)
        odd.update(
            np.where(finite, 0, np.where(np.isnan(values), 1, np.where(values > 0, 2, 3))).astype(np.int8).tobytes()
        )
        values = np.where(finite, values, 0.0)
        with np.errstate(over="ignore", under="ignore"):
            narrow = narrow and bool((values.astype(np.float32).astype(np.float64) == values).all())
        largest = max(largest, float(np.abs(values).max()))
        means.append(float((values / len(values)).sum()))
        spots += values.tolist() if parts == 1 else [float(values[part * 2654435761 % len(values)])]
    sample = np.array([largest, *spots, *(means if parts > 1 else ())])
    data = sample.astype("<f4" if narrow else "<f8").tobytes()
    return f"{odd.hexdigest()}:{'single' if narrow else 'double'}:{len(spots)}:{base64.b64encode(data).decode()}"


@dataclass(frozen=True)
class Compared:
    """Two sides' facts of one table. ``client``, ``server``: the values that are furthest apart, in words."""

    alike: bool
    """But for rounding."""
    client: str
    server: str


def compared(client: str, server: str) -> Compared:
    """Compare facts that are not equal. What comes from a stranger may be anything."""
    (form, _, reported), (own_form, _, own) = _three(client), _three(server)
    if form != own_form:
        return Compared(False, form[:60], own_form)
    if reported == "-" or own == "-" or len(reported) > 2 * len(own) + 100:
        return Compared(False, "other values", "its own")
    try:
        theirs, mine = _read(reported), _read(own)
    except ValueError:
        return Compared(False, "values that cannot be read", "its own")
    if theirs.form != mine.form or not np.isfinite(theirs.sample).all():
        return Compared(False, "other values", "its own")
    with np.errstate(over="ignore"):
        apart = np.abs(theirs.sample - mine.sample) / _allowed(own_form, mine, theirs.narrow)
    worst = int(apart.argmax())
    alike = bool(apart[worst] <= 1)
    if alike and _half(own_form) is not None:
        flipped = int((theirs.sample != mine.sample)[1 : 1 + mine.spots].sum())
        alike = flipped <= max(_share(mine) * mine.spots, 1)
    return Compared(alike, f"{theirs.sample[worst]:.9g}", f"{mine.sample[worst]:.9g}")


@dataclass(frozen=True)
class _Sample:
    odd: str
    narrow: bool
    spots: int
    sample: NDArray[np.float64]

    @property
    def form(self) -> tuple[str, int, int]:
        return self.odd, self.spots, len(self.sample)

    @property
    def has_both_signs(self) -> bool:
        return bool((self.sample[1:] < 0).any() and (self.sample[1:] > 0).any())


def _allowed(form: str, mine: _Sample, narrow: bool) -> NDArray[np.float64]:
    """How far the client's may be from each of these values: by rounding, and not by another number in a formula."""
    eps, largest = 2.0**-23 if narrow and mine.narrow else 2.0**-52, mine.sample[0]
    shape = [int(size) for size in form.partition("[")[2].rstrip("]").split(",") if size]
    angles = min(max(shape, default=0), LONGEST) if mine.has_both_signs else 0
    allowed: NDArray[np.float64] = eps * (ULPS * np.abs(mine.sample) + (FEW + angles) * largest) + 1e-300
    if (half := _half(form)) is not None:
        end = 1 + mine.spots
        # the neighbour, which is up to `eps` away
        allowed[:end] += half.eps * np.abs(mine.sample[:end]) + half.smallest_normal * half.eps
        allowed[end:] += _share(mine) * half.eps * largest
    return allowed


def _share(mine: _Sample) -> float:
    """The share of values that may be rounded to another neighbour."""
    return 25 * FLIPPED if mine.has_both_signs else FLIPPED


def _half(form: str) -> torch.finfo | None:
    """The type of a table whose values have fewer bits than they were computed with; None for another."""
    dtype = getattr(torch, form.partition("[")[0], None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4:
        return torch.finfo(dtype)
    return None


def _three(fact: str) -> tuple[str, str, str]:
    form, _, rest = fact.partition(" ")
    exact, _, reported = rest.partition(" ")
    return form, exact, reported


def _read(reported: str) -> _Sample:
    """Raises ValueError."""
    odd, width, spots, text = reported.split(":")
    sample = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4" if width == "single" else "<f8")
    if not len(sample):
        raise ValueError("no values")
    return _Sample(odd, width == "single", int(spots), sample.astype(np.float64))
