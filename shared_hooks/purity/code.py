"""Proves from the source of a forward that it writes no state. It knows few constructs; everything else is `Impure`.

A small abstract interpretation. Every name may hold *data* (a tensor, a number, text, None, a container of such that
was created here) or certain *objects* that the source refers to: modules, functions, lists of modules. Data is computed
with; of objects, modules are called and lists are iterated. Values are stored in local names only, so no object
changes. That the source is the code that runs is checked, too: compiled, it must give the same bytes.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import math
import os
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import get_overridable_functions

_TORCH = torch.__path__[0] + os.sep
_PLAIN = (
    bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, torch.Tensor, nn.Parameter,
)  # fmt: skip
_FACTORIES = """
    zeros ones full empty arange linspace logspace eye tensor as_tensor rand randn randint randperm zeros_like ones_like
    full_like empty_like rand_like randn_like complex polar cartesian_prod finfo iinfo is_tensor is_grad_enabled
    is_autocast_enabled tril_indices triu_indices scalar_tensor
"""
# Methods of tensors that do more than compute: they take functions, expose memory, set attributes.
_NO_METHODS = frozenset(
    """
    apply_ map_ map2_ backward register_hook register_post_accumulate_grad_hook reinforce requires_grad_ retain_grad
    set_ resize resize_ resize_as resize_as_ resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_ share_memory_
    storage untyped_storage typed_storage storage_type data_ptr const_data_ptr numpy record_stream as_subclass
    module_load detach_ rename_ rename new pin_memory squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_ as_strided_
    """.split()
)
METHODS = frozenset(
    name for name in dir(torch.Tensor) if name[0] != "_" and callable(getattr(torch.Tensor, name))
) - _NO_METHODS | frozenset(
    # of lists and dictionaries made here, and of text; none can be shared
    "append extend insert keys items get startswith endswith lower upper strip join".split()
)
ATTRIBUTES = frozenset(
    """
    shape dtype device ndim T mT H mH real imag is_cuda is_cpu is_sparse is_quantized is_meta is_mps layout itemsize
    nbytes requires_grad is_leaf type index min max eps tiny smallest_normal bits resolution values indices
    is_floating_point is_complex start stop step
    """.split()
)
FUNCTIONS: tuple[Any, ...] = (
    len, range, int, float, bool, str, complex, min, max, sum, abs, round, divmod, pow, any, all, slice, torch.Size,
    torch.device, *(value for value in vars(math).values() if isinstance(value, types.BuiltinFunctionType)),
)  # fmt: skip
THROUGH: tuple[Any, ...] = (list, tuple, reversed, sorted, iter)
_PREDICATES: tuple[Any, ...] = (
    torch.jit.is_scripting, torch.jit.is_tracing,  # type: ignore[attr-defined]
    torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling,
)  # fmt: skip
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Impure(Exception):
    """A construct that this module does not know; the message says where."""


@functools.cache
def torch_functions() -> dict[int, Any]:
    """torch's functions that take tensors and return tensors or values, and those that create tensors, by identity."""
    spaces = get_overridable_functions()
    found = [function for space, functions in spaces.items() if space is not torch.Tensor for function in functions]
    found += [getattr(torch, name) for name in _FACTORIES.split()] + list(_PREDICATES)
    return {id(function): function for function in found if callable(function)}


def torch_own(function: Any, depth: int = 4) -> bool:
    """Return whether a function is torch's, and so are all functions that it wraps."""
    if isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        inner = [value for value in cells if callable(value) and value is not function and not isinstance(value, type)]
        own = function.__code__.co_filename.startswith(_TORCH) and depth > 0
        return own and all(torch_own(value, depth - 1) for value in inner)
    return isinstance(function, (types.BuiltinFunctionType, type)) or type(function).__module__.startswith("torch")


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_plain(value: Any) -> bool:
    """Return whether it is a number, text, plain tensor or a tuple of those, which run no code."""
    return type(value) in _PLAIN or value is None or (type(value) is tuple and all(map(is_plain, value)))


