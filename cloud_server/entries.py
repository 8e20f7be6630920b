"""One model to serve, and how: a line, or a table, of ``[models]`` in the server's file (`config`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared_hooks.config import Table, kind_of
from shared_hooks.config.targets import resolve
from shared_hooks.errors import IsthmusError, SpecError
from shared_hooks.models import ModelSpec, load_spec
from shared_hooks.models.named import spec_from_table
from shared_hooks.showing import short

MOST_ROWS = 4096
COMPILED = ("bitwise", "rounding")
DecodingFactory = Callable[..., Any]
"""(`WrappedModel`, name of a layer) -> `models.decoding.DecodingTail`."""


@dataclass(frozen=True)
class WarmUp:
    """Tails of a model's example that are run before it serves. Raises SpecError for sizes that are none."""

    cuts: tuple[str, ...] = ()
    """Names of layers; none = the last that can be cut at."""
    batch_sizes: tuple[int, ...] = ()
    """Rows that the example is given; none = as many as it has."""

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            if not 1 <= size <= MOST_ROWS:
                raise SpecError(f"warm_up.batch_sizes: expected 1 to {MOST_ROWS}, found {size}")


@short
@dataclass(frozen=True)
class ModelEntry:
    """One model to serve: its spec, and how far hooks descend into it (None = down to the leaves)."""

    spec: ModelSpec
    depth: int | None = None
    decoding: DecodingFactory | None = None
    """What makes the tails of its decoding sessions, in place of our own."""
    device: str = ""
    """As `ServerConfig.device`; empty = where the server is."""
    warm_up: WarmUp = field(default_factory=WarmUp)
    compile: str = ""
    """Whether the tails of `warm_up` are compiled, and used: "bitwise" where every look at them found equal bits,
    "rounding" where these are within `shared_hooks.compiling.TOLERANCE`. Empty: they are not.
    """

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 0:
            raise SpecError(f"depth: expected at least 0, found {self.depth}")
        if self.compile not in ("", *COMPILED):
            raise SpecError(f'compile: expected "{COMPILED[0]}" or "{COMPILED[1]}", found "{self.compile}"')


def entries_of(table: Table, folder: Path) -> tuple[ModelEntry, ...]:
    """What ``[models]`` says; relative files lie in ``folder``. Raises SpecError."""
    entries = []
    for name, value in table.rest().items():
        # Several versions of one model: behind Ray Serve each has replicas of its own (docs/ray.md).
        references = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
        if references and (isinstance(value, str) or references == value):
            for reference in references:
                file = folder / reference
                try:
                    entries.append(ModelEntry(load_spec(f"{name}={file if file.is_file() else reference}")))
                except IsthmusError as error:
                    raise SpecError(f"{table.origin}: {table.name(name)}: {error}") from error
        elif isinstance(value, dict):
            inner = Table(value, table.origin, table.name(name))
            depth = inner.take("depth", int)
            if depth is not None and depth < 0:
                inner.fail("depth", f"expected at least 0, found {depth}")
            tails = inner.take("decoding", str)
            decoding = None if tails is None else resolve(tails, folder, f"{table.origin}: {inner.name('decoding')}")
            device, warm_up = inner.take("device", str) or "", _warm_up(inner.table("warm_up"))
            compiled = inner.take_any("compile")
            spec = spec_from_table(inner, folder, model_id=name)
            entries.append(ModelEntry(spec, depth, decoding, device, warm_up, _compiled(inner, compiled)))
        else:
            table.fail(
                name, f"expected a built-in model, a spec file, module:callable or a table, found {kind_of(value)}"
            )
    return tuple(entries)


def _compiled(table: Table, value: object) -> str:
    """True is the stricter one."""
    if value in (None, False):
        return ""
    if value is not True and value not in COMPILED:
        table.fail("compile", f'expected true, "{COMPILED[0]}" or "{COMPILED[1]}"')
    return COMPILED[0] if value is True else str(value)


def _warm_up(table: Table | None) -> WarmUp:
    if table is None:
        return WarmUp()
    cuts = table.take_list("cuts", str, "a list of layers' names") or ()
    sizes = table.take_list("batch_sizes", int, "a list of sizes") or ()
    table.done()
    return WarmUp(tuple(cuts), tuple(sizes))
