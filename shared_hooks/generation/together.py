"""Continuous batching for any architecture: calls of one model run in lock-step and share what is row-wise.


May import purity, state, modules, forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from greenlet import GreenletExit, greenlet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import devices
from shared_hooks.errors import PlanMismatch
from shared_hooks.forward import UNSEEN, Session, uninterrupted
from shared_hooks.modules import Shim, attach, running
from shared_hooks.purity import pure_modules
from shared_hooks.state import PythonState
from shared_hooks.tensors import tensors_in

__all__ = ["Ended", "Outcome", "Together"]


# A gate stands for the forward of one module: calls that run in lock-step meet there and go through as one.
# It lies below the module's shim, so that sessions and observers see each call as it would be alone. What runs outside
# of a lock-step goes straight through.

# Whether a module is row-wise: the last dimension is computed with, and no row of the others sees another row.
#
# That its Python writes no state is for `purity` to say. Here the module runs on random rows. No kernel may draw
# random numbers, decide by values, give integers or write to what was there: then one run shows what every run does.
# A row of NaN must stay the only one: NaN survives all arithmetic, so that it would show in what another row read.
# And rows alone, together and in another order must agree.

ROUNDINGS = 8
"""How far results may differ, by root mean square, in units of the dtype's rounding: a matrix product of one row and
one of several rows add up in different orders."""

_DECIDES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


class _Decides(Exception):
    """A kernel whose work depends on values, not on shapes alone, or that writes to what it was not given to write."""


class _Kernels(TorchDispatchMode):
    """Looks at all kernels of a call, before they run. Raises `_Decides`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, torch.Tensor] = {}
        """What the call has made, by storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(tensors_in((args, kwargs or {})))
        storages = {_storage(tensor) for tensor in given}
        if not _DECIDES.isdisjoint(func.tags) or (func._schema.is_mutable and not storages <= self._made.keys()):
            raise _Decides(str(func))
        result = func(*args, **(kwargs or {}))
        floating = any(tensor.dtype.is_floating_point for tensor in given)
        for tensor in tensors_in(result):
            if floating and not tensor.dtype.is_floating_point:
                raise _Decides(str(func))
            if _storage(tensor) not in storages:
                self._made[_storage(tensor)] = tensor
        return result


def is_row_wise(forward: Callable[[torch.Tensor], Any], like: torch.Tensor) -> bool:
    """Whether ``forward`` is, for floating-point tensors of the rank, last dimension, dtype and device of ``like``.

    It runs about ten times on up to six rows of random numbers; ``like`` is not read. What it raises means no.
    """
    if not like.dtype.is_floating_point or like.dim() < 2:
        return False

    def looked_at(rows: torch.Tensor) -> Any:
        with _Kernels():
            return forward(rows)

    try:
        with torch.no_grad():
            return _holds(looked_at, like)
    except Exception:
        return False


def _holds(forward: Callable[[torch.Tensor], Any], like: torch.Tensor) -> bool:
    ones = (1,) * (like.dim() - 2)
    width = like.shape[-1]
    random = torch.randn((6, *ones, width), generator=torch.Generator().manual_seed(0))
    rows = random.to(like.device, like.dtype)
    together = forward(rows)
    if type(together) is not torch.Tensor or together.shape[:-1] != rows.shape[:-1]:
        return False
    if not together.dtype.is_floating_point or _storage(together) == _storage(rows):
        return False
    for number in (0, 3, 5):
        others = [row for row in range(6) if row != number]
        altered = rows.clone()
        altered[number] = torch.nan
        if not torch.equal(forward(altered)[others], together[others]):
            return False
    order = [3, 1, 5, 0, 4, 2]
    one_two_three = torch.cat([forward(rows[:1]), forward(rows[1:3]), forward(rows[3:])])
    pairs = [(forward(rows[order]), together[order]), (one_two_three, together)]
    if like.dim() > 2:
        block = rows.reshape(2, 3, *ones[1:], width)
        pairs.append((forward(block).reshape(together.shape), together))
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (rows, together))
    return all(_agree(one, other, eps) for one, other in pairs)


def _agree(one: torch.Tensor, other: torch.Tensor, eps: float) -> bool:
    apart, scale = (value.double().square().mean().sqrt() for value in (one - other, other))
    return one.shape == other.shape and bool(apart <= ROUNDINGS * eps * scale)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


Form = tuple[int, int, torch.dtype, torch.device]
"""Rank, last dimension, dtype and device of rows."""

LOOKS = 8
"""How often a gate is looked at that was not quiet: a model may build something in its first steps."""

_copied_parts: Any = torch.split_with_sizes_copy  # annotated for its other variant, with out=


class Traveller(Protocol):
    """One of the calls in lock-step."""

    def arrive(self, gate: Gate, form: Form, rows: torch.Tensor) -> Any:
        """What the module gives for ``rows``."""

    @property
    def may_meet(self) -> bool:
        """Whether others are under way, and nothing is set for the thread that would hold for them, too."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether the model's Python state is as it was before all calls: what this one has written there would be
        overwritten by the others while it waits.
        """
        ...


travelling: ContextVar[Traveller | None] = ContextVar("isthmus_travelling", default=None)


@contextmanager
def nobodys() -> Iterator[None]:
    """What runs in the block is of no session and in no lock-step: several calls' rows, or none's."""
    tokens = travelling.set(None), running.set(UNSEEN)
    try:
        yield
    finally:
        travelling.reset(tokens[0])
        running.reset(tokens[1])


class Gate:
    """Stands for the forward of one module that writes no state. ``number``: its place in the model; later ones have
    lower ones.
    """

    __slots__ = ("_inside", "_known", "_looks", "_quiet", "forward", "module", "number", "users")

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], number: int, copies: Sequence[nn.Module] = ()
    ) -> None:
        """``copies``: of the module, over the same weights; each has this gate, too."""
        self.module = module
        self.forward = forward
        self.number = number
        self.users = 0
        self._inside = [child for one in (module, *copies) for child in one.modules() if child is not one]
        self._known: dict[Form, bool] = {}
        self._quiet = bool(copies)
        self._looks = LOOKS

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traveller = travelling.get()
        if traveller is None or kwargs or len(args) != 1 or not traveller.may_meet:
            return self.forward(*args, **kwargs)
        (rows,) = args
        if type(rows) is not torch.Tensor or rows.dim() < 2 or (self._inside and isinstance(running.get(), Session)):
            return self.forward(rows)  # a session counts the layers inside
        form = rows.dim(), rows.shape[-1], rows.dtype, rows.device
        known = self._known.get(form)
        if known is None:
            if self._is_watched:
                return self.forward(rows)
            with nobodys():
                known = self._known[form] = is_row_wise(self.forward, rows)
        if not known or not self._is_quiet(traveller):
            return self.forward(rows)
        return traveller.arrive(self, form, rows)

    def look_again(self) -> None:
        """The model's Python state has changed: whoever comes next is looked at again."""
        self._quiet = False

    def _is_quiet(self, traveller: Traveller) -> bool:
        if not self._quiet and self._looks:
            self._quiet = traveller.is_quiet
            self._looks -= not self._quiet
        return self._quiet

    def through(self, several: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The module's results for rows of one form, each in memory of its own; None where they must go alone.

        Raises what the module raises.
        """
        if self._is_watched:
            return None
        alike = all(rows.shape[1:] == several[0].shape[1:] for rows in several)
        ones = (1,) * (several[0].dim() - 2)
        flat = several if alike else [rows.reshape(-1, *ones, rows.shape[-1]) for rows in several]
        found = self.forward(torch.cat(list(flat)))
        parts: list[torch.Tensor] = list(_copied_parts(found, [rows.shape[0] for rows in flat]))
        return (
            parts if alike else [part.reshape(*rows.shape[:-1], -1) for part, rows in zip(parts, several, strict=True)]
        )

    @property
    def _is_watched(self) -> bool:
        """Whether somebody looks at calls inside, and must not be shown the rows of others."""
        for module in self._inside:
            shim = module.__dict__.get("forward")
            if module._forward_hooks or module._forward_pre_hooks or (isinstance(shim, Shim) and shim.watching):
                return True
        return False


# `Together`: calls of one model run at once, and share the work on its weights.
# A decode step reads all weights for one row. Steps of several sessions, whose lengths and caches differ, share each
# module that is row-wise; attention, positions and caches stay each step's own, in the model's own code. So there is no
# code for any architecture here, and nothing of a step's state is touched.

# Calls in lock-step: each is a greenlet of one thread that runs until it comes to a gate.
#
# When all have, those furthest behind go on: the ones that wait at the same gate with rows of one form as one. So calls
# that took different ways come together again. Nothing runs at the same time; a call is put aside only at a gate, and
# only while what torch keeps per thread (gradients, autocast, modes, the stream) is as it was around them all. Context
# variables are each call's own.

Result = TypeVar("Result")
Ended = Callable[[int], BaseException | None]
"""For a call by its number: the error that ends it, or None while it may continue. Asked at every gate."""
_ALONE: Any = object()


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What became of one call: the ``value`` it gave, or the ``error`` it raised."""

    value: Result | None
    error: BaseException | None
    batch_size: int
    """The most calls that went through a gate as one with this one, itself included; 1: what it computed is what it
    would have computed alone, bit for bit."""
    meetings: int
    """How often it went through one with others."""

    def result(self) -> Result:
        """The value. Raises the error."""
        if self.error is not None:
            raise self.error
        value: Any = self.value
        return value  # type: ignore[no-any-return]


class Lockstep(Generic[Result]):
    """Runs these calls once, in the thread that calls `run`."""

    def __init__(
        self,
        calls: Sequence[Callable[[], Result]],
        before: PythonState | None,
        ended: Ended | None = None,
        contexts: Sequence[Context] | None = None,
    ) -> None:
        """``before``: the model's Python state, now; None where each call has a copy of the model."""
        self._ended = ended
        self.before = before
        self.surroundings: Any = None
        self.under_way = len(calls)
        contexts = [copy_context() for _ in calls] if contexts is None else contexts
        self._travellers = [_Traveller(self, *one) for one in zip(range(len(calls)), calls, contexts, strict=True)]

    def run(self) -> list[Outcome[Result]]:
        """In order. What ends this thread's work itself (an exception that comes from outside at a gate) ends all."""
        self.surroundings = _surroundings()
        try:
            with nobodys():
                self._go()
        finally:
            for traveller in self._travellers:
                traveller.leave()
        return [traveller.outcome() for traveller in self._travellers]

    def _go(self) -> None:
        waiting: dict[tuple[Gate, Form], list[_Traveller[Result]]] = {}
        ready = self._travellers
        while ready:
            for traveller in ready:
                if traveller.goes_on():
                    waiting.setdefault(traveller.place, []).append(traveller)
            if not waiting:
                return
            place = min(waiting, key=_number)
            ready = self._through(place[0], waiting.pop(place))

    def _through(self, gate: Gate, group: list[_Traveller[Result]]) -> list[_Traveller[Result]]:
        """All of the group go on, each with its answer."""
        if self._ended is not None:
            group = [traveller for traveller in group if not self._is_ended(traveller)]
        found = None
        if len(group) > 1:
            try:
                found = gate.through([traveller.rows for traveller in group])
            except Exception:
                found = None  # one of them, or all: each finds out for itself
        for number, traveller in enumerate(group):
            del traveller.rows
            traveller.answer = _ALONE
            if found is not None:
                traveller.answer = found[number]
                traveller.meetings += 1
                traveller.batch_size = max(traveller.batch_size, len(group))
        return group

    def _is_ended(self, traveller: _Traveller[Result]) -> bool:
        error = self._ended(traveller.number) if self._ended is not None else None
        if error is not None:
            traveller.leave(error)
        return error is not None


class _Traveller(Generic[Result]):
    """One call; a `gate.Traveller`."""

    place: tuple[Gate, Form]
    rows: torch.Tensor

    def __init__(self, together: Lockstep[Result], number: int, call: Callable[[], Result], context: Context) -> None:
        self.number = number
        self.answer: Any = None
        self.batch_size = 1
        self.meetings = 0
        self._value: Result | None = None
        self._error: BaseException | None = None
        self._ended: BaseException | None = None
        self._together = together
        self._call = call
        self._greenlet = greenlet(self._run)
        self._greenlet.gr_context = context

    def _run(self) -> None:
        travelling.set(self)
        try:
            self._value = self._call()
        except BaseException as error:
            if not isinstance(error, Exception) and error is not self._ended:
                raise  # in `Lockstep.run`
            self._error = error
        finally:
            self._together.under_way -= 1

    # Of the lock-step

    def goes_on(self) -> bool:
        """From the gate where it is, with its answer; False when it came to its end."""
        self._greenlet.switch()
        return not self._greenlet.dead

    def leave(self, error: BaseException | None = None) -> None:
        """It ends where it is, with this ``error``: what it has to put back, it does."""
        self._ended = error
        for raised in (error or GreenletExit(), GreenletExit()):  # its code may catch the first, and go on to a gate
            if self._greenlet:
                self._greenlet.throw(raised)
        self._error = error or self._error

    def outcome(self) -> Outcome[Result]:
        return Outcome(self._value, self._error, self.batch_size, self.meetings)

    # Of its gates

    @property
    def may_meet(self) -> bool:
        together = self._together
        return together.under_way > 1 and _surroundings() == together.surroundings

    @property
    def is_quiet(self) -> bool:
        return self._together.before is None or self._together.before.is_same

    def arrive(self, gate: Gate, form: Form, rows: torch.Tensor) -> Any:
        self.place, self.rows = (gate, form), rows
        with uninterrupted():  # what comes from outside for this call must not come in another
            self._greenlet.parent.switch()
        answer, self.answer = self.answer, None
        return gate.forward(rows) if answer is _ALONE else answer


def _number(place: tuple[Gate, Form]) -> int:
    return place[0].number


def _surroundings() -> tuple[Any, ...]:
    """What torch keeps for the thread, and so for every greenlet of it."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._is_any_autocast_enabled(),
        None if (device := devices.initialized()) is None else devices.current_stream(device),
    )


class Together:
    """Runs calls of one model in lockstep; gates stand on it until `close`. Any number of threads may run calls of
    their own.

    Sums are added up in another order than alone, so the last bits may differ; an `Outcome` says whether they may.
    """

    def __init__(self, model: nn.Module, copies: Sequence[nn.Module] = ()) -> None:
        """``model`` in evaluation, as it will stay. Modules that may write state, draw random numbers or have hooks
        get no gate. ``copies``: of the model, over the same weights, whose calls meet those of the model; then each of
        the calls that run together is of another copy, or of the model.
        """
        numbers = {module: number for number, module in enumerate(model.modules())}
        pure = pure_modules(numbers)
        self._model = model
        self._apart = bool(copies)
        self._python: PythonState | None = None
        alike = list(zip(*(one.modules() for one in (model, *copies)), strict=True))
        self._gated: list[nn.Module] = []
        for same in alike:
            if same[0] not in pure or not _gains(same[0]):
                continue
            self._gated += same
            with attach.lock:
                shims = [attach.attach(one) for one in same]
                gate = shims[0].gate
                if not isinstance(gate, Gate):
                    gate = Gate(same[0], shims[0].forward, numbers[same[0]], same[1:])
                for shim in shims:
                    shim.gate = gate
                    gate.users += 1

    def run(
        self,
        calls: Sequence[Callable[[], Result]],
        ended: Ended | None = None,
        contexts: Sequence[Context] | None = None,
    ) -> list[Outcome[Result]]:
        """What becomes of each call, in order. ``calls`` run the model or parts of it, without gradients, in this
        thread, each with the context variables of its own of ``contexts`` (None: as they are here); the exception of
        one leaves the others alone.

        ``ended`` is asked for a call's number at every gate: the exception that it gives is raised in that call. All
        that met others end in PlanMismatch where the model's Python wrote state on a way it had not taken before: they
        may have read each other's.
        """
        before = None if self._apart else self._state()
        with torch.no_grad():
            outcomes = Lockstep(calls, before, ended, contexts).run()
        if before is None or all(one.batch_size == 1 for one in outcomes) or not (changes := before.changes()):
            return outcomes
        error = PlanMismatch(f"steps that ran together changed {changes[0].name}, and may have read each other's")
        return [replace(one, value=None, error=error) if one.batch_size > 1 else one for one in outcomes]

    def _state(self) -> PythonState:
        """The model's Python state, now."""
        state = self._python
        if state is None or not state.is_same:
            for module in self._gated:
                shim = attach.shim_of(module)
                if shim is not None and isinstance(shim.gate, Gate):
                    shim.gate.look_again()
            state = self._python = PythonState(self._model, settings=False)
        return state

    def close(self) -> None:
        """Takes the gates away."""
        for module in self._gated:
            with attach.lock:
                shim = attach.shim_of(module)
                if shim is not None and isinstance(shim.gate, Gate):
                    shim.gate.users -= 1
                    if self._apart or not shim.gate.users:
                        shim.gate = None
                attach.detach(module)
        self._gated = []

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _gains(module: nn.Module) -> bool:
    """Whether it has weights that several rows can share; to look up one row reads no others."""
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return not module.training and not is_table and any(True for _ in module.parameters())
