"""A stand-in for a value of the prefix that nobody may read.

Shape, strides, dtype and device are right, there is no data behind it, and an operation that reads it raises
`PlaceholderRead`: never a zero, never garbage. Views of a placeholder are placeholders; operations that look at its
form alone (``zeros_like``) work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from shared_hooks.errors import PlaceholderRead
from shared_hooks.forward.operations import FORM_ONLY
from shared_hooks.modules import running


class Placeholder(torch.Tensor):
    """A tensor without data."""

    # plain tensor as far as the function level is concerned, so that no code path changes because of it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Placeholder:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=device)
        assert isinstance(made, Placeholder)
        # its memory begins at address 0: whoever asks for a pointer gets an error, and not that
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in FORM_ONLY:
            return func(*_swap(args, _real), **_swap(kwargs, _real))
        writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
        views = bool(schema.returns) and all(result.alias_info is not None for result in schema.returns)
        if not any(value.numel() for value in _placeholders((args, kwargs))):
            return func(*_swap(args, _real), **_swap(kwargs, _real))  # an empty tensor has nothing to read
        if views and not writes:
            device = next(value.device for value in args if isinstance(value, Placeholder))
            return _wrap(func(*_swap(args, _meta), **_swap(kwargs, _meta)), device)
        _refuse(f"{schema.name.removeprefix('aten::')}()", next(_placeholders((args, kwargs))))

    def __setattr__(self, name: str, value: Any) -> None:
        # placeholders are shared by the requests of a cut: this one is not to be seen again
        session: Any = running.get()
        if session is not None:
            session.tagged = True
        super().__setattr__(name, value)

    def tolist(self) -> Any:
        """Raises `PlaceholderRead`, where torch would complain about subclasses; a replay may answer it."""
        return _replayed(torch.Tensor.tolist, self)

    def as_subclass(self, cls: Any) -> Any:
        """As `tolist`."""
        try:
            return torch.Tensor.as_subclass(self, cls)
        except (RuntimeError, TypeError):
            _refuse(f"as_subclass({cls.__name__})", self)

    def numpy(self, *, force: bool = False) -> Any:
        """As `tolist`."""
        return _replayed(torch.Tensor.numpy, self)

    def data_ptr(self) -> int:
        """As `tolist`."""
        _refuse("data_ptr()", self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype})"


def check_real(tensors: Iterable[torch.Tensor]) -> None:
    """Raises `PlaceholderRead` if there is one among the tensors that a model gives."""
    for tensor in tensors:
        if isinstance(tensor, Placeholder):
            _refuse("the model's output", tensor)


def _replayed(method: Any, value: Placeholder) -> Any:
    try:
        return method(value)  # a function mode sees this call and may answer it
    except (RuntimeError, TypeError):
        _refuse(f"{method.__name__}()", value)


def _refuse(what: str, value: torch.Tensor) -> NoReturn:
    error = PlaceholderRead(
        f"{what} reads a value of shape {tuple(value.shape)} that was not sent: this input takes a path through the "
        "model that the plan does not hold; plan with this input on the edge and try again"
    )
    # a model may swallow exceptions: the session remembers this one and raises it at the end
    session = running.get()
    if session is not None:
        session.failed(error)
    raise error


def _placeholders(value: Any) -> Any:
    if isinstance(value, Placeholder):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _placeholders(item)
    elif isinstance(value, dict):
        yield from _placeholders(list(value.values()))


def _swap(value: Any, into: Any) -> Any:
    if isinstance(value, Placeholder):
        return into(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_swap(item, into) for item in value)
    if isinstance(value, dict):
        return {key: _swap(item, into) for key, item in value.items()}
    return value


def _meta(value: Placeholder) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _real(value: Placeholder) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _wrap(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return Placeholder(value.shape, value.stride(), value.dtype, device)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap(item, device) for item in value)
    return value
