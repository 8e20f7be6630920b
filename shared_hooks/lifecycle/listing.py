"""A listing of hooks as lines of text: stage after stage, in the order in which they are called, with their cost."""

from __future__ import annotations

from collections.abc import Iterator

from shared_hooks.lifecycle.registry import Lifecycle

HEADERS = ("stage", "hook", "priority", "calls", "failures", "total ms", "us a call")


def is_default(lifecycle: Lifecycle) -> bool:
    """Whether nobody has mounted anything of their own."""
    return all(getattr(hook, "built_in", False) for hook in lifecycle.hooks)


def rows(lifecycle: Lifecycle) -> list[tuple[str, ...]]:
    """As text, in the columns of `HEADERS`; a stage is named at its first hook."""
    found: list[tuple[str, ...]] = []
    before = None
    for one in lifecycle.listing():
        stage = one.stage.value if one.stage is not before else ""
        before = one.stage
        a_call = f"{one.cost_ns / one.calls / 1e3:.1f}" if one.calls else "-"
        numbers = (str(one.priority), str(one.calls), str(one.failures), f"{one.cost_ns / 1e6:.3f}", a_call)
        found.append((stage, one.name, *numbers))
    return found


def lines(lifecycle: Lifecycle) -> Iterator[str]:
    """A table in fixed columns."""
    table = [HEADERS, *rows(lifecycle)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        yield "  ".join([*names, *numbers])
