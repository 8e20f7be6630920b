"""A session: one forward of one wrapped model in one thread. It numbers, times and captures the layers.

A layer is a module call inside which no other hooked module is called; layers are numbered in execution order. The head
and the tail are sessions, too, that stop early and start late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from shared_hooks.errors import PlaceholderRead
from shared_hooks.forward.operations import FORM_ONLY
from shared_hooks.metrics import LayerColumns, Measurement
from shared_hooks.modules import ModuleInfo, call_name, fast_path_off, running
from shared_hooks.tensors import tensors_in

if TYPE_CHECKING:
    from typing_extensions import Self


# Tensors without data: shape, strides, dtype and device are right, and reading one is an error, never a zero, never
# garbage. Operations that read only the form (``zeros_like``) work.
#
# `Placeholder` stands for a value of the prefix that must not be read; its views are placeholders. The tensors of
# generation know where their value is (`shared_hooks.generation.remote_tensor`).


class Dataless(torch.Tensor):
    """A tensor without data. `refuse` of its class raises the error for a read."""

    # a plain tensor at the function level, so that no code path changes because of it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        cls.__module__ = torch.Tensor.__module__  # opt_einsum looks up the arrays' library there

    @staticmethod
    def __new__(cls, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Self:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=device)
        # its memory begins at address 0: code that takes its pointer gets an error instead
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made  # type: ignore[no-any-return]

    def refuse(self, what: str) -> NoReturn:
        """Raise PlaceholderRead because ``what`` reads it."""
        raise NotImplementedError

    def read_by(self, method: Any) -> Any:
        """Call a method of torch's that reads it, with `refuse` in place of torch's own error for a subclass."""
        try:
            return method(self)  # a function mode sees this call and may answer it
        except (RuntimeError, TypeError):
            self.refuse(f"{method.__name__}()")

    def tolist(self) -> Any:
        """See `read_by`."""
        return self.read_by(torch.Tensor.tolist)

    def numpy(self, *, force: bool = False) -> Any:
        """See `read_by`."""
        return self.read_by(torch.Tensor.numpy)

    def as_subclass(self, cls: Any) -> Any:
        """See `read_by`."""
        try:
            return torch.Tensor.as_subclass(self, cls)
        except (RuntimeError, TypeError):
            self.refuse(f"as_subclass({cls.__name__})")

    def data_ptr(self) -> int:
        """See `refuse`."""
        self.refuse("data_ptr()")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class Placeholder(Dataless):
    """Takes the place of a value that must not be read."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in FORM_ONLY:
            return func(*swapped(args, uninitialised), **swapped(kwargs, uninitialised))
        writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
        views = bool(schema.returns) and all(result.alias_info is not None for result in schema.returns)
        if not any(value.numel() for value in dataless_in((args, kwargs))):  # an empty tensor has nothing to read
            return func(*swapped(args, uninitialised), **swapped(kwargs, uninitialised))
        if views and not writes:
            device = next(value.device for value in args if isinstance(value, Placeholder))
            return _wrap(func(*swapped(args, _meta), **swapped(kwargs, _meta)), device)
        next(dataless_in((args, kwargs))).refuse(f"{schema.name.removeprefix('aten::')}()")

    def __setattr__(self, name: str, value: Any) -> None:
        # placeholders are shared by the requests of a cut: this one must not be seen again
        session: Any = running.get()
        if session is not None:
            session.tagged = True
        super().__setattr__(name, value)

    def refuse(self, what: str) -> NoReturn:
        error = PlaceholderRead(
            f"{what} reads a value of shape {tuple(self.shape)} that was not sent: this input takes a path through the "
            "model that the plan does not hold; plan with this input on the edge and try again"
        )
        # a model may swallow exceptions: the session keeps this one and raises it at the end
        session = running.get()
        if session is not None:
            session.failed(error)
        raise error


def check_real(tensors: Iterable[torch.Tensor]) -> None:
    """Raise `PlaceholderRead` if a model's output contains one."""
    for tensor in tensors:
        if isinstance(tensor, Placeholder):
            tensor.refuse("the model's output")


def dataless_in(value: Any) -> Iterator[Any]:
    """Yield the tensors without data in nested arguments."""
    if isinstance(value, Dataless):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from dataless_in(item)
    elif isinstance(value, dict):
        yield from dataless_in(list(value.values()))


