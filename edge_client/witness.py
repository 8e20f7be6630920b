"""Answers that are also computed completely on this side, and compared.

May import transport, screen, call.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from edge_client.call import Call
from edge_client.screen import one_line
from edge_client.transport import now_ns
from shared_hooks import WrappedModel, devices
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.forward import context, run_plain
from shared_hooks.models.inputs import to_device
from shared_hooks.modules import INPUT
from shared_hooks.profiling.machine import kind, unlike
from shared_hooks.showing import short
from shared_hooks.state import PythonState
from shared_hooks.tensors import ClassFinder, copied, dtype_named, flatten, identical, unflatten

__all__ = [
    "InitialState",
    "Witness",
    "Witnesses",
    "check_share",
]


# Two outputs of one model on one input: are they equal, and if not, how far apart? On machines of the same kind every
# bit counts. On others (another device, processor, release of torch or number of threads) the last bits may rightly
# differ, and a *tolerance* decides: the largest difference between two fractions, divided by the largest magnitude in
# its tensor, may be the square root of the coarsest format's machine epsilon, so that half of the digits that the
# format has agree (`tolerance`). Everything else must be equal there, too: types, shapes, whole numbers, text, and
# where a tensor holds NaN or infinities.

TF32_EPSILON: Final = 2.0**-10
"""The rounding of float32 that cuDNN and cuBLAS may use (a 10-bit mantissa)."""


@dataclass(frozen=True, slots=True)
class WitnessComparison:
    """``largest``: the largest difference relative to the output's scale; 0.0 if nothing differs, infinite without a
    measure.
    """

    bits: bool  # every bit is equal
    largest: float
    top1: float | None  # share of rows whose largest value is at the same place; None without such rows
    what: str  # what was compared, as text

    def within(self, tolerance: float) -> bool:
        """Return whether the difference is acceptable between machines that are not alike."""
        return self.bits or self.largest <= tolerance


def compare(whole: Any, received: Any, find: ClassFinder) -> WitnessComparison:
    """Compare the model's own output, on any device, with the received one. ``find`` finds container classes."""
    (form, mine), (other, theirs) = flatten(whole), flatten(received)
    mine, theirs = [_plain(one) for one in mine], [_plain(one) for one in theirs]
    count = sum(tensor.numel() for tensor in mine)
    tensors = f"{len(mine)} tensor{'' if len(mine) == 1 else 's'}"
    what = f"{tensors}, {count:,} value{'' if count == 1 else 's'}"
    if identical(unflatten(form, mine, find), unflatten(other, theirs, find)):
        return WitnessComparison(True, 0.0, _top1(mine, mine), what)
    if not identical(form, other) or [_form(one) for one in mine] != [_form(one) for one in theirs]:
        return WitnessComparison(False, math.inf, None, f"{what}; types or shapes differ")
    pairs = list(zip(mine, theirs, strict=True))
    return WitnessComparison(False, max((_apart(a, b) for a, b in pairs), default=math.inf), _top1(mine, theirs), what)


def tolerance(dtypes: Iterable[torch.dtype], *, tf32: bool = False) -> float:
    """Return the tolerance for a model and output with these dtypes; ``tf32``: float32 may have been computed with
    fewer bits.
    """
    epsilons = [torch.finfo(dtype).eps for dtype in set(dtypes) if dtype.is_floating_point or dtype.is_complex]
    coarsest = max(epsilons, default=0.0)
    if tf32 and torch.float32 in dtypes:
        coarsest = max(coarsest, TF32_EPSILON)
    return math.sqrt(coarsest)


