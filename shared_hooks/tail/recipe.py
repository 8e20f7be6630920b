"""A recipe: how the tail passes the prefix of one cut; and the slots that hold what crossed.

*Steps* say what the replay does at each module call and operation of the prefix that is not simply run again. A
*source* says where a tensor of a step comes from. `explain` prints both. The tail's side makes a recipe (`rehearsal`);
it is never sent.

A slot is a flat tensor in memory that is completely written before it is read. It begins at the address modulo 64 at
which its storage began on the edge: some kernels round depending on alignment. With `guarded`, a debugging aid, each
slot ends at an inaccessible page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shared_hooks import devices
from shared_hooks.crossing import ALIGN, Crossing, EarlyOutput, Fill, PathDigest, Slot, TensorForm
from shared_hooks.errors import BadFrame, CutRefused, IsthmusError, PlaceholderRead, PlanMismatch
from shared_hooks.forward import Placeholder
from shared_hooks.modules import ROOT, call_name
from shared_hooks.showing import short
from shared_hooks.state import PythonState
from shared_hooks.tensors import Structure, View, dtype_name, tensors_in
from shared_hooks.tensors.staging import to_device

# -- sources ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Injected:
    """A view of a slot. ``flags``: c = conjugated, n = negated."""

    slot: int
    view: View
    dtype: torch.dtype
    flags: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Hole:
    """A placeholder, of which nothing is read after the cut."""

    form: TensorForm


@dataclass(frozen=True, slots=True)
class Argument:
    """The ``number``-th tensor argument."""

    number: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A view of the storage of the ``number``-th tensor argument. That depends on the inputs, or is created before the
    cut; with ``constant`` it does not.
    """

    number: int
    view: View
    dtype: torch.dtype
    flags: str = ""
    constant: bool = False


Source = Injected | Hole | Argument | Alias

# -- steps ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enter:
    """A module call that runs its own code. ``later``: completely behind a branch cut, but observed."""

    path: str
    later: bool = False


@dataclass(frozen=True, slots=True)
class Skip:
    """A module call that is replaced by its result."""

    path: str
    structure: Structure
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class GiveResult:
    """An operation that is replaced by its result.

    ``below``: a kernel that belongs to no torch function; ``draws``: random numbers, which need no tensor of the
    prefix; ``fills``: slots whose content now goes to an argument's storage; ``taints``: arguments whose storage began
    as a constant and depends on the inputs from here on; ``inside``: the path of the calling module.
    """

    name: str
    structure: Structure
    sources: tuple[Source, ...]
    fills: tuple[Fill, ...] = ()
    taints: tuple[int, ...] = ()
    below: bool = False
    draws: bool = False
    inside: str = ""


@dataclass(frozen=True, slots=True)
class ReadValue:
    """A Python value that was read from data: the ``number``-th of those in the request."""

    name: str
    number: int
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """An operation that needs only the form of its arguments, and runs.

    ``below``: as in `GiveResult`. ``later``: it is behind a branch cut, and runs on what exists; ``taints``: as in
    `GiveResult`; ``hangs``: its results that depend on the inputs.
    """

    name: str
    inside: str = ""
    below: bool = False
    later: bool = False
    taints: tuple[int, ...] = ()
    hangs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Through:
    """A module call completely behind a branch cut, though it comes before its end: it runs unchanged.

    ``layer``: the id of its first layer; ``counts``: how often each module was called before it; ``hangs``: as in
    `Run`.
    """

    path: str
    layer: int
    counts: tuple[tuple[str, int], ...]
    hangs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReachCut:
    """The cut layer returns."""

    path: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """The step after the last one."""

    name: str = "nothing"


Step = Enter | Skip | GiveResult | ReadValue | Run | Through | ReachCut
NOTHING = Nothing()


def label(step: Step | Nothing) -> str:
    """Return a step as text: ``"skip stem.0"``, ``"answer add"``."""
    name = step.path if isinstance(step, (Enter, Skip, Through, ReachCut)) else step.name
    return name if isinstance(step, Nothing) else f"{_VERBS[type(step)]} {name}"


_VERBS = {
    Enter: "enter",
    Skip: "skip",
    GiveResult: "answer",
    ReadValue: "read",
    Run: "run",
    Through: "run",
    ReachCut: "end",
}


