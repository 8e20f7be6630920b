"""Gates: where calls of one model that run in lockstep meet and pass through a module as one.

There are two kinds, and each is verified by running it before it is used. A `RowGate` is for a row-wise module. A
`BlockGate` is for a decoder block that keeps what it has read in a `DynamicCache` of transformers: rows of several
texts pass through it with one ragged cache, padded on the left to the longest.

May import purity, state, modules, forward.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.forward import UNSEEN, uninterrupted
from shared_hooks.modules import Shim, running
from shared_hooks.state import PythonState
from shared_hooks.state.probes import Dice
from shared_hooks.tensors import tensors_in

__all__ = ["BlockGate", "Form", "Gate", "GateRequest", "RowGate", "ShimEntry", "is_row_wise", "nobodys", "travelling"]


# A gate replaces the forward of one module: calls that run in lock-step meet there and run as one. It lies below the
# module's shim, so that sessions and observers see each call as it would be alone. Calls outside of a lock-step pass
# through.

# Whether a module is row-wise: it computes along the last dimension, and no row of the others depends on another row.
#
# Whether its Python writes state is checked by `purity`. Here the module runs on random rows. No kernel may draw
# random numbers, branch on values, return integers or write to existing tensors: then one run shows what every run
# does. A row of NaN must stay the only one: NaN survives all arithmetic, so that it would show in another row that
# read it. And rows alone, together and in another order must agree.

ROUNDINGS = 8
"""The tolerated difference of results, as root mean square in units of the dtype's rounding: matrix products of one row
and of several rows add up in different orders.
"""

_DECIDES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


class _Decides(Exception):
    """A kernel whose work depends on values, not only on shapes, or that writes to other memory than it is given."""


class _Kernels(TorchDispatchMode):
    """Checks all kernels of a call before they run. Raises `_Decides`."""

    def __init__(self, *, may_draw: bool = False) -> None:
        """``may_draw``: the caller checks itself whether a generator was used; attention's kernels only might."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._refused = _DECIDES - {torch.Tag.nondeterministic_seeded} if may_draw else _DECIDES
        self._made: dict[int, torch.Tensor] = {}
        """By storage, what the call has created."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(tensors_in((args, kwargs or {})))
        storages = {_storage(tensor) for tensor in given}
        decides = not self._refused.isdisjoint(func.tags) and not _looks_up(func, args)
        if decides or (func._schema.is_mutable and not storages <= self._made.keys()):
            raise _Decides(str(func))
        result = func(*args, **(kwargs or {}))
        floating = any(tensor.dtype.is_floating_point for tensor in given)
        for tensor in tensors_in(result):
            if floating and not tensor.dtype.is_floating_point:
                raise _Decides(str(func))
            if _storage(tensor) not in storages:
                self._made[_storage(tensor)] = tensor
        return result


def _looks_up(func: Any, args: Any) -> bool:
    """Return whether a kernel looks up elements by index, so that its result's size does not depend on values."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(one is None or one.dtype in (torch.int32, torch.int64) for one in args[1])


def is_row_wise(forward: Callable[[torch.Tensor], Any], like: torch.Tensor) -> bool:
    """Return whether ``forward`` is row-wise for floating-point tensors of the rank, last dimension, dtype and device
    of ``like``.

    It runs about ten times on up to six rows of random numbers; ``like`` is not read. An exception means no.
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


Form = tuple[Any, ...]
"""What calls must have in common to pass through a gate as one."""

LOOKS = 8
"""How often a gate that was not quiet is verified: a model may build something in its first steps."""

_copied_parts: Any = torch.split_with_sizes_copy  # annotated for its other variant, with out=


class Participant(Protocol):
    """One of the calls in lockstep."""

    def arrive(self, gate: Gate, form: Form, request: GateRequest) -> Any:
        """Return the module's result for a request, possibly together with others."""

    @property
    def may_meet(self) -> bool:
        """Whether other calls are in progress, and no thread-wide setting would affect them."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether the model's Python state is as before all calls: otherwise the others would overwrite what this one
        has written there while it waits.
        """
        ...


travelling: ContextVar[Participant | None] = ContextVar("isthmus_travelling", default=None)


@contextmanager
def nobodys() -> Iterator[None]:
    """In the block nothing belongs to a session or lockstep: it runs rows of several calls, or of none."""
    tokens = travelling.set(None), running.set(UNSEEN)
    try:
        yield
    finally:
        travelling.reset(tokens[0])
        running.reset(tokens[1])


