"""Reads the source of a forward and vouches that it writes no state: the words it knows are few, all else is `Impure`.

A small abstract interpretation. Every name may hold *data* (a tensor, a number, text, None, a container that was made
here of such) or certain *objects* that the source refers to: modules, functions, lists of modules. Data is computed
with; of objects, modules are called and lists are gone through. Nothing is stored but to local names, so that no object
changes. That the source is the code that runs is checked too: compiled, it must give the same bytes.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from shared_hooks.purity.calls import Calls
from shared_hooks.purity.values import DATA, NOTHING, Impure, What, elements_of, is_plain, joined

# The source of a function as a tree, where it is for certain the code that runs. For `purity.code`.


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


class Analysis:
    """Looks at functions; ``module`` raises `Impure` for a module that may not be called."""

    def __init__(self, module: Callable[[nn.Module], None]) -> None:
        self.module = module
        self.seen: dict[tuple[int, int], str] = {}
        self.running: set[tuple[int, int]] = set()
        self.assumed = False

    def function(self, function: Any, owner: nn.Module | None) -> None:
        """A function, or a method of ``owner``; all other arguments are data. Raises `Impure`."""
        key = id(function), id(owner)
        if key not in self.seen:
            if key in self.running:
                self.assumed = True  # recursion adds nothing
                return
            self.running.add(key)
            known = set(self.seen)
            try:
                _Reader(self, function, owner).read()
                self.seen[key] = ""
            except Impure as found:
                if self.assumed:  # what was found of others on the way may rest on what has just failed
                    self.seen = {other: self.seen[other] for other in known}
                self.seen[key] = f"{function.__qualname__}: {found}"
            finally:
                self.running.discard(key)
        if self.seen[key]:
            raise Impure(self.seen[key])


class _Reader(Calls):
    """One function's source."""

    def __init__(self, analysis: Analysis, function: types.FunctionType, owner: nn.Module | None) -> None:
        self.check_module, self.check_function = analysis.module, analysis.function
        self.spaces = (function.__globals__, vars(builtins))
        if function.__builtins__ is not vars(builtins):  # type: ignore[attr-defined, unused-ignore]
            raise Impure("it has other built-in functions")
        self.tree = source_of(function.__code__)
        if function.__code__.co_freevars:
            raise Impure("it uses names of a function around it")
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if not all(map(is_plain, defaults)):
            raise Impure("a default value is more than a number, text or a tuple")
        given = self.tree.args
        names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        names += [argument.arg for argument in (given.vararg, given.kwarg) if argument is not None]
        self.names: dict[str, What] = dict.fromkeys(names, DATA)
        if owner is not None:
            if not given.posonlyargs + given.args:
                raise Impure("it has no self")
            self.names[names[0]] = What(objects=(owner,))
        self.local = set(names) | set(stored(self.tree.body))

    def read(self) -> None:
        for _ in range(20):
            before = {name: what.key for name, what in self.names.items()}
            self.body(self.tree.body)
            if before == {name: what.key for name, what in self.names.items()}:
                return
        raise Impure("its names do not come to rest")

    # -- statements ---------------------------------------------------------------------------------------------

    def body(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            handler = getattr(self, f"do_{type(statement).__name__}", None)
            if handler is None:
                raise Impure(f"line {statement.lineno}: {type(statement).__name__.lower()}")
            handler(statement)

    def do_Pass(self, node: Any) -> None:
        """Nothing to do."""

    do_Break = do_Continue = do_Pass

    def do_Expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def do_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            what = self.value(node.value)
            if not what.is_data or what.each is not None:
                raise Impure(f"line {node.lineno}: it returns an object")

    def do_Assign(self, node: ast.Assign) -> None:
        what = self.value(node.value)
        for target in node.targets:
            self.store(target, what)

    def do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.store(node.target, self.value(node.value))

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            raise Impure(f"line {node.lineno}: it stores to something else than a name")
        self.data(self.name(node.target.id), self.value(node.value))
        self.store(node.target, DATA)

    def do_If(self, node: ast.If | ast.While) -> None:
        self.truth(self.value(node.test))
        self.body(node.body)
        self.body(node.orelse)

    do_While = do_If

    def do_For(self, node: ast.For) -> None:
        self.store(node.target, elements_of(self.value(node.iter)))
        self.body(node.body)
        self.body(node.orelse)

    def do_Assert(self, node: ast.Assert) -> None:
        self.truth(self.value(node.test))
        if node.msg is not None:
            self.data(self.value(node.msg))

    def do_Raise(self, node: ast.Raise) -> None:
        if node.cause is not None or not isinstance(node.exc, ast.Call) or not isinstance(node.exc.func, ast.Name):
            raise Impure(f"line {node.lineno}: it raises what is no exception of Python's own")
        kind = vars(builtins).get(node.exc.func.id)
        known = isinstance(kind, type) and issubclass(kind, BaseException)
        if not known or self.name(node.exc.func.id).objects != (kind,) or node.exc.keywords:
            raise Impure(f"line {node.lineno}: it raises what is no exception of Python's own")
        self.data(*map(self.value, node.exc.args))

    def store(self, target: ast.expr, what: What) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = joined((self.names.get(target.id, NOTHING), what))
        elif isinstance(target, (ast.Tuple, ast.List)):
            whats = what.parts if what.parts is not None and not what.data else None
            plain = whats is not None and len(whats) == len(target.elts) and what.each is None and not what.objects
            starred = any(isinstance(item, ast.Starred) for item in target.elts)
            for number, item in enumerate(target.elts):
                if plain and whats is not None and not starred:
                    self.store(item, whats[number])
                elif isinstance(item, ast.Starred):
                    each = elements_of(what)
                    self.store(item.value, DATA if each.is_data else What(each=each))
                else:
                    self.store(item, elements_of(what))
        else:
            raise Impure(f"line {target.lineno}: it stores to something else than a name")
