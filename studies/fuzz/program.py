"""A random model as data: what hypothesis draws and shrinks, and what `source` prints as an ``nn.Module``."""

from __future__ import annotations

from dataclasses import dataclass

INPUTS = (
    "one",
    "two",
    "keyword",
    "start and end",
    "same twice",
    "view of the first",
    "list",
    "dict",
    "odd address",
    "subclass",
    "number",
    "conjugate",
)
FORMS = ("tensor", "pair", "dict")
OUTPUTS = ("last", "three", "dict", "list", "dataclass", "named tuple", "nested", "views", "number")


@dataclass(frozen=True)
class Step:
    """One statement. ``a`` and ``b`` name registers, counted back from the latest (modulo their number); ``n`` is a
    small number whose meaning is the kind's own: a slot, a row, a constant. ``body`` is of compound kinds only.
    """

    kind: str
    a: int = 0
    b: int = 0
    n: int = 0
    body: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Program:
    """A model: its forward, its nested modules, and how it is called.

    Every register holds a float tensor of shape (batch, 8). Register 0 is the first input, others follow. ``forms``:
    what the blocks answer with. ``stores``: the places outside of registers where its Python keeps things
    (`stores.STORES`). ``training``: the model is left in training mode. ``second``: some requests have another
    signature, a batch of 3 instead of 2. ``depth``: of the wrapping, as `WrappedModel` takes it.
    """

    root: tuple[Step, ...]
    blocks: tuple[tuple[Step, ...], ...] = ()
    stores: tuple[str, ...] = ("attribute", "context")
    inputs: str = "one"
    output: str = "last"
    training: bool = False
    second: bool = False
    forms: tuple[str, ...] = ("tensor", "tensor")
    depth: int | None = None