def swapped(value: Any, into: Callable[[Any], Any]) -> Any:
    """Nested arguments with each tensor without data replaced by ``into`` of it."""
    if isinstance(value, Dataless):
        return into(value)
    if isinstance(value, (list, tuple)):
        return type(value)(swapped(item, into) for item in value)
    if isinstance(value, dict):
        return {key: swapped(item, into) for key, item in value.items()}
    return value


def _meta(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def uninitialised(value: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory of its form, for operations that use the form only."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _wrap(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return Placeholder(value.shape, value.stride(), value.dtype, device)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap(item, device) for item in value)
    return value


class HookExitException(BaseException):
    """Raised at the cut to leave the model's forward; caught by the session that raised it.

    A BaseException, so that a model's own ``except Exception`` does not catch it.
    """


class Unseen:
    """Runs modules without a session and without observers."""

    is_bare = True

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return forward(*args, **kwargs)

    def failed(self, error: BaseException) -> None:
        """Does nothing: the caller sees the exception."""


UNSEEN = Unseen()


def run_plain(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the whole model without a session, under the same conditions: without gradients and without the fast path."""
    token = running.set(UNSEEN)
    try:
        with torch.no_grad(), fast_path_off():
            return model(*args, **kwargs)
    finally:
        running.reset(token)


class Session:
    """Runs a whole model: layers are numbered, timed and captured as requested."""

    is_bare = False
    banks = False
    """Whether `module_done` and `layer_done` do more than keep layers to be saved."""

    def __init__(
        self,
        modules: dict[nn.Module, ModuleInfo],
        measurement: Measurement | None,
        save: Set[int | str] = frozenset(),
    ) -> None:
        self.modules = modules
        self.measurement = measurement
        self.save = save
        self.stack: list[tuple[ModuleInfo, int]] = []
        """The calls in progress: the module, and the number of its call; 0 where calls are not counted."""
        self.begun = 0
        """Counts calls as they begin: one during which none began is a layer."""
        self.counts: dict[str, int] = {}
        self.next_layer = 0
        self.banked: dict[int | str, Any] = {}
        self.failure: BaseException | None = None

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called by the shim of a module."""
        info = self.modules.get(module)
        if info is None:
            return forward(*args, **kwargs)
        return self.run(info, forward, args, kwargs)

    def failed(self, error: BaseException) -> None:
        """Keep the first failure: a model that catches exceptions must not turn it into an answer."""
        self.failure = self.failure or error

    def run(self, info: ModuleInfo, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = info.path
        number = self.counts[path] = self.counts.get(path, 0) + 1
        begun = self.begun = self.begun + 1
        self.stack.append((info, number))
        measurement = self.measurement
        if measurement is not None:
            cpu = measurement.cpu()
            start = measurement.mark()
        try:
            output = forward(*args, **kwargs)
        finally:
            self.stack.pop()
        if self.banks:
            self.module_done(info, number, output)
        if self.begun == begun:
            if measurement is not None:
                measurement.add(self.next_layer, info, number, start, cpu, output)
            if self.banks or self.save:
                self.layer_done(info, number, output)
            self.next_layer += 1
        return output

    def module_done(self, info: ModuleInfo, call: int, output: Any) -> None:
        """Called after each module, layer or not; ``call`` is the number of its call."""

    def layer_done(self, info: ModuleInfo, call: int, output: Any) -> None:
        """Called after each layer; its id is ``next_layer``."""
        if self.save:
            number, name = self.next_layer, call_name(info.path, call)
            if number in self.save or name in self.save:
                # banked values must not change when a later layer works in place
                self.banked[number] = self.banked[name] = snapshot(output)

    def release(self) -> None:
        """Free tensors that only the run needed; measurements and captured layers stay."""

    def metrics(self) -> LayerColumns:
        """Return the measured layers, in order."""
        return LayerColumns() if self.measurement is None else self.measurement.layers()


def snapshot(value: Any) -> Any:
    """Return a copy of a nested value with every tensor cloned, including strides; other objects are shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    if not any(True for _ in tensors_in(value)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple.__new__(type(value), [snapshot(item) for item in value])
    if isinstance(value, (list, tuple)):
        return (
            type(value)(snapshot(item) for item in value)
            if type(value) in (list, tuple)
            else list(map(snapshot, value))
        )
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    return [snapshot(tensor) for tensor in tensors_in(value)]
