"""The hierarchy map and its coverage report for the terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TextIO

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from edge_client.screen.text import printable
from shared_hooks.mapping import Coverage, HierarchyMap, ModuleEntry

WIDE = 1000
"""Columns where the output is no terminal: lines there are for searching, not for looking at."""
LISTED = 8


def print_tree(known: HierarchyMap, stdout: TextIO) -> None:
    """The module tree: tag, name, the layers it ran as, and the operations between the modules it calls."""
    layers: dict[str, list[int]] = defaultdict(list)
    for call in known.calls:
        if call.layer_id is not None:
            layers[call.path].append(call.layer_id)
    operations: dict[str, Counter[str]] = defaultdict(Counter)
    for operation in known.operations:
        operations[known.by_call[operation.call].path][operation.name] += 1
    trees: dict[str, Tree] = {}
    top: Tree | None = None
    for module in known.modules:
        row = _row(module, layers[module.path])
        tree = trees[module.path] = Tree(row) if module.parent is None else trees[module.parent].add(row)
        top = top or tree
        if module.path in operations:
            tree.add(Text(_counted(operations[module.path]), style="dim italic"))
    console = Console(file=stdout, highlight=False, width=None if stdout.isatty() else WIDE)
    if top is not None:
        console.print(top)


def _row(module: ModuleEntry, layers: list[int]) -> Text:
    row = Text(printable(module.tag.rpartition("/")[2]), style="bold" if module.calls else "dim", no_wrap=True)
    if module.parent is not None:
        row.append(f"  {printable(module.path)}", style="not bold dim")
    if len(layers) == 1:
        row.append(f"  layer {layers[0]}", style="not bold")
    elif layers:
        shown = ", ".join(map(str, layers[:LISTED])) + (", …" if len(layers) > LISTED else "")
        row.append(f"  layers {shown}", style="not bold")
    if module.calls > 1:
        row.append(f"  {module.calls} calls", style="not bold")
    if not module.calls and not module.holder:
        row.append("  never called", style="not dim")
    if module.names:
        row.append(f"  also {', '.join(map(printable, module.names))}", style="not bold dim")
    return row


def coverage_text(report: Coverage) -> str:
    """The coverage report, a line for each thing."""
    lines = [
        f"modules: {report.modules}, of them {len(report.both)} ran",
        f"only static: {_listed('never called', report.unused)}; {_listed('only hold others', report.holders)}",
        f"only dynamic: {sum(report.functional.values())} operations between modules"
        + (f" ({_counted(Counter(report.functional))})" if report.functional else ""),
        f"called again: {_listed('modules', [f'{path} ×{times}' for path, times in report.repeated.items()])}",
        "parents before children: "
        + (_listed("calls from elsewhere", report.from_elsewhere) if report.from_elsewhere else "yes, all calls"),
    ]
    return "\n".join(lines)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ×{times}" if times > 1 else name for name, times in counts.most_common())


def _listed(what: str, names: tuple[str, ...] | list[str]) -> str:
    if not names:
        return f"0 {what}"
    rest = f", … {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {what} ({', '.join(map(printable, names[:LISTED]))}{rest})"
