"""The faults: cosmic-ray's operators and one of our own over the guarding modules, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword

GUARDS: Final = (
    # memory
    "shared_hooks/generation/remote_tensor.py",
    "shared_hooks/models/inputs.py",
    "shared_hooks/picture.py",
    "cloud_server/requests/*.py",
    "cloud_server/scheduling/*.py",
    "cloud_server/fleet/hosts.py",
    "edge_client/request/sending.py",
    # state
    "shared_hooks/purity/*.py",
    "shared_hooks/state/*.py",
    "shared_hooks/generation/hidden.py",
    "cloud_server/models/engine.py",
    # identity
    "cloud_server/access/*.py",
    "shared_hooks/config.py",
    "shared_hooks/crossing/description.py",
    # bounds
    "shared_hooks/crossing/format.py",
    "shared_hooks/crossing/description.py",
    "shared_hooks/crossing/parcel.py",
    "shared_hooks/tensors/views.py",
    "shared_hooks/codecs/quantised.py",
    "shared_hooks/codecs/codec.py",
    "cloud_server/transport/rest/application.py",
    "cloud_server/models/admission.py",
    "shared_hooks/batching/*.py",
    # numbers
    "shared_hooks/metrics/*.py",
    "shared_hooks/tensors/staging.py",
    "shared_hooks/codecs/quantised.py",
    "edge_client/calibrating/inputs.py",
    "edge_client/planning/link.py",
    "edge_client/planning/link.py",
)
_COMPARED = {
    "Lt": ("LtE", "GtE"), "LtE": ("Lt", "Gt"), "Gt": ("GtE", "LtE"), "GtE": ("Gt", "Lt"), "Eq": ("NotEq",),
    "NotEq": ("Eq",), "Is": ("IsNot",), "IsNot": ("Is",),
}  # fmt: skip
_COMPUTED = {"Add": "Sub", "Sub": "Add", "Mul": "FloorDiv", "FloorDiv": "Mul", "Div": "Mul", "BitAnd": "BitXor"}
OPERATORS: Final = (
    *(f"core/ReplaceComparisonOperator_{one}_{other}" for one, others in _COMPARED.items() for other in others),
    *(f"core/ReplaceBinaryOperator_{one}_{other}" for one, other in _COMPUTED.items()),
    "core/AddNot", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue", "core/ReplaceUnaryOperator_Delete_Not", "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak", "core/NumberReplacer", "core/ZeroIterationForLoop",
    "left out",
)  # fmt: skip


class LeaveOut(Operator):  # type: ignore[misc]
    """A statement that only calls something, or raises, is left out: a check that does nothing."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "simple_stmt" and _acts(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.children[0]
        node.children[0] = Keyword("pass", first.start_pos, prefix=first.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _acts(node: Any) -> bool:
    calls = node.type in ("atom_expr", "power") and getattr(node.children[-1], "children", [None])[0] == "("
    return calls or node.type == "raise_stmt"


@dataclass(frozen=True)
class Fault:
    """One change of one file."""

    path: str
    """From the project's root."""
    line: int
    """From 1; the first that is changed."""
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"

    def code(self, root: Path) -> str:
        """The file's text with the fault in it."""
        text: str = mutate_code((root / self.path).read_text(), _operator(self.operator), self.occurrence)
        return text


def drawn(root: Path, count: int, seed: int, only: str = "") -> list[Fault]:
    """``count`` faults, one file after the other and in each one kind of fault after the other; fewer if there are no
    more. A change after which the file compiles to the same code is none.
    """
    draw = random.Random(seed)
    paths = sorted({str(file.relative_to(root)) for glob in GUARDS for file in root.glob(glob)})
    waiting = {path: _shuffled(root, path, draw) for path in paths if only in path}
    found: list[Fault] = []
    while waiting and len(found) < count:
        names = list(waiting)
        draw.shuffle(names)
        for path in names:
            while waiting[path] and not _differs(root, waiting[path][-1]):
                waiting[path].pop()
            if not waiting[path]:
                del waiting[path]
            elif len(found) < count:
                found.append(waiting[path].pop())
    return found


def _shuffled(root: Path, path: str, draw: random.Random) -> list[Fault]:
    """Last come, first drawn."""
    text = (root / path).read_text()
    tree, lines = get_ast(text), text.splitlines()
    kinds: list[list[Fault]] = []
    for name in OPERATORS:
        operator = _operator(name)
        places = [place for node in ast_nodes(tree) for place in operator.mutation_positions(node)]
        faults = [
            Fault(path, start[0], name, number)
            for number, (start, _) in enumerate(places)
            if not lines[start[0] - 1].lstrip().startswith("@")
        ]  # a decorator's options are no guard
        draw.shuffle(faults)
        kinds.append(faults)
    draw.shuffle(kinds)
    depth = max(map(len, kinds), default=0)
    return [kind[level] for level in range(depth) for kind in kinds if level < len(kind)][::-1]


def _differs(root: Path, fault: Fault) -> bool:
    try:
        changed = compile(fault.code(root), fault.path, "exec")
    except (SyntaxError, ValueError):
        return False
    return changed != compile((root / fault.path).read_text(), fault.path, "exec")


def _operator(name: str) -> Any:
    return LeaveOut() if name == "left out" else get_operator(name)()
