"""The source of a function as a tree, where it is for certain the code that runs. For `purity.code`."""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Iterable

from shared_hooks.purity.values import Impure


def stored(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """Names that a function assigns, but for those of comprehensions: these are other names, outside they are not."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.comprehension):
            yield from stored([node.iter, *node.ifs])
        else:
            yield from stored(ast.iter_child_nodes(node))


_sources: dict[int, tuple[types.CodeType, ast.FunctionDef | str]] = {}


def source_of(code: types.CodeType) -> ast.FunctionDef:
    """The source of a function, as a tree, if it is what was compiled; else `Impure`."""
    known = _sources.get(id(code))
    if known is None or known[0] is not code:
        if len(_sources) > 4096:
            _sources.clear()
        known = _sources[id(code)] = (code, _found_source(code))
    if isinstance(known[1], str):
        raise Impure(known[1])
    return known[1]


def _found_source(code: types.CodeType) -> ast.FunctionDef | str:
    place = code.co_name, code.co_firstlineno
    try:
        tree, made = _file(code.co_filename)
        return tree[place] if _same_code(made[place], code) else "its source is not the code that runs"
    except (KeyError, SyntaxError, ValueError, RecursionError, MemoryError):
        return "its source is not to be had"


@functools.lru_cache(maxsize=256)
def _file(name: str) -> tuple[dict[tuple[str, int], ast.FunctionDef], dict[tuple[str, int], types.CodeType]]:
    """The functions of a file by name and line: as trees, and compiled. As a whole, since imports change the code."""
    tree = ast.parse("".join(linecache.getlines(name)))
    functions = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions[node.name, min([node.lineno, *(part.lineno for part in node.decorator_list)])] = node
    made = compile(tree, name, "exec", dont_inherit=True)
    return functions, {(part.co_name, part.co_firstlineno): part for part in _codes(made)}


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Every code object inside, however deep."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return inner + [deeper for part in inner for deeper in _codes(part)]


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    said = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount",
            "co_posonlyargcount")  # fmt: skip
    if any(getattr(one, name) != getattr(other, name) for name in said):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    for mine, theirs in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(mine, types.CodeType) and isinstance(theirs, types.CodeType):
            if not _same_code(mine, theirs):
                return False
        elif type(mine) is not type(theirs) or repr(mine) != repr(theirs):
            return False
    return True