@dataclass(frozen=True, eq=False)
class What:
    """What an expression may be: data, certain objects, a tuple of known ``parts``, an iterable over ``each``."""

    data: bool = False
    objects: tuple[Any, ...] = ()
    parts: tuple[What, ...] | None = None
    each: What | None = None

    @property
    def key(self) -> Any:
        parts = None if self.parts is None else tuple(part.key for part in self.parts)
        return self.data, frozenset(map(id, self.objects)), parts, self.each and self.each.key

    @property
    def is_data(self) -> bool:
        """Whether it is nothing but data."""
        parts = all(part.is_data for part in self.parts or ())
        return not self.objects and parts and (self.each is None or self.each.is_data)

    @property
    def is_readable(self) -> bool:
        """Whether it is data, or lists and dictionaries of data from elsewhere, which may only be read."""
        plain = all(type(value) in (list, dict) and listed(value).is_data for value in self.objects)
        parts = all(part.is_readable for part in self.parts or ())
        return plain and parts and (self.each is None or self.each.is_data)


NOTHING, DATA = What(), What(data=True)


def joined(whats: Iterable[What]) -> What:
    """Return the union: what may be any of these."""
    data = False
    objects: dict[int, Any] = {}
    parts: tuple[What, ...] | None = None
    each: What | None = None
    for what in whats:
        data |= what.data
        objects |= {id(value): value for value in what.objects}
        if what.parts is not None:
            if parts is not None and len(parts) != len(what.parts):
                raise Impure("tuples of different lengths meet")
            parts = what.parts if parts is None else tuple(map(both, parts, what.parts))
        if what.each is not None:
            each = what.each if each is None else both(each, what.each)
    return What(data, tuple(objects.values()), parts, each)


def both(one: What, other: What) -> What:
    return joined((one, other))


def classified(value: Any) -> What:
    """Return the kind of a value that the source refers to. None is nothing: whatever is done with it does nothing, or
    raises.
    """
    if value is None:
        return NOTHING
    if is_plain(value):
        return DATA
    if type(value) is tuple:
        return What(parts=tuple(map(classified, value)))
    known = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
    if type(value) in (list, dict) or isinstance(value, known) or id(value) in torch_functions():
        return What(objects=(value,))
    raise Impure(f"it refers to a {type(value).__name__}")


def listed(value: Any) -> What:
    """Return what iterating over a list, dictionary or container of modules gives."""
    if type(value) in (list, tuple):
        return joined(map(classified, value))
    if type(value) is dict:
        return joined(map(classified, value))
    if isinstance(value, CONTAINERS) and uses_torch_lookup(value):
        return DATA if isinstance(value, nn.ModuleDict) else joined(map(classified, value._modules.values()))
    if type(value) in (nn.ParameterList, nn.ParameterDict):
        return DATA
    raise Impure(f"it goes through a {type(value).__name__}")


def uses_torch_lookup(value: nn.Module) -> bool:
    """Return whether attributes, and for containers the elements, are found by torch's code only."""
    kind = type(value)
    names = ("__iter__", "__getitem__", "__len__") if isinstance(value, CONTAINERS) else ()
    return (
        kind.__getattribute__ is object.__getattribute__
        and kind.__getattr__ is nn.Module.__getattr__
        and not hasattr(kind, "__bool__")
        and all(torch_own(getattr(kind, name)) for name in ("__getattr__", *names))
    )


def elements_of(what: What) -> What:
    """Return what iterating over it gives."""
    found = [DATA] if what.data else []
    found += [*map(listed, what.objects), *(what.parts or ())]
    return joined(found + ([what.each] if what.each is not None else []))


# Calls in checked source (`purity.code`): of modules, methods, and known functions.

# Expressions in checked source (`purity.code`): their possible values, or why they may write state.

_MODULE_OWN = frozenset(vars(nn.Module()))


