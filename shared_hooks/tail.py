"""The tail: the model's own Python runs again, the prefix is answered from the recipe, the rest runs at native speed.

Until the cut, every module call that lies wholly before it is answered at once (a *stub*), and every operation between
modules is *replayed*: it yields injected values and placeholders. What does not depend on the inputs simply runs. Right
after the cut the function mode is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from shared_hooks.attach import running
from shared_hooks.early import EarlyOutput
from shared_hooks.errors import PlanMismatch
from shared_hooks.hierarchy import ModuleInfo
from shared_hooks.lifecycle.registry import Lifecycle
from shared_hooks.lifecycle.stages import Stage
from shared_hooks.measuring import Measurement
from shared_hooks.operations import REFLECTED, Kind, arguments_of, is_form, is_mapped, kind_of, name_of
from shared_hooks.parcel import ALIGN
from shared_hooks.placeholder import Placeholder
from shared_hooks.recipe import Slot
from shared_hooks.session import Frame, Session
from shared_hooks.trees import dtype_named, no_class, tensors_in, unflatten


class TailSession(Session):
    """Replays the prefix of one recipe and then runs the rest as any session does."""

    def __init__(
        self,
        modules: dict[nn.Module, ModuleInfo],
        measurement: Measurement | None,
        save: set[int | str],
        early: EarlyOutput,
        device: torch.device,
        lifecycle: Lifecycle,
    ) -> None:
        super().__init__(modules, measurement, save)
        self.lifecycle = lifecycle
        self.recipe = early.recipe
        self.steps = early.recipe.steps
        self.device = device
        self.position = 0
        self.in_opaque = 0
        self.resumed = False
        self.resumed_at = 0
        self.values = iter(early.values)
        self.holes, self.ready, self.has_below = early.recipe.cache.setdefault(
            device, ({}, {}, any(step[0] == "below" for step in self.steps))
        )
        self.slots = _storages(early, device)
        self.tainted = {slot.untyped_storage()._cdata for slot in self.slots}
        self.modes: list[Replay | Below] = []
        self.inside = False
        self.kept: list[Any] = []

    def inputs(self, find: Callable[[str], type | None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's (args, kwargs): injected where they are read after the cut, placeholders elsewhere."""
        tensors = [self.build(source, []) for source in self.recipe.inputs]
        value = unflatten(self.recipe.input_structure, tensors, find)
        if not (
            isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict)
        ):
            raise PlanMismatch("the recipe's inputs are not positional and keyword arguments")
        return value

    # -- the replay ---------------------------------------------------------------------------------------------

    def next_step(self) -> Sequence[Any]:
        """The step that is due."""
        return self.steps[self.position] if self.position < len(self.steps) else ("nothing", "nothing")

    def advance(self) -> None:
        """One step is done; after the last the cut is reached."""
        self.position += 1
        if self.position == len(self.steps):
            self.resume()

    def release(self) -> None:
        self.slots.clear()
        self.kept.clear()
        # they refer to this session: a cycle that would keep the frontier until the collector runs
        self.modes.clear()

    def resume(self) -> None:
        """The cut is reached: number layers from here, leave the function mode."""
        self.resumed = True
        self.next_layer = self.recipe.layer_id + 1
        self.counts = dict(self.recipe.counts)
        self.leave(only_on_top=True)
        token = running.set(None)  # a hook that runs the model is no part of this forward
        try:
            self.lifecycle.emit(Stage.AFTER_INJECT, split=self.recipe.layer_name)
            self.lifecycle.emit(Stage.BEFORE_TAIL, split=self.recipe.layer_name)
        finally:
            running.reset(token)
        self.resumed_at = time.perf_counter_ns()

    def enter(self) -> None:
        """Watch the prefix; below the function level there is rarely anything to replay."""
        self.modes.append(Replay(self))
        if self.has_below:
            self.modes.append(Below(self))
        for mode in self.modes:
            mode.enter()

    def leave(self, *, only_on_top: bool = False) -> None:
        """Stop watching; in the middle of the model only if nobody put a mode over ours, else at the end."""
        on_top = [*_get_current_function_mode_stack()[-1:], *_get_current_dispatch_mode_stack()[-1:]]
        for mode in self.modes:
            if not only_on_top or mode in on_top:
                mode.leave()

    def run(self, info: ModuleInfo, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.resumed:
            return super().run(info, forward, args, kwargs)
        path = info.path
        if self.stack:
            self.stack[-1].has_child = True
        step = self.next_step()
        if step[0] == "skip" and step[1] == path:
            output = self.ready.get(self.position)
            if output is None:
                output = self.skipped(step, args, kwargs)
            self.advance()
            return output
        if step[0] == "enter" and step[1] == path:
            self.advance()
        frame = Frame(info, 0)
        self.stack.append(frame)
        self.in_opaque += info.opaque
        try:
            output = forward(*args, **kwargs)
        finally:
            self.stack.pop()
            self.in_opaque -= info.opaque
        if not self.resumed and self.next_step()[0] == "end" and self.next_step()[1] == path:
            self.advance()
        return output

    def skipped(self, step: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a module of the prefix; most give one placeholder, which is kept for the next request."""
        self.inside = True
        with torch._C.DisableTorchFunction():
            output = self.answer(step[2], step[3], list(tensors_in((args, kwargs))))
        self.inside = False
        if type(output) is Placeholder and step[3][0][0] == "hole":
            self.ready[self.position] = output
        return output

    def answer(
        self, structure: Any, sources: Sequence[Any], arguments: list[torch.Tensor], *, fresh: bool = False
    ) -> Any:
        """The result of a module or operation of the prefix. ``fresh``: autograd will put its mark on the tensors."""
        return unflatten(structure, [self.build(source, arguments, fresh=fresh) for source in sources], no_class)

    def build(self, source: Sequence[Any], arguments: list[torch.Tensor], *, fresh: bool = False) -> torch.Tensor:
        """One tensor of the prefix; the forms of ``source`` are in `recipe`."""
        kind = source[0]
        if kind == "slot":
            _, number, shape, stride, offset, dtype_name, flags = source
            whole, dtype = self.slots[number], dtype_named(dtype_name)
            if dtype is not whole.dtype:
                whole = whole.view(dtype)
            tensor = whole.as_strided(shape, stride, whole.storage_offset() + offset)
            if "c" in flags:
                tensor = tensor.conj()
            negated: torch.Tensor = torch._neg_view(tensor) if "n" in flags else tensor
            return negated
        if kind == "hole" and (0 in source[1] or fresh):
            return self._own_hole(source)
        if kind == "hole":
            # sources live as long as their recipe, and nobody writes to a placeholder: one serves all requests
            hole: Placeholder | None = self.holes.get(id(source))
            if hole is None:
                _, shape, stride, dtype_name = source
                hole = self.holes[id(source)] = Placeholder(shape, stride, dtype_named(dtype_name), self.device)
            return hole
        try:
            argument: torch.Tensor = arguments[source[1]]
        except IndexError as error:
            raise self.mismatch("an argument is missing") from error
        if kind == "arg":
            return argument
        _, _, shape, stride, offset, dtype_name = source
        real: torch.Tensor = _whole(argument, dtype_named(dtype_name)).as_strided(shape, stride, offset)
        return real

    def _own_hole(self, source: Sequence[Any]) -> torch.Tensor:
        """A placeholder that is not shared; for no elements at all a real tensor, since there is nothing to read."""
        _, shape, stride, dtype_name = source
        if 0 not in shape:
            return Placeholder(shape, stride, dtype_named(dtype_name), self.device)
        empty = torch.empty_strided(shape, stride, dtype=dtype_named(dtype_name), device=self.device)
        self.kept.append(empty)
        self.tainted.add(empty.untyped_storage()._cdata)
        return empty

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch function called in the prefix; the function mode is off while this runs."""
        name = name_of(func)
        arguments = arguments_of(args, kwargs)
        if is_mapped(arguments):
            return func(*args, **kwargs)
        self.inside = True
        try:
            return self._operation(name, arguments, func, args, kwargs)
        finally:
            self.inside = False

    def _operation(
        self, name: str, arguments: list[torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        step = self.next_step()
        # Python asks a subclass first, so that `constant < placeholder` arrives as `placeholder > constant`
        matches = step[1] in (name, REFLECTED.get(name)) and step[0] in ("give", "value", "run", "draw")
        if not any(self.is_tainted(tensor) for tensor in arguments):
            if not (matches and step[0] == "draw"):
                return func(*args, **kwargs)
        elif not matches:
            if is_form(name):
                return func(*args, **kwargs)
            result = func(*args, **kwargs)
            if kind_of(name, bool(arguments), result) is Kind.FORM:
                return result
            raise self.mismatch(f"{name}() ran")
        if step[0] == "run":
            result = func(*args, **kwargs)
        elif step[0] == "value":
            result = unflatten(next(self.values), [], no_class)
        else:
            result = self.answer(step[2], step[3], arguments)
            if step[0] == "give":
                self.fill(step[4], arguments)
        self.advance()
        return result

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation of the dispatcher that no torch function of the prefix called."""
        arguments = arguments_of(args, kwargs)
        self.inside = True
        try:
            with torch._C.DisableTorchFunction():
                if not any(self.is_tainted(tensor) for tensor in arguments):
                    return func(*args, **kwargs)
                step = self.next_step()
                if step[0] != "below" or step[1] != str(func):
                    raise self.mismatch(f"{func} ran")
                result = self.answer(step[2], step[3], arguments, fresh=True)
                self.fill(step[4], arguments)
        finally:
            self.inside = False
        self.advance()
        return result

    def mismatch(self, what: str) -> PlanMismatch:
        """An error that says where the replay left the plan; kept, in case the model catches it."""
        kind, name = self.next_step()[0], self.next_step()[1]
        layer = f"the cut after layer {self.recipe.layer_id} ({self.recipe.layer_name})"
        error = PlanMismatch(
            f"resuming at {layer}: {what} where the plan has {kind} {name}; the code or its state differs"
        )
        self.failed(error)
        return error

    def is_tainted(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the prefix depends on the inputs."""
        if type(tensor) is Placeholder:
            return True
        try:
            return tensor.untyped_storage()._cdata in self.tainted
        except (RuntimeError, NotImplementedError):
            return False

    def fill(self, fills: Sequence[Any], arguments: list[torch.Tensor]) -> None:
        """A storage that began as a constant has been written: it depends on the inputs now, and may get its
        content.
        """
        for number, slot in fills:
            argument = arguments[number]
            if type(argument) is Placeholder:
                continue
            storage = argument.untyped_storage()
            self.tainted.add(storage._cdata)
            self.kept.append(StorageWeakRef(storage))  # the address must not be used again for a constant
            if slot >= 0:
                source = self.slots[slot]
                whole = _whole(argument, source.dtype)
                for piece in self.recipe.slots[slot].pieces:
                    target = whole.as_strided(piece.shape, piece.stride, piece.offset)
                    target.copy_(source.as_strided(piece.shape, piece.stride, source.storage_offset() + piece.offset))


class Replay(TorchFunctionMode):
    """Hands the prefix's operations to the session; entered and left by hand, because it ends inside the model."""

    def __init__(self, session: TailSession) -> None:
        super().__init__()
        self.session = session
        self.active = False

    def enter(self) -> None:
        self.active = True
        super().__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        if self.active:
            self.active = False
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.session.resumed or self.session.in_opaque:
            return func(*args, **(kwargs or {}))
        return self.session.operation(func, args, kwargs or {})


class Below(TorchDispatchMode):
    """The same for the kernels below, where the recipe has steps for them."""

    def __init__(self, session: TailSession) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session
        self.active = False

    def enter(self) -> None:
        self.active = True
        super().__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        if self.active:
            self.active = False
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        session = self.session
        if session.resumed or session.in_opaque or session.inside:
            return func(*args, **(kwargs or {}))
        return session.kernel(func, args, kwargs or {})


def _storages(early: EarlyOutput, device: torch.device) -> list[torch.Tensor]:
    """One flat tensor a slot, on the tail's device."""
    found: list[torch.Tensor] = []
    pieces = iter(early.pieces)
    for slot in early.recipe.slots:
        own = [next(pieces) for _ in slot.pieces]
        found.append(_storage(slot, own, device, may_use=early.disposable or not slot.written))
    return found


def _storage(slot: Slot, pieces: list[torch.Tensor], device: torch.device, *, may_use: bool) -> torch.Tensor:
    if len(pieces) == 1 and slot.pieces[0].offset == 0 and slot.pieces[0].numel == slot.elements:
        piece = pieces[0].reshape(-1)
        moved = piece.to(device)
        # kernels may give other last bits for memory that is aligned otherwise than torch's own
        may_use = may_use and (moved.is_cuda or moved.data_ptr() % ALIGN == 0)
        return moved if may_use or moved is not piece else moved.clone()
    whole = torch.empty(slot.elements, dtype=slot.dtype, device=device)
    for view, piece in zip(slot.pieces, pieces, strict=True):
        whole.as_strided(view.shape, view.stride, view.offset).copy_(piece)
    return whole


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The storage of a tensor as one flat tensor."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=dtype, device=tensor.device)
    whole.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
    return whole