@short
@dataclass(eq=False)
class Recipe:
    """How to resume after one cut. ``counts``: how often each module was called before it.

    ``cache``: shared by the replays of this recipe, by device. ``state``: the model's Python state before a tail.
    ``is_open``: data may decide on the path, so a tail may change what no plan has seen: Python state, or ``kept``, the
    model's tensors. ``most``: the memory limit in bytes after the cut, if that could not be foreseen; else None.
    """

    crossing: Crossing
    inputs: tuple[Source, ...]
    steps: tuple[Step, ...]
    counts: dict[str, int]
    seconds: float = 0.0
    state: PythonState | None = field(default=None, repr=False)
    is_open: bool = True
    most: int | None = None
    kept: list[torch.Tensor] = field(default_factory=list, repr=False)
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def versions(self) -> list[int]:
        """Return the versions of the model's tensors; empty if no tail writes what no plan has seen."""
        return [tensor._version for tensor in self.kept if not tensor.is_inference()] if self.is_open else []

    def explain(self) -> Iterator[str]:
        """Yield the steps as text, one per line, indented by module."""
        for step in self.steps:
            path = step.path if isinstance(step, (Enter, Skip, Through, ReachCut)) else step.inside
            depth = 0 if path in ("", ROOT) else path.count(".") + 1
            sources = getattr(step, "sources", ())
            given = f": {', '.join(map(_described, sources))}" if sources else ""
            yield f"{'  ' * (depth + (not isinstance(step, (Enter, Skip, Through, ReachCut))))}{label(step)}{given}"


def _described(source: Source) -> str:
    if isinstance(source, Injected):
        return f"slot {source.slot} as {_shape(source.view.shape, source.dtype)}"
    if isinstance(source, Hole):
        return f"placeholder {_shape(source.form.shape, source.form.dtype)}"
    if isinstance(source, Argument):
        return f"its argument {source.number}"
    return f"a view of its argument {source.number}"


def _shape(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)}[{', '.join(map(str, shape))}]"


# The notes of a rehearsal so far: its position, the steps, the first failure.


class RecipeFrame:
    """A module call in progress. ``start``: the number of steps before it; ``wrote``: it writes to its arguments."""

    def __init__(self, path: str, number: int, start: int) -> None:
        self.path = path
        self.number = number
        self.start = start
        self.index = 0
        self.has_child = False
        self.wrote = False
        self.later = False
        """Whether it is behind the branch cut, with everything in it."""
        self.layer = 0
        """How many layers have run before it."""
        self.counts: dict[str, int] = {}
        """How often each module was called before it, if requested."""


class Notes:
    """The notes of one rehearsal. ``stack``: the module calls in progress; ``done``: the cut is reached; ``in_opaque``:
    how many scripted or compiled modules are in progress.
    """

    def __init__(self, crossing: Crossing) -> None:
        self.crossing = crossing
        self.steps: list[Step] = []
        self.stack = [RecipeFrame("", 1, 0)]
        self.digest = PathDigest()
        self.in_opaque = 0
        # before the cut "input" there is nothing: the model is run to see how much work comes after it
        self.done = crossing.layer_id < 0
        self.failure: IsthmusError | None = None

    @property
    def frame(self) -> RecipeFrame:
        """The current module call."""
        return self.stack[-1]

    def refusal(self, what: str) -> CutRefused:
        """Return an error that says where; kept in case the model catches it."""
        frame = self.frame
        where = f" (in {call_name(frame.path, frame.number)})" if frame.path else ""
        error = CutRefused(
            f"cannot resume after layer {self.crossing.layer_id} ({self.crossing.layer_name}): {what}{where}"
        )
        self.failed(error)
        return error

    def failed(self, error: BaseException) -> None:
        """Keep the first failure: a model that catches exceptions must not turn it into an answer."""
        if self.done and isinstance(error, PlaceholderRead):
            return  # after the cut there is no data to read
        if self.failure is None and isinstance(error, IsthmusError):
            self.failure = error


GUARD = "ISTHMUS_GUARD_PAGES"
_guarding = os.environ.get(GUARD, "") not in ("", "0")


@contextmanager
def guarded() -> Iterator[None]:
    """Put guard pages around all slots created in the block (by the whole process): access beyond one ends it.

    Setting the environment variable ``ISTHMUS_GUARD_PAGES=1`` does the same from the start. CPU and Linux only.
    """
    global _guarding
    before, _guarding = _guarding, True
    try:
        yield
    finally:
        _guarding = before


def slots_of(early: EarlyOutput, device: torch.device) -> list[torch.Tensor]:
    """Return one flat tensor per slot, on the tail's device. Raises `BadFrame` for bytes that are invalid for
    its type.
    """
    found: list[torch.Tensor] = []
    pieces = iter(early.pieces)
    starts = early.starts or (0,) * len(early.crossing.slots)
    for slot, start in zip(early.crossing.slots, starts, strict=True):
        own = [next(pieces) for _ in slot.pieces]
        found.append(_filled(slot, start, own, device, may_use=early.disposable or not slot.written))
    _check_truth(early, found)
    return found