def tolerance_between(formats: Iterable[torch.dtype], about: Mapping[str, str], device: torch.device) -> float:
    """Return the tolerance for dtypes that this ``device`` and a server with this description may have
    computed with.
    """
    on_gpu = device.type == "cuda" or about.get("kind", "").startswith("cuda")
    tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return tolerance(formats, tf32=on_gpu and tf32)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU, dense and contiguous: strides are no part of a value."""
    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _apart(whole: torch.Tensor, received: torch.Tensor) -> float:
    """Return the largest difference of two tensors of one form, relative to the largest magnitude of ``whole``."""
    if identical(whole, received):
        return 0.0
    if whole.is_complex():
        return max(_apart(*parts) for parts in zip(_parts(whole), _parts(received), strict=True))
    if not whole.is_floating_point():
        return math.inf
    a, b = whole.double(), received.double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)) or not torch.equal(
        torch.nan_to_num(a[~finite], nan=0.5), torch.nan_to_num(b[~finite], nan=0.5)
    ):
        return math.inf
    a, b = a[finite], b[finite]
    apart = float((a - b).abs().max()) if a.numel() else 0.0
    if apart == 0:
        return 0.0  # another sign of zero, another NaN's bits
    scale = float(a.abs().max())
    return apart / scale if scale else math.inf


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _plain(tensor.real), _plain(tensor.imag)


def _top1(whole: list[torch.Tensor], received: list[torch.Tensor]) -> float | None:
    """Return the share of equal top-1 classes over the last dimension of the first floating-point tensor with at least
    two classes.
    """
    for a, b in zip(whole, received, strict=True):
        if a.is_floating_point() and a.numel() and a.ndim and a.shape[-1] > 1:
            return float((a.argmax(-1) == b.argmax(-1)).double().mean())
    return None


# Witnesses: a share of the split requests is computed whole on this side, too, and the two answers are compared, for
# users who need certainty. What a witness needs is kept when the request begins (copies of its inputs, the random
# generators, the model's state); the model runs from that once the answer has arrived, without observers, and leaves
# everything as it found it. A difference disables the cut at once, for this client.

# What a forward may change, as it is at one moment: random generators, buffers, the Python state of the modules.
#
# Restored only where it differs: other threads run the same model, and one without state is not touched.


class Moment:
    """The state of a model on construction. Parameters are not kept; Python objects as far as `PythonState`
    finds them.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._generators = self._draws()
        self._state = PythonState(model)
        tensors = {id(tensor): tensor for tensor in (*model.buffers(), *self._state.tensors())}
        kept = [tensor for tensor in tensors.values() if not isinstance(tensor, nn.Parameter) and _writable(tensor)]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in kept]

    def restore(self) -> None:
        """Restore the state."""
        self._state.restore()
        with torch.no_grad():
            for tensor, values in self._tensors:
                # batch normalisation writes without raising the version counter, so the values are compared
                if not torch.equal(tensor, values):
                    tensor.copy_(values)
        self._put_generators_back()

    def _draws(self) -> list[Any]:
        on_gpu = None if devices.is_host(self._device) else devices.rng_state(self._device)
        return [devices.rng_state(), on_gpu, random.getstate(), np.random.get_state(legacy=False)]  # noqa: NPY002 (models draw from it)

    def _put_generators_back(self) -> None:
        cpu, gpu, python, numpy = self._generators
        moved = [not _equal(before, now) for before, now in zip(self._generators, self._draws(), strict=True)]
        if moved[0]:
            devices.set_rng_state(cpu)
        if moved[1]:
            devices.set_rng_state(gpu, self._device)
        if moved[2]:
            random.setstate(python)
        if moved[3]:
            np.random.set_state(numpy)  # noqa: NPY002


def _writable(tensor: torch.Tensor) -> bool:
    """Return whether a copy can be written back: no meta tensor, and no element that appears twice."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return not any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)


log = logging.getLogger(__name__)

RUNS_KEPT: Final = 1024
UNKNOWN: Final = WitnessComparison(False, math.inf, None, "nothing")


@short
@dataclass(frozen=True, slots=True)
class Witness:
    """The result of comparing one answer with the whole model's."""

    same: bool  # nothing differs that may not
    bits: bool  # every bit is equal
    exact: bool  # the machines are of the same kind, and every bit counted
    largest: float  # difference, in units of the output's scale (its largest magnitude); 0.0: none
    tolerance: float  # the allowed difference; 0.0 where every bit counts
    top1: float | None  # share of rows whose largest value is at the same place; None without such rows
    compared: str  # what was compared, as text
    ns: int  # its time, including keeping the inputs; in no row of the request's times
    finding: str = ""  # what differs, as text
    # where not `same`: the output received, which was replaced
    received: Any = field(default=None, repr=False, compare=False)
    # the answer's output is the whole model's

    def as_dict(self) -> dict[str, Any]:
        """JSON-able except for infinities; without the received output."""
        names = ("same", "bits", "exact", "largest", "tolerance", "top1", "compared", "ns", "finding")
        return {name: getattr(self, name) for name in names}


class EvenShare:
    """Selects a share evenly: of n, ceil(n * share), the first included, independent of timing."""

    def __init__(self, share: float) -> None:
        self._share = Fraction(repr(float(share)))  # repr gives a tenth for 0.1, not the nearest binary fraction
        self._numbers = itertools.count()

    def take(self) -> bool:
        """Return whether the next one is selected. Thread-safe."""
        number = next(self._numbers)
        return math.ceil((number + 1) * self._share) > math.ceil(number * self._share)


def check_share(value: float) -> float:
    """``value``, or SpecError unless it is a number from 0 to 1."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not known or not 0 <= value <= 1:  # rejects NaN, too
        raise SpecError(f"witness={value!r}: must be a share of the requests, a number from 0 to 1")
    return float(value)


class InitialState:
    """The initial state of one request: inputs (copies), autocast, random generators, the model's state."""

    def __init__(self, model: nn.Module, device: torch.device, call: Call) -> None:
        self.call = Call(*copied(call.args, dict(call.kwargs)))
        self._model, self._device = model, device
        self.mark()

    def mark(self) -> None:
        """Called when the head begins, with the same inputs, which an earlier head may have written to."""
        self.around = context.ambient()
        self._before = Moment(self._model, self._device)

    def whole(self, find: ClassFinder) -> Any:
        """Return the model's output, on the CPU, as without the head; everything is restored afterwards.

        ``find`` finds the classes of its containers.
        """
        args, kwargs = self.call.args, dict(self.call.kwargs)
        if self._device.type != "cpu":
            args, kwargs = to_device(args, self._device), to_device(kwargs, self._device)
        now = Moment(self._model, self._device)
        self._before.restore()
        try:
            with context.restored(self.around):
                structure, tensors = flatten(run_plain(self._model, args, kwargs))
            # copies: an output may be a buffer, which is restored
            return unflatten(structure, [tensor.detach().cpu().clone() for tensor in tensors], find)
        finally:
            now.restore()


