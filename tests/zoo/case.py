"""What an entry of the zoo is: a model, its inputs, and what is claimed of it.

A zoo module decorates its classes with :func:`zoo`; :data:`CASES` collects them in order. ``Case.build()`` draws the
weights from a fixed seed, so that two separately built instances agree bit for bit, as an edge and a cloud would after
loading one weights file.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tests import seeds

Call = tuple[tuple[Any, ...], dict[str, Any]]
Setting = Callable[[], AbstractContextManager[Any]]
ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


class Draw:
    """Seeded source of inputs: equal seeds give equal tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(1000 + seed)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal values, drawn in float32 (complex64 for complex types) and then converted."""
        drawn = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=self.generator, dtype=drawn).to(dtype)

    def ints(self, high: int, *shape: int) -> Tensor:
        """int64 values in [0, high)."""
        return torch.randint(high, shape, generator=self.generator)

    def bools(self, *shape: int) -> Tensor:
        """Fair coin flips."""
        return torch.randint(2, shape, generator=self.generator).bool()


@dataclass(frozen=True)
class Case:
    """One model of the zoo and what is claimed of it.

    ``make(draw)`` gives ``(args, kwargs)``. ``alternative`` is used instead for :meth:`other_inputs` where other values
    of the same shapes do not show the point. ``setting`` surrounds every run of the model, cut or not;
    ``reference_setting`` additionally surrounds runs of the unwrapped model (documented kernel changes only).
    ``branches``: other values may take another path than the planned one, so an error of the package's tree is an
    acceptable answer to them. ``loud``: so it is to the planned inputs, because no plan can foresee the trouble.
    ``max_refused`` is the share of cuts that may be refused; 0.02 is the promise.
    """

    name: str
    build: Callable[[], nn.Module]
    make: Callable[[Draw], Call]
    alternative: Callable[[Draw], Call] | None = None
    notes: str = ""
    listed: bool = False
    branches: bool = False
    loud: bool = False
    max_refused: float = 0.02
    setting: Setting = nullcontext
    reference_setting: Setting = nullcontext
    tags: frozenset[str] = field(default_factory=frozenset)

    def inputs(self) -> Call:
        """The inputs a plan is made on; fresh tensors at every call."""
        return self.make(Draw(0))

    def other_inputs(self) -> Call:
        """Inputs of the same signature with other values."""
        return (self.alternative or self.make)(Draw(1))

    def run(self, model: nn.Module, call: Call | None = None) -> Any:
        """The unwrapped model's own output under ``no_grad``."""
        args, kwargs = self.inputs() if call is None else call
        with torch.no_grad(), self.setting(), self.reference_setting():
            return model(*args, **kwargs)


CASES: list[Case] = []


def call(*args: Any, **kwargs: Any) -> Call:
    """The arguments of one call of a model."""
    return args, kwargs


def seeded(make_model: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    """A builder whose every call gives the same weights; normalisations get statistics that are not the identity."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated ways of building are still found in the wild
            seeds.seed(seed)
            model = make_model()
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.is_floating_point() and tensor.ndim == 1:
                    low = 0.5 if name.endswith(("weight", "running_var")) else -0.5
                    with torch.no_grad():
                        tensor.uniform_(low, low + 1.0)
        return model.eval()

    return build


def snake(name: str) -> str:
    """``UNetSkips`` to ``unet_skips``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


def zoo(make: Callable[[Draw], Call], **claims: Any) -> Callable[[ModuleClass], ModuleClass]:
    """Class decorator: adds the class to the zoo under its own name. ``claims`` are fields of :class:`Case`."""

    def register(cls: ModuleClass) -> ModuleClass:
        add(snake(cls.__name__), cls, make, **claims)
        return cls

    return register


def add(name: str, make_model: Callable[[], nn.Module], make: Callable[[Draw], Call], **claims: Any) -> None:
    """Add a model that is not a class of its own."""
    CASES.append(Case(name=name, build=seeded(make_model), make=make, **claims))


def vector(draw: Draw) -> Call:
    """One (2, 8) float tensor: what most small models take."""
    return call(draw.randn(2, 8))


def image(draw: Draw) -> Call:
    """One (2, 3, 16, 16) float tensor."""
    return call(draw.randn(2, 3, 16, 16))


def sequence(draw: Draw) -> Call:
    """One (2, 5, 8) float tensor: batch, time, features."""
    return call(draw.randn(2, 5, 8))