class Expressions:
    """The expressions of one function: ``names``: what it has stored, ``local``: those that it may store, ``spaces``:
    where others are found.
    """

    names: dict[str, What]
    local: set[str]
    spaces: tuple[dict[str, Any], ...]

    def store(self, target: ast.expr, what: What) -> None:
        """Record what ``target`` may hold from now on. Raises `Impure` unless it is a name."""
        raise NotImplementedError

    def of_Call(self, node: ast.Call) -> What:
        """Return the result of a call."""
        raise NotImplementedError

    def value(self, node: ast.expr) -> What:
        handler = getattr(self, f"of_{type(node).__name__}", None)
        if handler is None:
            raise Impure(f"line {node.lineno}: {type(node).__name__.lower()}")
        what: What = handler(node)
        return what

    def data(self, *whats: What) -> What:
        """Return the result of computing with data; computing with objects may run anything, and raises `Impure`."""
        if not all(what.is_data for what in whats):
            raise Impure("it computes with an object")
        return DATA

    def readable(self, *whats: What) -> What:
        """Check the arguments of functions that only read them: lists of data may come from elsewhere."""
        if not all(what.is_readable for what in whats):
            raise Impure("it hands an object to a function")
        return DATA

    def truth(self, what: What) -> None:
        for value in what.objects:
            if isinstance(value, nn.Module):
                counted = hasattr(type(value), "__len__") and not isinstance(value, CONTAINERS)
                if counted or not uses_torch_lookup(value):
                    raise Impure("it evaluates the truth of an object")
            elif type(value) not in (list, dict, types.FunctionType, types.BuiltinFunctionType):
                raise Impure("it evaluates the truth of an object")

    def of_Constant(self, node: ast.Constant) -> What:
        return classified(node.value)

    def of_Name(self, node: ast.Name) -> What:
        return self.name(node.id)

    def name(self, name: str) -> What:
        if name in self.local:
            return self.names.get(name, NOTHING)
        found = [self.names[name]] if name in self.names else []  # of a comprehension
        for space in self.spaces:
            if name in space:
                return joined([*found, classified(space[name])])
        if not found:
            raise Impure(f"nothing is called {name}")
        return found[0]

    def of_Tuple(self, node: ast.Tuple | ast.List) -> What:
        whats = [elements_of(self.value(item.value)) if isinstance(item, ast.Starred) else self.value(item)
                 for item in node.elts]  # fmt: skip
        if all(what.is_data and what.each is None for what in whats):
            return DATA
        if isinstance(node, ast.List) or any(isinstance(item, ast.Starred) for item in node.elts):
            return What(each=joined(whats))
        return What(parts=tuple(whats))

    of_List = of_Tuple

    def of_Dict(self, node: ast.Dict) -> What:
        if any(key is None for key in node.keys):
            raise Impure(f"line {node.lineno}: it unpacks a dictionary")
        return self.data(*(self.value(part) for part in (*node.keys, *node.values) if part is not None))

    def of_BinOp(self, node: ast.BinOp) -> What:
        return self.data(self.value(node.left), self.value(node.right))

    def of_UnaryOp(self, node: ast.UnaryOp) -> What:
        if isinstance(node.op, ast.Not):
            self.truth(self.value(node.operand))
            return DATA
        return self.data(self.value(node.operand))

    def of_BoolOp(self, node: ast.BoolOp) -> What:
        whats = [self.value(part) for part in node.values]
        for what in whats:
            self.truth(what)
        return joined(whats)

    def of_Compare(self, node: ast.Compare) -> What:
        whats = [self.value(part) for part in (node.left, *node.comparators)]
        if not all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            if any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
                self.readable(*whats)
            else:
                self.data(*whats)
        return DATA

    def of_IfExp(self, node: ast.IfExp) -> What:
        self.truth(self.value(node.test))
        return joined((self.value(node.body), self.value(node.orelse)))

    def of_JoinedStr(self, node: ast.JoinedStr) -> What:
        return self.data(*map(self.value, node.values))

    def of_FormattedValue(self, node: ast.FormattedValue) -> What:
        return self.data(self.value(node.value), *([self.value(node.format_spec)] if node.format_spec else []))

    def of_Slice(self, node: ast.Slice) -> What:
        return self.data(*(self.value(part) for part in (node.lower, node.upper, node.step) if part is not None))

    def of_Subscript(self, node: ast.Subscript) -> What:
        base = self.value(node.value)
        self.data(self.value(node.slice))
        found = [DATA] if base.data else []
        for value in base.objects:
            if isinstance(value, nn.ModuleDict) and uses_torch_lookup(value):
                found.append(joined(map(classified, value._modules.values())))
            elif type(value) is dict:
                found.append(joined(map(classified, value.values())))
            else:
                found.append(listed(value))
        if base.parts is not None:
            index = node.slice.value if isinstance(node.slice, ast.Constant) else None
            inside = type(index) is int and -len(base.parts) <= index < len(base.parts)
            found += [base.parts[index]] if inside else base.parts  # type: ignore[index]
        found += [base.each] if base.each is not None else []
        what = joined(found)
        # a part of a list of modules is such a list
        return What(each=what) if isinstance(node.slice, ast.Slice) and not what.is_data else what

    def of_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> What:
        for part in node.generators:
            if part.is_async:
                raise Impure(f"line {node.lineno}: async")
            self.store(part.target, elements_of(self.value(part.iter)))
            for test in part.ifs:
                self.truth(self.value(test))
        what = self.value(node.elt)
        return DATA if what.is_data and isinstance(node, ast.ListComp) else What(each=what)

    of_GeneratorExp = of_ListComp

    def of_Attribute(self, node: ast.Attribute) -> What:
        base = self.value(node.value)
        if base.data and node.attr not in ATTRIBUTES:
            raise Impure(f"line {node.lineno}: .{node.attr}")
        if base.parts is not None or base.each is not None:
            raise Impure(f"line {node.lineno}: .{node.attr}")
        found = [self.attribute(value, node.attr) for value in base.objects]
        return joined([*found, DATA] if base.data else found)

    def attribute(self, value: Any, name: str) -> What:
        """Return an attribute of an object, found as Python finds it, but without running anything."""
        if isinstance(value, types.ModuleType):
            if name in vars(value) and type(value).__getattribute__ is types.ModuleType.__getattribute__:
                return classified(vars(value)[name])
            raise Impure(f"nothing is called {value.__name__}.{name}")
        if not isinstance(value, nn.Module) or (name in _MODULE_OWN and name != "training"):
            raise Impure(f"it uses .{name} of a {type(value).__name__}")
        if not uses_torch_lookup(value):
            raise Impure(f"{type(value).__qualname__} finds its attributes in a way of its own")
        found = on_class(type(value), name)
        if hasattr(type(found), "__get__"):
            raise Impure(f"it uses {type(value).__qualname__}.{name}")
        for space in (vars(value), {name: found} if found is not None else {}, *_registers(value)):
            if name in space:
                return classified(space[name])
        return NOTHING  # AttributeError, or a None of the class