class Witnesses:
    """The witnesses of one client: which requests have one, their results, and the cuts that are disabled because of
    them.
    """

    def __init__(self, wrapped: WrappedModel, share: float, find: ClassFinder) -> None:
        self.share = share
        self._wrapped = wrapped
        self._taken = EvenShare(share)
        self._find = find
        self._refused: dict[str, str] = {}
        self._own = threading.local()
        if share:
            _unlike({}, wrapped.device)  # this machine's properties: read once, and not in the first request

    @property
    def refused(self) -> Mapping[str, str]:
        """Layers whose cuts were found wrong ("input" among them), and the reason."""
        return dict(self._refused)

    def keep(self, call: Call) -> InitialState | None:
        """Return what a witness of this request will need; None if it has none."""
        if not self.share or not self._taken.take():
            return None
        return InitialState(self._wrapped.model, self._wrapped.device, call)

    def check_cut(self, cut: str, layer_id: int = -1) -> None:
        """Raise CutRefused for a layer whose cut is disabled."""
        if cut in self._refused:
            where = INPUT if cut == INPUT else f"layer {layer_id} ({cut})"
            raise CutRefused(f"cannot cut after {where}: {self._refused[cut]}")

    def between(self, start: int | None, end: int) -> int:
        """Return nanoseconds between two stamps in which this thread ran witnesses."""
        runs: deque[tuple[int, int]] = getattr(self._own, "runs", deque())
        begin = end if start is None else start
        return sum(max(0, min(end, stop) - max(begin, started)) for started, stop in runs)

    def judge(
        self, kept: InitialState, received: Any, cut: str, request_id: int, about: Mapping[str, str], kept_ns: int
    ) -> tuple[Witness, Any]:
        """(the witness, the answer's output): ``received`` if it is equal, else the whole model's own.

        ``about``: the server's description of its machine. A difference disables ``cut``.
        """
        started, device = now_ns(), self._wrapped.device
        apart, limit = _unlike(about, device), 0.0
        output, found, how, more = received, UNKNOWN, "", ""
        try:
            output = kept.whole(self._find)
            found = compare(output, received, self._find)
            limit = _limit(kept, output, about, self._wrapped.model, device) if apart else 0.0
        except Exception as error:  # the split run did not raise: a difference like any other
            how = f"cannot be computed whole here ({type(error).__name__}: {one_line(str(error))[:200]})"
        same = found.within(limit) if apart else found.bits
        if not same:
            how, more = (how, "") if how else _difference(found, limit, apart)
            self._refuse(cut, f"witness: request {request_id} {how}")
            log.warning("cut %s is out of use: witness: request %d %s%s", cut, request_id, how, more)
        stopped = now_ns()
        self._ran(started, stopped)
        ns = stopped - started + kept_ns
        log.debug("witness: request %d cut after %s: %s, %.1f ms", request_id, cut, how or "the same", ns / 1e6)
        came = None if same else received
        made = Witness(same, found.bits, not apart, found.largest, limit, found.top1, found.what, ns, how + more, came)
        return made, received if same else output

    def _refuse(self, cut: str, reason: str) -> None:
        self._wrapped.refuse(cut, self._refused.setdefault(cut, reason))

    def _ran(self, started: int, stopped: int) -> None:
        if not hasattr(self._own, "runs"):
            self._own.runs = deque(maxlen=RUNS_KEPT)
        self._own.runs.append((started, stopped))


def _unlike(about: Mapping[str, str], device: torch.device) -> list[str]:

    return unlike(kind(device), about)


def _limit(kept: InitialState, whole: Any, about: Mapping[str, str], model: nn.Module, device: torch.device) -> float:
    """Return the tolerance for this output, by the dtypes that both sides may have computed with."""
    formats = {tensor.dtype for tensor in (*model.parameters(), *flatten(whole)[1])}
    formats |= {dtype_named(name) for _, name in kept.around["autocast"]}
    return tolerance_between(formats, about, device)


def _difference(found: WitnessComparison, limit: float, apart: list[str]) -> tuple[str, str]:
    """Return how it differs, and what else is known."""
    if math.isinf(found.largest):
        how = "in types, shapes, whole numbers, NaN or infinities"
    elif found.largest:
        how = f"by {found.largest:.2g} of its scale"
    else:
        how = "in the sign of a zero or the bits of a NaN"
    top1 = "" if found.top1 is None else f", top-1 the same in {100 * found.top1:.4g} % of its rows"
    allowed = f", {limit:.2g} may be ({'; '.join(apart)})" if apart else ""
    return f"differs {how}", f"{top1}{allowed}"
