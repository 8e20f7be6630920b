"""Record a run, torch function by torch function, as a module that repeats it.

A model's Python branches on data, asks whether it is being traced, and passes numbers around; in a run that has
happened all of this is settled. So a head is exported from its tape, not from the model's code: `Tape` records one run
of the real model, and `TapeReplay` runs the same functions on other inputs, or on an exporter's tensors without data.

What the run's Python read from data is part of the tape, and a replay must compare it: for other values the model might
have run differently (`read_again`, `chosen_again`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.crossing.named import OTHERWISE, as_held, as_sent
from shared_hooks.errors import CutRefused
from shared_hooks.forward import (
    CallKind,
    arguments_of,
    by_truth,
    is_escape,
    is_mapped,
    kind_of,
    name_of,
    shape_from_data,
)
from shared_hooks.modules.attach import running
from shared_hooks.planning import MovingSizes, Size, Terms, value_at


class Ref(NamedTuple):
    """The number of a tensor of a tape."""

    number: int


@dataclass(frozen=True)
class Varying:
    """An integer of a tape that depends on a size of its inputs."""

    terms: Terms

    def at(self, size: Any) -> Any:
        """Return its value. ``size``: of `shared_hooks.planning.value_at`."""
        found, shared = value_at(self.terms, size)
        return found if shared == 1 else found // shared


@dataclass(frozen=True)
class TapeStep:
    """One function that ran; tensors of its arguments as `Ref`, of its result as numbers with their ``shapes``.

    ``value``: the Python value that it read from data, if any; ``reads`` says whether. ``below``: a kernel that belongs
    to no torch function.
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    reads: bool
    value: Any
    below: bool
    autocast: torch.dtype | None
    """The autocast of the CPU that it ran in, if any."""
    chooses: bool = False
    """Whether the shape of a kernel's result depends on data that it read, as far as its name shows."""
    pure: bool = True
    """Whether none of its kernels wrote to its arguments or drew random numbers."""
    fixed: bool = False
    """Whether its shapes count as independent of data: an exporter's tensors without data must agree."""

    @property
    def is_empty(self) -> bool:
        """Whether all of its results have no elements."""
        shapes = self.shapes if self.pure and not self.fixed else ()
        return bool(shapes) and all(0 in one and all(isinstance(size, int) for size in one) for one in shapes)

    @property
    def moves(self) -> bool:
        """Whether an argument depends on a size of the inputs."""
        found: list[Varying] = []
        _mapped((self.args, self.kwargs), Varying, found.append)
        return bool(found)

    def is_like(self, other: TapeStep) -> bool:
        """Return whether both are the same step of two runs."""
        return (
            self.func == other.func
            and (self.results, self.shapes, self.reads, self.autocast)
            == (other.results, other.shapes, other.reads, other.autocast)
            and repr((self.args, self.kwargs)) == repr((other.args, other.kwargs))
        )

    def given(self) -> tuple[int, ...]:
        """Return the numbers of its argument tensors."""
        found: list[int] = []
        _mapped((self.args, self.kwargs), Ref, lambda ref: found.append(ref.number))
        return tuple(found)


