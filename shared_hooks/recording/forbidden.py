"""Assignments that can never run: a flag of the object, which nothing changes, keeps the method from reaching them.

``if self.cached: self._edges = ...`` assigns nothing while ``self.cached`` is False, and neither does what follows
``if not self.quantised: return x``.
"""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shared_hooks.purity import Impure, source_of

Flags = dict[str, Any]
"""The attributes of one object that nothing changes while the model runs."""
_BINDS = frozenset({"STORE_FAST", "STORE_DEREF", "DELETE_FAST", "DELETE_DEREF"})
_NEVER = frozenset(
    """
    torch.jit.is_scripting torch.jit.is_tracing torch.compiler.is_compiling torch.compiler.is_dynamo_compiling
    torch.compiler.is_exporting torch.onnx.is_in_onnx_export
    """.split()
)
"""What is false wherever a model's Python runs as it is written."""
_BLOCKS = ("body", "orelse", "finalbody", "handlers")


def is_unreachable(
    function: types.FunctionType,
    attribute: str,
    objects: Sequence[tuple[type, Flags]],
    is_changed: Callable[[str], bool],
) -> bool:
    """Whether ``function`` is a method that sets an attribute of this name for none of ``objects``, given as class and
    attributes: all that its first argument may be. ``is_changed``: whether any code sets attributes of a name.

    False where the source is not at hand, or the function is not a method of modules.
    """
    owners = [(kind, flags) for kind, flags in objects if _has(kind, function)]
    # what is in ``_modules`` counts as the module's, too; a descriptor of the class goes before its attributes
    flags_of = [
        {name: value for name, value in flags.items() if not hasattr(type(_on_class(kind, name)), "__get__")}
        for kind, flags in owners
        if "_modules" in flags
    ]
    if not flags_of or not all(issubclass(kind, nn.Module) for kind, _ in owners):
        return False
    try:
        tree = source_of(function.__code__)
    except Impure:
        return False
    named = tree.args.posonlyargs + tree.args.args
    if not named or _rebinds(function.__code__, named[0].arg):
        return False
    return not any(_Walk(named[0].arg, attribute, flags, is_changed).block(tree.body)[0] for flags in flags_of)


def _rebinds(code: types.CodeType, name: str) -> bool:
    """Whether a function, or one inside it, gives this name another value."""
    binds = any(step.opname in _BINDS and step.argval == name for step in dis.get_instructions(code))
    return binds or any(_rebinds(part, name) for part in code.co_consts if isinstance(part, types.CodeType))


def _has(kind: type, function: types.FunctionType) -> bool:
    return any(value is function for base in kind.__mro__ for value in vars(base).values())


def _on_class(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


class _Walk:
    """What one object's method reaches."""

    def __init__(self, me: str, attribute: str, flags: Flags, is_changed: Callable[[str], bool]) -> None:
        self._me, self._attribute, self._flags, self._is_changed = me, attribute, flags, is_changed

    def block(self, body: Sequence[ast.AST]) -> tuple[bool, bool]:
        """Whether the assignment may be reached, and whether the end may."""
        for node in body:
            reached, falls = self._statement(node)
            if reached or not falls:
                return reached, falls
        return False, True

    def _statement(self, node: ast.AST) -> tuple[bool, bool]:
        if isinstance(node, ast.If):
            truth = self._truth(node.test)
            ways = [node.body] * (truth is not False) + [node.orelse] * (truth is not True)
            found = [self.block(way) for way in ways]
            return any(reached for reached, _ in found), any(falls for _, falls in found)
        if isinstance(node, (ast.For, ast.While, ast.With, ast.Try, ast.ExceptHandler)):
            inner = [part for name in _BLOCKS for part in [getattr(node, name, [])] if part]
            heads = [part for name, part in ast.iter_fields(node) if name not in _BLOCKS]
            parts = [one for part in heads for one in (part if isinstance(part, list) else [part])]
            return any(self.block(way)[0] for way in inner) or any(map(self._assigns, parts)), True
        return self._assigns(node), not isinstance(node, (ast.Return, ast.Raise))

    def _assigns(self, node: Any) -> bool:
        if not isinstance(node, ast.AST):
            return False
        return any(
            isinstance(part, ast.Attribute) and part.attr == self._attribute and not isinstance(part.ctx, ast.Load)
            for part in ast.walk(node)
        )

    def _truth(self, test: ast.expr) -> bool | None:
        """None: it depends."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._truth(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts = [self._truth(part) for part in test.values]
            decides = isinstance(test.op, ast.Or)
            if decides in parts:
                return decides
            return None if None in parts else not decides
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name) and test.value.id == self._me:
            value = self._flags.get(test.attr)
            if type(value) is bool and not self._is_changed(test.attr):
                return value
        if isinstance(test, ast.Call) and not test.args and ast.unparse(test.func) in _NEVER:
            return False
        return None