def blank_slots(slots: tuple[Slot, ...], device: torch.device) -> list[torch.Tensor]:
    """Return the slots without content."""
    return [_made(slot, 0, device) for slot in slots]


def _filled(slot: Slot, start: int, pieces: list[torch.Tensor], device: torch.device, *, may_use: bool) -> torch.Tensor:
    if len(pieces) == 1 and slot.pieces[0].offset == 0 and slot.pieces[0].numel == slot.elements and not _guarding:
        moved = to_device(pieces[0].reshape(-1), device)
        copied = moved.data_ptr() != pieces[0].data_ptr()  # reshaping alone gives another view of the same memory
        if (may_use or copied) and (not devices.is_host(moved.device) or moved.data_ptr() % ALIGN == start):
            return moved
    whole = _made(slot, start, device)
    for view, piece in zip(slot.pieces, pieces, strict=True):
        whole.as_strided(view.shape, view.stride, whole.storage_offset() + view.offset).copy_(piece)
    return whole


def _made(slot: Slot, start: int, device: torch.device) -> torch.Tensor:
    """Return a slot of zeros, so that what no piece covers is never another request's memory."""
    if _guarding and device.type == "cpu":
        return _between_guards(slot, start)
    front = start // slot.dtype.itemsize if devices.is_host(device) else 0
    return torch.zeros(front + slot.elements, dtype=slot.dtype, device=device)[front:]


def _check_truth(early: EarlyOutput, slots: list[torch.Tensor]) -> None:
    """Check that truth values are 0 or 1; kernels that count and then copy rely on it."""
    for number in early.crossing.truths:
        if slots[number].numel() and int(slots[number].view(torch.uint8).max()) > 1:
            raise BadFrame(f"slot {number} holds truth values other than 0 and 1")


_PAGE = mmap.PAGESIZE