@dataclass
class Tape:
    """Records a run inside ``with tape.listening(): ...`` on one thread. ``inputs``: its tensors.

    ``constants``: tensors that no function made: weights and buffers of ``model`` by name, others as they are.
    """

    model: nn.Module
    inputs: Sequence[torch.Tensor]
    steps: list[TapeStep] = field(default_factory=list)
    around: list[TapeStep] = field(default_factory=list)
    """What ran around the model's forward, in the head's own code."""
    constants: dict[int, str | torch.Tensor] = field(default_factory=dict)
    strangers: set[int] = field(default_factory=set)
    """Constants that the model did not hold before the run: it may have made them of its inputs, unobserved."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Tensors by number, kept while recording so that no id is reused; `forget` releases them."""

    def __post_init__(self) -> None:
        self._names = {id(one): name for name, one in (*self.model.named_parameters(), *self.model.named_buffers())}
        self._held = {id(one) for module in self.model.modules() for one in _tensors_of(vars(module))}
        self._numbers: dict[int, int] = {}
        for one in self.inputs:
            self._new(one)

    def listening(self) -> _Listening:
        """Return the context to record in."""
        return _Listening(self)

    def forget(self) -> None:
        """Release the run's tensors."""
        self.tensors.clear()
        self._numbers.clear()

    def of_weights(self) -> list[int]:
        """Return steps that depend only on weights and buffers, which nothing wrote to. Call it before `forget`."""
        storages = [one.untyped_storage()._cdata if one.layout is torch.strided else None for one in self.tensors]
        moved = {None, *(storages[number] for number in range(len(self.inputs)))}
        found = []
        for at, step in enumerate(self.steps):
            given = {storages[number] for number in step.given()}
            if step.pure and not step.reads and not moved & given:
                found.append(at)
            else:
                moved |= given if not step.pure else set()
                moved |= {storages[number] for number in step.results}
        return found

    def begins_like(self, other: Tape) -> bool:
        """Return whether the other tape starts with this one."""
        if len(self.steps) > len(other.steps):
            return False
        return all(one.is_like(two) for one, two in zip(self.steps, other.steps, strict=False))

    def note(
        self, func: Any, name: str, args: Any, kwargs: Any, result: Any, *, below: bool, chooses: bool, pure: bool
    ) -> None:
        """Record a function that has run."""
        kind = kind_of(name, bool(arguments_of(args, kwargs)), result)
        # a head uses addresses, and offsets of tensors in them; for a model that does there is no graph
        if kind is CallKind.FORM or is_escape(name) or name == "storage_offset":
            return
        given = _mapped(args, torch.Tensor, self._ref), _mapped(kwargs, torch.Tensor, self._ref)
        results = arguments_of((result,), {})
        numbers = tuple(self._numbers[id(one)] if id(one) in self._numbers else self._new(one) for one in results)
        reads = kind is CallKind.VALUE
        shapes, dtypes = tuple(tuple(one.shape) for one in results), tuple(one.dtype for one in results)
        steps = self.around if running.get() is None else self.steps
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        steps.append(
            TapeStep(
                name,
                func,
                *given,
                numbers,
                shapes,
                dtypes,
                reads,
                result if reads else None,
                below,
                autocast,
                chooses,
                pure,
            )
        )

    def _new(self, tensor: torch.Tensor) -> int:
        self._numbers[id(tensor)] = number = len(self.tensors)
        self.tensors.append(tensor)
        return number

    def _ref(self, tensor: torch.Tensor) -> Ref:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._new(tensor)
            self.constants[number] = self._names.get(id(tensor), tensor)
            if id(tensor) not in self._names and id(tensor) not in self._held:
                self.strangers.add(number)
        return Ref(number)


class _Listening:
    """Records torch functions, and kernels that belong to none."""

    def __init__(self, tape: Tape) -> None:
        self._kernels = _Kernels(tape)
        self._functions = _Functions(tape, self._kernels)

    def __enter__(self) -> None:
        self._kernels.__enter__()  # type: ignore[no-untyped-call]
        self._functions.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]
        self._kernels.__exit__(*error)  # type: ignore[no-untyped-call]


class _Kernels(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, for more than a second, to shield the method below from it."""
        return False

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.inside = False
        self.chosen, self.drew = False, False
        """Whether a kernel's shape depended on data, or one drew random numbers, since the last function began."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
            chooses = shape_from_data(func) and (func.name() != "aten::index" or by_truth(args))
            draws = torch.Tag.nondeterministic_seeded in func.tags
            self.chosen, self.drew = self.chosen or chooses, self.drew or draws
            if not self.inside:
                pure = not draws and not func._schema.is_mutable
                self.tape.note(func, str(func), args, kwargs or {}, result, below=True, chooses=chooses, pure=pure)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, tape: Tape, kernels: _Kernels) -> None:
        super().__init__()
        self.tape = tape
        self.kernels = kernels

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.kernels.inside or is_mapped(arguments_of(args, kwargs)):
            return func(*args, **kwargs)
        self.kernels.inside, self.kernels.chosen, self.kernels.drew = True, False, False
        try:
            versions = _versions(args, kwargs)
            result = func(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                name, chooses = name_of(func), self.kernels.chosen
                pure = not self.kernels.drew and None not in versions and versions == _versions(args, kwargs)
                self.tape.note(func, name, args, kwargs, result, below=False, chooses=chooses, pure=pure)
        finally:
            self.kernels.inside = False
        return result


def _tensors_of(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's values, including lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(one, depth - 1)


def _versions(args: Any, kwargs: Any) -> list[int | None]:
    """Return how often each tensor was written to; None where torch does not count."""
    return [None if one.is_inference() else one._version for one in arguments_of(args, kwargs)]


def _mapped(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, kind, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, kind, change) for item in value))
    if isinstance(value, dict):
        return {key: _mapped(item, kind, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(item, kind, change) for item in (value.start, value.stop, value.step)))
    return value