def on_class(kind: type, name: str) -> Any:
    """Return what a class or one of its bases has under a name, unbound."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _registers(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


class CallExpressions(Expressions):
    """The calls of one function. ``check_module`` and ``check_function`` check what is called and raise `Impure`."""

    check_module: Callable[[nn.Module], None]
    check_function: Callable[[Any, nn.Module | None], None]

    def of_Call(self, node: ast.Call) -> What:
        args = [elements_of(self.value(item.value)) if isinstance(item, ast.Starred) else self.value(item)
                for item in node.args]  # fmt: skip
        named = [self.value(keyword.value) for keyword in node.keywords]
        try:
            if isinstance(node.func, ast.Attribute):
                return self.method(self.value(node.func.value), node.func.attr, args, named)
            # data cannot be called: that raises, and has no effect
            return joined(self.call(value, args, named) for value in self.value(node.func).objects)
        except Impure as found:
            raise found if str(found).startswith("line ") else Impure(f"line {node.lineno}: {found}") from None

    def method(self, base: What, name: str, args: list[What], named: list[What]) -> What:
        found = []
        if base.data:
            if name not in METHODS:
                raise Impure(f".{name}()")
            found.append(self.readable(*args, *named))
            self.data(*(args if name in ("append", "extend", "insert") else []))
        if base.parts is not None or base.each is not None:
            raise Impure(f".{name}() of a list of objects")
        for value in base.objects:
            if isinstance(value, nn.Module):
                found.append(self.module_method(value, name, args, named))
            elif type(value) is dict and name in ("items", "keys", "values", "get"):
                self.data(*args, *named)
                held = joined(map(classified, value.values()))
                kinds = {"items": What(parts=(DATA, held)), "keys": DATA, "values": held}
                found.append(What(each=kinds[name]) if name != "get" else joined((held, *args[1:])))
                joined(map(classified, value))
            else:
                found.append(joined(self.call(v, args, named) for v in self.attribute(value, name).objects))
        return joined(found)

    def module_method(self, module: nn.Module, name: str, args: list[What], named: list[What]) -> What:
        if name == "forward":
            return self.call(module, args, named)
        if not uses_torch_lookup(module):
            raise Impure(f"{type(module).__qualname__} finds its attributes in a way of its own")
        method = on_class(type(module), name)
        if name in vars(module) or method is None:
            return joined(self.call(value, args, named) for value in self.attribute(module, name).objects)
        held = joined(map(classified, module._modules.values()))
        if isinstance(module, nn.ModuleDict) and name in ("items", "values", "keys") and torch_own(method):
            return What(each={"items": What(parts=(DATA, held)), "values": held, "keys": DATA}[name])
        if name in ("children", "named_children") and method is vars(nn.Module)[name]:
            return What(each=held if name == "children" else What(parts=(DATA, held)))
        self.data(*args, *named)
        if isinstance(method, types.FunctionType) and not torch_own(method):
            self.check_function(method, module)
            return DATA
        if isinstance(method, staticmethod) and isinstance(method.__func__, types.FunctionType):
            self.check_function(method.__func__, None)
            return DATA
        raise Impure(f"{type(module).__qualname__}.{name}()")

    def call(self, value: Any, args: list[What], named: list[What]) -> What:
        if isinstance(value, nn.Module):
            self.data(*args, *named)
            self.check_module(value)
            return DATA
        if id(value) in torch_functions() and torch_own(value):
            return self.readable(*args, *named)
        if value is isinstance and len(args) == 2 and not named:
            return self._isinstance(args[1])
        if any(value is known for known in THROUGH) and len(args) <= 1 and not named:
            each = joined(map(elements_of, args))
            return DATA if each.is_data else What(each=each)
        if value is enumerate and args:
            self.data(*args[1:], *named)
            return What(each=What(parts=(DATA, elements_of(args[0]))))
        if value is zip:
            self.data(*named)
            return What(each=What(parts=tuple(map(elements_of, args))))
        if value is len:
            for item in args:
                elements_of(item)
            return DATA
        if any(value is known for known in FUNCTIONS):
            return self.readable(*args, *named)
        if isinstance(value, types.FunctionType):
            self.data(*args, *named)
            self.check_function(value, None)
            return DATA
        raise Impure(f"it calls {getattr(value, '__qualname__', type(value).__name__)}")

    @staticmethod
    def _isinstance(kinds: What) -> What:
        """A class may define itself what its instances are."""
        whats = kinds.parts or (kinds,)
        for what in whats:
            for kind in what.objects:
                if type(kind) is not type and not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
                    raise Impure("it calls a class's instance check")
        return DATA


# The source of a function as a tree, where it is certainly the code that runs. For `purity.code`.


def stored(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """Yield names that a function assigns, except for those of comprehensions, which are separate."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.comprehension):
            yield from stored([node.iter, *node.ifs])
        else:
            yield from stored(ast.iter_child_nodes(node))