def _between_guards(slot: Slot, start: int) -> torch.Tensor:
    size = -(-(max(slot.storage_bytes, 1) + start) // ALIGN) * ALIGN
    pages = -(-size // _PAGE) * _PAGE
    area = mmap.mmap(-1, pages + 2 * _PAGE)
    memory = (ctypes.c_char * len(area)).from_buffer(area)
    base = ctypes.addressof(memory)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for guard in (base, base + _PAGE + pages):
        if protect(ctypes.c_void_p(guard), ctypes.c_size_t(_PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    # as near to the guard after it as its alignment allows
    first = _PAGE + pages - size + start
    inner = (ctypes.c_char * max(slot.storage_bytes, 1)).from_address(base + first)
    inner.owner = memory  # type: ignore[attr-defined]
    return torch.frombuffer(inner, dtype=torch.uint8)[: slot.storage_bytes].view(slot.dtype)


# The memory of one request on the tail's side: slots, placeholders, and values that depend on the inputs.
#
# Everything that a replay passes to the model is made here. A view is taken of a slot or of a tensor that depends on
# the inputs, never of anything else, and torch checks it against the storage's real size; a write goes to storages
# that this request made. A violation of these rules is an error, whatever the recipe says.


class Placing:
    """``slots``: one flat tensor each. ``holes``: placeholders shared by all requests of a recipe."""

    def __init__(
        self, slots: list[torch.Tensor], device: torch.device, holes: dict[Hole, Placeholder] | None = None
    ) -> None:
        self.slots = slots
        self.device = device
        self.holes = {} if holes is None else holes
        self.tainted = {slot.untyped_storage()._cdata for slot in slots}
        self.kept: list[Any] = []
        self.filled: dict[int, torch.Tensor] | None = None
        """Slot -> the memory that got its content, if requested."""
        self.made: set[int] = set()
        """Storages of constants that this request's Python created; recorded only if some are written."""

    def release(self) -> None:
        """Free the frontier."""
        self.slots.clear()
        self.kept.clear()
        self.filled = None

    def is_tainted(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the prefix depends on the inputs."""
        if type(tensor) is Placeholder:
            return True
        try:
            return tensor.untyped_storage()._cdata in self.tainted
        except (RuntimeError, NotImplementedError):
            return False

    def taint(self, tensor: torch.Tensor) -> None:
        """Mark the tensor's storage as depending on the inputs from here on."""
        if type(tensor) is not Placeholder:
            storage = tensor.untyped_storage()
            self.tainted.add(storage._cdata)
            self.kept.append(StorageWeakRef(storage))  # the address must not be reused for a constant

    def note_made(self, result: Any, arguments: Sequence[torch.Tensor]) -> None:
        """Record the storages of an operation's result on constants that are none of its arguments' as this
        request's.
        """
        given = {
            a.untyped_storage()._cdata for a in arguments if type(a) is not Placeholder and a.layout == torch.strided
        }
        for tensor in tensors_in(result):
            if type(tensor) is torch.Tensor and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage.resizable():
                    self.made.add(storage._cdata)
                    self.kept.append(storage)  # the address must not be reused

    def overwrite(self, tensor: torch.Tensor) -> None:
        """Called for a kernel that is not run but would write here.

        The memory that it would have overwritten may hold anything, so it is zeroed until it is filled. The model's own
        memory (a scratch buffer that is rewritten before it is read) stays unchanged, whatever values the request has.
        """
        if type(tensor) is Placeholder or self.is_tainted(tensor):
            return
        if tensor.untyped_storage()._cdata in self.made:
            whole_of(tensor, torch.uint8).zero_()
        self.taint(tensor)

    def tensor(self, source: Source, arguments: Sequence[torch.Tensor], *, fresh: bool = False) -> torch.Tensor:
        """Return one tensor of the prefix. ``fresh``: autograd will put its mark on it. Raises `PlanMismatch`."""
        if isinstance(source, Hole):
            if fresh or 0 in source.form.shape:
                return self.hole(source.form)
            # placeholders are never written to: one serves all requests
            known = self.holes.get(source)
            if known is None:
                known = self.holes[source] = _placeholder(source.form, self.device)
            return known
        if isinstance(source, Injected):
            return _viewed(self.slots[source.slot], source.view, source.dtype, source.flags)
        if source.number >= len(arguments):
            raise PlanMismatch("an argument is missing")
        argument = arguments[source.number]
        if isinstance(source, Argument):
            return argument
        if type(argument) is Placeholder or self.is_tainted(argument) is source.constant:
            raise PlanMismatch("a view of a tensor that is not this request's")
        return _aliased(argument, source)

    def hole(self, form: TensorForm) -> torch.Tensor:
        """Return a placeholder of its own; for no elements at all a real tensor, since there is nothing to read."""
        if 0 not in form.shape:
            return _placeholder(form, self.device)
        empty = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=self.device)
        self.kept.append(empty)
        self.tainted.add(empty.untyped_storage()._cdata)
        return empty

    def fill(self, number: int, pieces: Sequence[View], argument: torch.Tensor) -> None:
        """Copy the pieces of a slot into the storage of a tensor that this request created. Raises `PlanMismatch`."""
        slot = self.slots[number]
        if type(argument) is Placeholder or argument.untyped_storage()._cdata not in self.made:
            raise PlanMismatch("a write to a tensor that is not this request's")
        whole = whole_of(argument, slot.dtype)
        if whole.numel() < slot.numel():
            raise PlanMismatch("a write beyond a tensor's memory")
        for piece in pieces:
            target = whole.as_strided(piece.shape, piece.stride, piece.offset)
            target.copy_(slot.as_strided(piece.shape, piece.stride, slot.storage_offset() + piece.offset))
        if self.filled is not None:
            self.filled[number] = whole


def _placeholder(form: TensorForm, device: torch.device) -> Placeholder:
    return Placeholder(form.shape, form.stride, form.dtype, device)


def _viewed(slot: torch.Tensor, view: View, dtype: torch.dtype, flags: str) -> torch.Tensor:
    whole = slot if dtype is slot.dtype else slot.view(dtype)
    return _flagged(whole.as_strided(view.shape, view.stride, whole.storage_offset() + view.offset), flags)


def _aliased(argument: torch.Tensor, source: Alias) -> torch.Tensor:
    view = source.view
    whole = whole_of(argument, source.dtype)
    return _flagged(whole.as_strided(view.shape, view.stride, view.offset), source.flags)


def _flagged(tensor: torch.Tensor, flags: str) -> torch.Tensor:
    if "c" in flags:
        tensor = tensor.conj()
    negated: torch.Tensor = torch._neg_view(tensor) if "n" in flags else tensor
    return negated


def whole_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the storage of a tensor as one flat tensor: a view, so that writes through it count as writes to the
    tensor.
    """
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = tensor.as_strided((elements,), (1,), 0)
    if dtype is tensor.dtype:
        return whole
    fits = elements * tensor.itemsize // dtype.itemsize * dtype.itemsize
    return whole.view(torch.uint8)[:fits].view(dtype)