def of_any_size(tapes: Sequence[Tape], sizes: Sequence[Size]) -> Tape | None:
    """Combine the tapes of inputs that differ in a size, all but the last, to one; None if they differ in more than
    integers, or the last one contradicts them.
    """
    first = tapes[0]
    read = [[(at, step.value) for at, step in enumerate(tape.steps) if step.reads] for tape in tapes]
    constants = [{at: one if isinstance(one, str) else id(one) for at, one in tape.constants.items()} for tape in tapes]
    if any(one != read[0] for one in read) or any(one != constants[0] for one in constants):
        return None
    moving = MovingSizes.of([tape.steps for tape in tapes[:-1]], sizes[:-1])
    steps = None if moving is None else moving.with_numbers(Varying)
    if moving is None or steps is None:
        return None
    wanted = moving.at(sizes[-1])
    if wanted is None or not all(one.is_like(other) for one, other in zip(wanted, tapes[-1].steps, strict=True)):
        return None
    return replace(first, steps=steps, tensors=[], around=[])


Make = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class WantedTensor:
    """A tensor that a replay returns: ``make`` of the tensors with these numbers, as they are after ``at`` steps."""

    at: int
    numbers: tuple[int, ...]
    make: Make
    picks: tuple[Any, ...] | None = None
    """How it is selected for inputs of other sizes: an index, or two of which one is the same for all."""