def _sees_inside() -> bool:
    """Return whether the runner of this call observes the modules inside: it counts their calls, or ends at one of
    them.
    """
    runner = running.get()
    return runner is not None and not runner.is_bare and getattr(runner, "sees_inside", True)


class GateRequest(Protocol):
    """A call that has reached a gate."""

    def alone(self) -> Any:
        """Run the module for this call alone."""


class ShimEntry:
    """What a module's shim calls: its own forward, or its gate, which copies of the module share."""

    __slots__ = ("forward", "gate")

    def __init__(self, forward: Callable[..., Any], gate: Gate) -> None:
        self.forward = forward
        self.gate = gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        participant = travelling.get()
        if participant is None or not participant.may_meet:
            return self.forward(*args, **kwargs)
        return self.gate.call(participant, self.forward, args, kwargs)


class Gate(ABC):
    """Where calls of one module, and of its copies with the same weights, meet."""

    def __init__(self, module: nn.Module, number: int, copies: Sequence[nn.Module] = ()) -> None:
        """``number``: the module's index in its model."""
        self.module = module
        self.number = number
        self.users = 0
        self._inside = [child for one in (module, *copies) for child in one.modules() if child is not one]
        self._quiet = bool(copies)
        self._looks = LOOKS

    @abstractmethod
    def call(self, participant: Participant, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what ``forward`` returns for these arguments, in lockstep with others if that is verified."""

    @abstractmethod
    def through(self, several: Sequence[Any]) -> list[Any] | None:
        """Return the module's results for these requests, which have one form, each in its own memory; None if they
        must run alone.

        Raises what the module raises; then nothing has changed.
        """

    def look_again(self) -> None:
        """The model's Python state has changed: verify the next call again."""
        self._quiet = False

    def _is_quiet(self, participant: Participant) -> bool:
        if not self._quiet and self._looks:
            self._quiet = participant.is_quiet
            self._looks -= not self._quiet
        return self._quiet

    @property
    def _is_watched(self) -> bool:
        """Whether hooks observe calls inside, which must not see others' rows."""
        for module in self._inside:
            shim = module.__dict__.get("forward")
            if module._forward_hooks or module._forward_pre_hooks or (isinstance(shim, Shim) and shim.watching):
                return True
        return False


@dataclass(frozen=True)
class _Rows:
    forward: Callable[[torch.Tensor], Any]
    rows: torch.Tensor

    def alone(self) -> Any:
        return self.forward(self.rows)


class RowGate(Gate):
    """A gate for a row-wise module that writes no state."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], number: int, copies: Sequence[nn.Module] = ()
    ) -> None:
        super().__init__(module, number, copies)
        self._forward = forward
        self._known: dict[Form, bool] = {}

    def call(self, participant: Participant, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return forward(*args, **kwargs)
        (rows,) = args
        if type(rows) is not torch.Tensor or rows.dim() < 2 or (self._inside and _sees_inside()):
            return forward(rows)
        form = rows.dim(), rows.shape[-1], rows.dtype, rows.device
        known = self._known.get(form)
        if known is None:
            if self._is_watched:
                return forward(rows)
            with nobodys():
                known = self._known[form] = is_row_wise(self._forward, rows)
        if not known or not self._is_quiet(participant):
            return forward(rows)
        return participant.arrive(self, form, _Rows(forward, rows))

    def through(self, several: Sequence[_Rows]) -> list[torch.Tensor] | None:
        if self._is_watched:
            return None
        rows = [one.rows for one in several]
        alike = all(one.shape[1:] == rows[0].shape[1:] for one in rows)
        ones = (1,) * (rows[0].dim() - 2)
        flat = rows if alike else [one.reshape(-1, *ones, one.shape[-1]) for one in rows]
        found = self._forward(torch.cat(flat))
        parts: list[torch.Tensor] = list(_copied_parts(found, [one.shape[0] for one in flat]))
        return parts if alike else [part.reshape(*one.shape[:-1], -1) for part, one in zip(parts, rows, strict=True)]


# A block of a decoder gets rows of one token each, and a state in which it looks up and adds keys and values. Those
# of several texts have several lengths: side by side they are padded on the left, and a mask marks the valid ones.
# The block's own code runs once for all, over a stand-in for their states, which can be updated and nothing else.
# What each text keeps is stored as before, by its own state's layer, once the block has returned.
#
# Whether a block allows this is tried when calls first meet, with calls of the same form and lengths: alone and
# together, padded further than necessary. Their contents are random, so that no client's numbers decide it. No kernel
# may branch on values or draw random numbers, nor may Python state change. A block may behave differently from some
# length on: batches are never longer than what was tried.

TRIALS = 3
"""How often a form is tried before its calls pass through together."""
LONGER, MOST_LONGER = 4, 4096
"""After the first trial, rows are padded to `LONGER` times their length, by at most `MOST_LONGER` tokens. Calls pass
through together up to the longest length that was tried.
"""
MOST_APART = 0.05 / ROUNDINGS
"""A block is a chain of about eight products: eight times the roundings of one, in short dtypes up to a twentieth."""
MOST_FORMS = 16
"""The number of forms that a gate tries; others run alone."""
MOST_FILLED = 4
"""Calls run alone if padding would take more than this many times the tokens that they hold."""
_CACHE = ("transformers.cache_utils", "DynamicCache")
_LAYERS = ("transformers.cache_utils", "DynamicLayer"), ("transformers.cache_utils", "DynamicSlidingWindowLayer")


class _RunAlone(Exception):
    """This call cannot pass through with others."""


class BlockGate(Gate):
    """A gate for a decoder block that updates one layer of a `DynamicCache`."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], number: int, copies: Sequence[nn.Module], layer: int
    ) -> None:
        """``layer``: of the cache, updated by this block only."""
        super().__init__(module, number, copies)
        self._forward = forward
        self._layer = layer
        names = list(_parameters(forward))
        self._mask_at = names.index(_MASK) if _MASK in names else None
        self._tried: dict[Form, list[int]] = {}
        """The lengths at which a form was tried successfully; empty after a failure."""
        self._weights: dict[Form, list[bool]] = {}
        """Which tensors of a form's result have an element for each token, like attention weights."""

    def call(self, participant: Participant, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not _sees_inside():
            try:
                call = _BlockCall(forward, args, kwargs, self._layer, self._mask_at)
            except _RunAlone:
                call = None
            if call is not None and self._may_share(call.form) and self._is_quiet(participant):
                return participant.arrive(self, call.form, call)
        return forward(*args, **kwargs)

    def _may_share(self, form: Form) -> bool:
        return self._tried[form] != [] if form in self._tried else len(self._tried) < MOST_FORMS

    def through(self, several: Sequence[_BlockCall]) -> list[Any] | None:
        lengths = [call.length for call in several for _ in range(call.rows)]
        if self._is_watched or max(lengths) * len(lengths) > MOST_FILLED * sum(lengths):
            return None
        form, width = several[0].form, max(lengths)
        tried = self._tried.get(form, [])
        if len(tried) < TRIALS or width > max(tried):
            further = min(LONGER * width, width + MOST_LONGER) if tried else width + 1
            drawn = torch.Generator().manual_seed(len(tried))
            held = self._holds([call.like_this(drawn) for call in several], further)
            self._tried[form] = [*tried, further] if held else []
            return None
        try:
            found, layers = self._together(several, width)
        except _RunAlone:
            self._tried[form] = []
            return None
        with uninterrupted():
            for call, layer in zip(several, layers, strict=True):
                vars(call.layer).update(vars(layer))
        return found

    def _together(
        self, several: Sequence[_BlockCall], width: int, *, is_try: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Return, with padding to ``width``, the block's result for each call, and the updated layers of their
        caches.
        """
        caches = _Caches([(call.layer, call.rows) for call in several], self._layer, width, noise=is_try)
        args, kwargs = _side_by_side(several, caches, width, self._mask_at)
        with _Kernels(may_draw=True) if is_try else nullcontext():
            output = self._forward(*args, **kwargs)
        if not caches.layers or caches.refused:
            raise _RunAlone
        by_width = [one.dim() == 4 and one.shape[-1] == width for one in _tensors_of(output)] if is_try else []
        weights = self._weights.setdefault(several[0].form, by_width)
        if is_try and weights != by_width:
            raise _RunAlone
        return _parted(output, [(call.rows, call.length) for call in several], iter(weights)), caches.layers

    def _holds(self, several: Sequence[_BlockCall], width: int) -> bool:
        """Return whether each call gets together, padded to ``width``, what it gets alone."""
        before, dice = PythonState(self.module, settings=False), Dice()
        held = False
        try:
            found, layers = self._together(several, width, is_try=True)
            alone = [call.on_a_copy(self._forward) for call in several]
            pairs = [
                (one, other)
                for output, layer, (wanted, kept) in zip(found, layers, alone, strict=True)
                for one, other in zip(
                    (*_tensors_of(output), layer.keys, layer.values),
                    (*_tensors_of(wanted), kept.keys, kept.values),
                    strict=True,
                )
            ]
            held = not dice.rolled and all(
                one.shape == other.shape and _agree(one, other, min(8 * torch.finfo(one.dtype).eps, MOST_APART))
                for one, other in pairs
            )
        except Exception:
            held = False
        finally:
            if dice.rolled:
                dice.restore()
            if before.changes():
                before.restore()
                held = False
        return held


_MASK = "attention_mask"


def _parameters(forward: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        return []


class _BlockCall:
    """A call of a block with one token per row and a state; a `GateRequest`."""

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layer: int,
        mask_at: int | None,
    ) -> None:
        """Raises `_RunAlone` for any other call."""
        self.forward = forward
        self.args = args
        self.kwargs = kwargs
        hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        self.state: Any = next((value for value in (*args, *kwargs.values()) if _is_a(value, _CACHE)), None)
        if hidden is None or hidden.dim() != 3 or hidden.shape[1] != 1 or not hidden.is_floating_point():
            raise _RunAlone
        layers = () if self.state is None else self.state.layers
        if len(layers) <= layer or not _is_a(layers[layer], *_LAYERS) or getattr(self.state, "offloading", False):
            raise _RunAlone
        self.layer, self.at, self._mask_at = layers[layer], layer, mask_at
        self.rows = hidden.shape[0]
        keys, values = self.layer.keys, self.layer.values
        for one in (hidden, keys, values):
            if type(one) is not torch.Tensor or one.shape[0] != self.rows or one.device != hidden.device:
                raise _RunAlone
        if keys.dim() != 4 or values.dim() != 4:
            raise _RunAlone
        self.length = keys.shape[2] + 1
        self.hidden = hidden
        self.has_mask = (
            args[mask_at] if mask_at is not None and mask_at < len(args) else kwargs.get(_MASK)
        ) is not None
        described = [(name, self._described(value)) for name, value in (*enumerate(args), *kwargs.items())]
        self.form: Form = (*described, keys.dtype, values.dtype, keys.shape[1], keys.shape[3], values.shape[3])

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor or value.dim() < 2 or value.shape[0] not in (1, self.rows):
                raise _RunAlone
            shape = tuple(value.shape[1:])
            return (*shape[:-1], _MASK) if self.is_mask(value) else shape, value.dtype, value.device
        if value is self.state or value is None or type(value) in (bool, int, float, str):
            return _MASK if value is self.state else (type(value), value)
        if type(value) is tuple:
            return tuple(map(self._described, value))
        raise _RunAlone  # a list or a dictionary may be written to

    def is_mask(self, value: torch.Tensor) -> bool:
        """Return whether a tensor is a mask: it has a value for each token that has been read."""
        return value.dim() == 4 and value.shape[-1] == self.length

    def alone(self) -> Any:
        return self.forward(*self.args, **self.kwargs)

    def like_this(self, generator: torch.Generator) -> _BlockCall:
        """Return a call of this form and length with another state, whose rows, keys and values are random."""

        def drawn(like: torch.Tensor) -> torch.Tensor:
            return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)

        state = copy.copy(self.state)
        state.layers = list(self.state.layers)
        made = state.layers[self.at] = copy.copy(self.layer)
        made.keys, made.values = drawn(made.keys), drawn(made.values)
        hidden = drawn(self.hidden)

        def other(value: Any) -> Any:
            return state if value is self.state else hidden if value is self.hidden else value

        args = tuple(map(other, self.args))
        kwargs = {name: other(value) for name, value in self.kwargs.items()}
        return _BlockCall(self.forward, args, kwargs, self.at, self._mask_at)

    def on_a_copy(self, forward: Callable[..., Any]) -> tuple[Any, Any]:
        """Return its result alone, and its layer of the state afterwards, on a copy. Raises `_RunAlone` if other layers
        change.
        """
        state = copy.copy(self.state)
        state.layers = [copy.copy(layer) for layer in self.state.layers]
        args = [state if value is self.state else value for value in self.args]
        kwargs = {name: state if value is self.state else value for name, value in self.kwargs.items()}
        output = forward(*args, **kwargs)
        for at, (now, was) in enumerate(zip(state.layers, self.state.layers, strict=True)):
            if at != self.at and any(value is not vars(was).get(name) for name, value in vars(now).items()):
                raise _RunAlone
        return output, state.layers[self.at]


class _Caches:
    """Takes the place of several calls' states; it can be updated once, and nothing else."""

    __slots__ = ("_given", "_layer", "_noise", "_width", "layers", "refused")

    def __init__(self, given: Sequence[tuple[Any, int]], layer: int, width: int, noise: bool) -> None:
        """``given``: the layer of each state, and its number of rows."""
        self.layers: list[Any] = []
        """Copies, with what was added."""
        self.refused = False
        self._given, self._layer, self._width, self._noise = given, layer, width, noise

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As that of a `DynamicCache`: the keys and values of all rows, filled up on the left."""
        if self.layers or layer_idx != self._layer:
            raise self._refusal()
        sizes = [rows for _, rows in self._given]
        seen = []
        for (layer, _), more, others in zip(self._given, keys.split(sizes), values.split(sizes), strict=True):
            made = copy.copy(layer)
            seen.append(made.update(more, others, *args, **kwargs))  # with a window, more than the layer keeps
            if seen[-1][0].shape[2] != layer.keys.shape[2] + 1:  # where more is kept than the window, to roll back to
                raise self._refusal()
            self.layers.append(made)
        return self._filled([one for one, _ in seen]), self._filled([one for _, one in seen])

    def _filled(self, several: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([_filled_up(one, self._width, 2, 0.0, self._noise) for one in several])

    def _refusal(self) -> _RunAlone:
        self.refused = True
        return _RunAlone()

    def __getattr__(self, name: str) -> Any:
        raise self._refusal()


def _filled_up(tensor: torch.Tensor, width: int, dimension: int, value: Any, noise: bool = False) -> torch.Tensor:
    """Padded with ``value`` before its first elements; ``noise``: with random numbers."""
    missing = width - tensor.shape[dimension]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dimension] = missing
    if noise:
        # values of this tensor, elsewhere and larger
        own = tensor.flip(dimension).mul(3)
        own = torch.cat([own] * (missing // own.shape[dimension] + 1), dimension)
        return torch.cat([own.narrow(dimension, 0, missing), tensor], dimension)
    return torch.cat([tensor.new_full(shape, value), tensor], dimension)


def _side_by_side(
    several: Sequence[_BlockCall], caches: _Caches, width: int, mask_at: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of one call for all. Raises `_RunAlone`."""
    first = several[0]
    differ = any(call.length != width for call in several)

    def joined(values: Sequence[Any]) -> Any:
        one = values[0]
        if isinstance(one, torch.Tensor):
            parts = []
            for call, tensor in zip(several, values, strict=True):
                rows = tensor.expand(call.rows, *tensor.shape[1:])
                if differ and call.is_mask(tensor):
                    rows = _filled_up(rows, width, 3, _hidden(tensor.dtype))
                parts.append(rows)
            return torch.cat(parts)
        if one is first.state:
            return caches
        return tuple(map(joined, zip(*values, strict=True))) if type(one) is tuple else one

    args: tuple[Any, ...] = joined([call.args for call in several])
    kwargs = {name: joined([call.kwargs[name] for call in several]) for name in first.kwargs}
    if differ and not first.has_mask:
        mask = torch.cat(
            [
                _filled_up(first.hidden.new_zeros(call.rows, 1, 1, call.length), width, 3, _hidden(first.hidden.dtype))
                for call in several
            ]
        )
        if mask_at is not None and mask_at < len(args):
            args = (*args[:mask_at], mask, *args[mask_at + 1 :])
        elif mask_at is not None or _MASK in kwargs:
            kwargs[_MASK] = mask
        else:
            raise _RunAlone
    return args, kwargs


def _hidden(dtype: torch.dtype) -> Any:
    """Return the value that masks a token."""
    if dtype is torch.bool:
        return False
    if not dtype.is_floating_point:
        raise _RunAlone
    return torch.finfo(dtype).min


def _parted(output: Any, sizes: Sequence[tuple[int, int]], weights: Iterator[bool]) -> list[Any]:
    """Return each call's part of a result, in its own memory. Raises `_RunAlone`.

    ``sizes``: its rows, and its tokens where a tensor has an element for each.
    """
    if type(output) is torch.Tensor and output.dim() and output.shape[0] == sum(rows for rows, _ in sizes):
        parts: list[torch.Tensor] = list(_copied_parts(output, [rows for rows, _ in sizes]))
        if next(weights):
            return [part[..., -tokens:].contiguous() for part, (_, tokens) in zip(parts, sizes, strict=True)]
        return parts
    if output is None:
        return [None] * len(sizes)
    if type(output) in (tuple, list) and output:
        return list(map(type(output), zip(*[_parted(one, sizes, weights) for one in output], strict=True)))
    raise _RunAlone


def _tensors_of(output: Any) -> list[torch.Tensor]:
    found = list(tensors_in(output))
    if not found:
        raise _RunAlone
    return found


def _is_a(value: Any, *names: tuple[str, str]) -> bool:
    return (type(value).__module__, type(value).__qualname__) in names