_sources: dict[int, tuple[types.CodeType, ast.FunctionDef | str]] = {}


def source_of(code: types.CodeType) -> ast.FunctionDef:
    """Return the syntax tree of a function, if it is what was compiled; else `Impure`."""
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
    """Return the functions of a file by name and line: as trees, and compiled. As a whole, since imports change the
    code.
    """
    tree = ast.parse("".join(linecache.getlines(name)))
    functions = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions[node.name, min([node.lineno, *(part.lineno for part in node.decorator_list)])] = node
    made = compile(tree, name, "exec", dont_inherit=True)
    return functions, {(part.co_name, part.co_firstlineno): part for part in _codes(made)}


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Return every code object inside, at any depth."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return inner + [deeper for part in inner for deeper in _codes(part)]


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    reported = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount",
            "co_posonlyargcount")  # fmt: skip
    if any(getattr(one, name) != getattr(other, name) for name in reported):
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
    """Checks functions; ``module`` raises `Impure` for a module that may not be called."""

    def __init__(self, module: Callable[[nn.Module], None]) -> None:
        self.module = module
        self.seen: dict[tuple[int, int], str] = {}
        self.running: set[tuple[int, int]] = set()
        self.assumed = False

    def function(self, function: Any, owner: nn.Module | None) -> None:
        """Check a function, or a method of ``owner``; all other arguments are data. Raises `Impure`."""
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
                if self.assumed:  # results for others on the way may rely on the one that has just failed
                    self.seen = {other: self.seen[other] for other in known}
                self.seen[key] = f"{function.__qualname__}: {found}"
            finally:
                self.running.discard(key)
        if self.seen[key]:
            raise Impure(self.seen[key])


class _Reader(CallExpressions):
    """The source of one function."""

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
        """Does nothing."""

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