class TapeReplay(nn.Module):
    """Runs a tape's functions on other inputs and returns what is wanted; both as tensors are sent (`as_sent`).

    The model is a submodule, so its weights keep their names, after "model.". ``sizes``: inputs and their axes that the
    tape's numbers depend on (`Varying`): of one size, or of a batch and a length. ``done``: steps (`Tape.of_weights`)
    that are run now, once.
    """

    def __init__(
        self,
        tape: Tape,
        wanted: Sequence[WantedTensor],
        sizes: Sequence[tuple[int, int]] = (),
        done: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.model = tape.model
        self._tape = tape
        self._wanted = wanted
        self._sizes = sizes
        for number, one in tape.constants.items():
            if not isinstance(one, str):
                self.register_buffer(f"taken_{number}", one.detach(), persistent=False)
        self._done: set[int] = set()
        self._made: list[int] = []
        self._run_now(done)

    def _run_now(self, done: Sequence[int]) -> None:
        """Turn these steps' results into buffers, except those that depend on a size."""
        tensors: dict[int, torch.Tensor] = dict(self._constants())
        with torch.no_grad():
            for at in sorted(done):
                step = self._tape.steps[at]
                if step.moves or not tensors.keys() >= set(step.given()):
                    continue
                self._run(step, tensors, None)
                self._done.add(at)
                for number in step.results:
                    self._made.append(number)
                    self.register_buffer(f"made_{number}", tensors[number].detach().clone(), persistent=False)

    def _constants(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number, constant in self._tape.constants.items():
            named = isinstance(constant, str)
            yield number, _attribute(self.model, constant) if named else getattr(self, f"taken_{number}")

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tape = self._tape
        tensors = {
            at: as_held(one, known.dtype) for at, (one, known) in enumerate(zip(inputs, tape.inputs, strict=True))
        }
        tensors |= self._constants()
        tensors |= {number: getattr(self, f"made_{number}") for number in self._made}
        found: dict[int, torch.Tensor] = {}
        last = max(one.at for one in self._wanted)
        there = tuple(inputs[number].shape[axis] for number, axis in self._sizes)
        size: Any = there if len(there) > 1 else next(iter(there), None)
        for at in range(last + 1):
            for place, wanted in enumerate(self._wanted):
                if wanted.at == at:
                    found[place] = as_sent(wanted.make([tensors[number] for number in wanted.numbers])).clone()
            if at < last and at not in self._done and not tape.steps[at].reads:
                self._run(tape.steps[at], tensors, size)
        return tuple(found[place] for place in range(len(self._wanted)))

    @staticmethod
    def _run(step: TapeStep, tensors: dict[int, torch.Tensor], size: Any) -> None:
        def resolved(one: Ref | Varying) -> Any:
            return tensors[one.number] if isinstance(one, Ref) else one.at(size)

        if step.is_empty:  # not every kernel of a runtime accepts empty tensors
            made = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(step.shapes, step.dtypes, strict=True)]
            tensors.update(zip(step.results, made, strict=True))
            return
        args, kwargs = _mapped((step.args, step.kwargs), (Ref, Varying), resolved)
        with torch.autocast("cpu", step.autocast) if step.autocast is not None else nullcontext(), _Instead():
            results = arguments_of((step.func(*args, **kwargs),), {})
        for number, result, shape in zip(step.results, results, step.shapes, strict=True):
            if step.fixed and not all(type(size) is int for size in result.shape):
                raise CutRefused(f"before the cut the shape of what {step.name} gives depends on data")
            for has, known in zip(result.shape, shape, strict=True):
                if not isinstance(known, Varying):
                    torch._check(has == known)  # its data-dependent choice is among the requested values
            tensors[number] = result


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    return tensor[mask]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if query.dim() != 4:
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = attn_mask.expand(*query.shape[:-2], *attn_mask.shape[-2:]).flatten(0, -3).unsqueeze(1)
        four = [one.flatten(0, -3).unsqueeze(1) for one in (query, key, value)]
        flat: torch.Tensor = _attention(*four, attn_mask, *args, **kwargs).squeeze(1)
        return flat.reshape(*query.shape[:-1], value.shape[-1])
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
    if attn_mask is None:
        return found
    seen = attn_mask if attn_mask.dtype is torch.bool else attn_mask > float("-inf")
    return torch.where(seen.any(-1, keepdim=True), found, 0.0)  # rows that attend to nothing are zeros in PyTorch


def _grouped_product(rows: torch.Tensor, weights: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    ends = kwargs.pop("offs", None)
    if ends is None or rows.dim() != 2 or weights.dim() != 3 or any(one is not None for one in kwargs.values()):
        found: torch.Tensor = torch.nn.functional.grouped_mm(rows, weights, offs=ends, **kwargs)
        return found
    group = (torch.arange(len(rows))[:, None] >= ends[None]).sum(1).clamp(max=len(weights) - 1)
    every = torch.matmul(rows[None], weights)  # a graph of all groups has one shape for all data
    return every.gather(0, group[None, :, None].expand(1, -1, every.shape[2]))[0]


def _sorted(tensor: torch.Tensor, *args: Any, stable: bool = False, **kwargs: Any) -> Any:
    return torch.sort(tensor, *args, **kwargs)  # a graph's TopK takes the first of equals, stable or not


def _order(tensor: torch.Tensor, *args: Any, stable: bool = False, **kwargs: Any) -> torch.Tensor:
    return torch.argsort(tensor, *args, **kwargs)


def _picked(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Combine several tensor indices into one for their axes, flattened."""
    kinds = [one.dtype for one in index if isinstance(one, torch.Tensor)] if isinstance(index, tuple) else []
    if len(kinds) < 2 or len(kinds) != len(index) or torch.bool in kinds or torch.uint8 in kinds:
        return tensor[index]
    flat: Any = 0
    inside: Any = True
    for one, size in zip(torch.broadcast_tensors(*index), tensor.shape, strict=False):
        flat = flat * size + torch.where(one < 0, one + size, one)
        inside = inside & (one >= -size) & (one < size)
    table = tensor.flatten(0, len(kinds) - 1)
    return table[torch.where(inside, flat, table.shape[0])]  # out of range: a runtime refuses it, as PyTorch does


_INSTEAD: Final[dict[str, Callable[..., Any]]] = {
    "masked_select": _masked_select,
    "scaled_dot_product_attention": _attention,
    "grouped_mm": _grouped_product,
    "_grouped_mm": _grouped_product,
    "sort": _sorted,
    "argsort": _order,
    "__getitem__": _picked,
}
"""Replacements for functions, or forms of them, that the exporter does not support, or exports with another result."""


class _Instead(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(name_of(func), func)(*args, **(kwargs or {}))


def _attribute(module: nn.Module, path: Any) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


# The values that a run's Python read from data, or chose by it, as integers of the replay: `OTHERWISE` where the
# replay's data differ from the tape's, so that the model might have taken another path.


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.eq(one, other).all() if one.shape == other.shape else torch.tensor(False)


def _allclose(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.isclose(*args, **kwargs).all()


_READERS: Final[dict[str, Callable[..., torch.Tensor]]] = {
    **dict.fromkeys(("item", "__bool__", "is_nonzero", "__int__", "__index__", "tolist"), _itself),
    "equal": _equal,
    "allclose": _allclose,
}


def read_again(tape: Tape, at: int, shape: Sequence[int], known: Sequence[int], truth: bool) -> WantedTensor:
    """Return the value that step ``at`` reads, int64; ``known``: those read when it was recorded. Raises CutRefused."""
    step = tape.steps[at]
    if step.name not in _READERS:
        raise CutRefused(f"before the cut {step.name} reads a value from data, which no graph gives")
    reader, numbers = _READERS[step.name], step.given()

    def make(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        there = dict(zip(numbers, tensors, strict=True))
        args, kwargs = _mapped((step.args, step.kwargs), Ref, lambda ref: there[ref.number])
        value = reader(*args, **kwargs).reshape(tuple(shape))
        value = (value != 0 if truth else value).to(torch.int64)
        wanted = torch.tensor(list(known), dtype=torch.int64).reshape(tuple(shape))
        return torch.where(value == wanted, value, OTHERWISE)

    return WantedTensor(at, numbers, make, picks=(...,))


def chosen_again(tape: Tape, at: int) -> WantedTensor:
    """Return how many elements step ``at`` returns, int64, if its shape depends on its data. Raises CutRefused."""
    step = tape.steps[at]
    tensors = step.given()
    masks = [number for number in tensors if tape.tensors[number].dtype in (torch.bool, torch.uint8)]
    total = sum(torch.Size(shape).numel() for shape in step.shapes)
    if not step.chooses:
        return WantedTensor(at + 1, step.results, _elements, picks=(...,))
    if step.name in ("nonzero", "argwhere") or (step.name == "where" and len(tensors) == 1):
        mask = tensors[0]
    elif step.name in ("masked_select", "__getitem__") and len(masks) == 1:
        mask = masks[0]
    elif masks:
        raise CutRefused(
            f"before the cut the shape of what {step.name} returns depends on data, which a graph cannot express"
        )
    else:  # it may read data for something else; the exporter will report it
        tape.steps[at] = replace(step, fixed=True)
        return WantedTensor(at, (), lambda tensors: torch.tensor(total))
    count = int(torch.count_nonzero(tape.tensors[mask]))

    def make(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        found = (tensors[0] != 0).to(torch.int64).sum()
        return torch.where(found == count, total, OTHERWISE)

    return WantedTensor(at, (mask,), make)


def _elements(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.full((), sum(one.numel() for one in tensors), dtype=torch.int64)


def compiled_again(tape: Tape, total: int) -> WantedTensor:
    """Return the same for a module of which only kernels were seen. Raises CutRefused if they depend on data."""
    for step in tape.steps:
        if step.below and (step.reads or step.chooses):
            raise CutRefused(f"a scripted or compiled module before the cut chooses by data ({step.name})")
    return WantedTensor(0, (), lambda tensors: torch.tensor(total))
