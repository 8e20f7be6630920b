"""Calls in a source that is vouched for (`purity.code`): of modules, methods, and functions that are known."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_hooks.purity.values import (
    ATTRIBUTES,
    CONTAINERS,
    DATA,
    FUNCTIONS,
    METHODS,
    NOTHING,
    THROUGH,
    Impure,
    What,
    classified,
    elements_of,
    goes_torchs_way,
    joined,
    listed,
    torch_functions,
    torch_own,
)

# Expressions of a source that is vouched for (`purity.code`): what each may give, or why it may write state.

_MODULE_OWN = frozenset(vars(nn.Module()))


class Expressions:
    """Of one function: ``names`` are what it has stored, ``local`` those that it may, ``spaces`` where others are."""

    names: dict[str, What]
    local: set[str]
    spaces: tuple[dict[str, Any], ...]

    def store(self, target: ast.expr, what: What) -> None:
        """What ``target`` may hold from now on. Raises `Impure` unless it is a name."""
        raise NotImplementedError

    def of_Call(self, node: ast.Call) -> What:
        """What a call gives."""
        raise NotImplementedError

    def value(self, node: ast.expr) -> What:
        handler = getattr(self, f"of_{type(node).__name__}", None)
        if handler is None:
            raise Impure(f"line {node.lineno}: {type(node).__name__.lower()}")
        what: What = handler(node)
        return what

    def data(self, *whats: What) -> What:
        """Computing with data gives data; computing with objects may run anything."""
        if not all(what.is_data for what in whats):
            raise Impure("it computes with an object")
        return DATA

    def readable(self, *whats: What) -> What:
        """For what only looks at its arguments: lists of data may be somebody else's."""
        if not all(what.is_readable for what in whats):
            raise Impure("it hands an object to a function")
        return DATA

    def truth(self, what: What) -> None:
        for value in what.objects:
            if isinstance(value, nn.Module):
                counted = hasattr(type(value), "__len__") and not isinstance(value, CONTAINERS)
                if counted or not goes_torchs_way(value):
                    raise Impure("it asks an object whether it is true")
            elif type(value) not in (list, dict, types.FunctionType, types.BuiltinFunctionType):
                raise Impure("it asks an object whether it is true")

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
            if isinstance(value, nn.ModuleDict) and goes_torchs_way(value):
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
        """An attribute of an object, found as Python finds it, but without running anything."""
        if isinstance(value, types.ModuleType):
            if name in vars(value) and type(value).__getattribute__ is types.ModuleType.__getattribute__:
                return classified(vars(value)[name])
            raise Impure(f"nothing is called {value.__name__}.{name}")
        if not isinstance(value, nn.Module) or (name in _MODULE_OWN and name != "training"):
            raise Impure(f"it uses .{name} of a {type(value).__name__}")
        if not goes_torchs_way(value):
            raise Impure(f"{type(value).__qualname__} finds its attributes in a way of its own")
        found = on_class(type(value), name)
        if hasattr(type(found), "__get__"):
            raise Impure(f"it uses {type(value).__qualname__}.{name}")
        for space in (vars(value), {name: found} if found is not None else {}, *_registers(value)):
            if name in space:
                return classified(space[name])
        return NOTHING  # AttributeError, or a None of the class


def on_class(kind: type, name: str) -> Any:
    """What a class or one of its bases has under a name, as it stands there."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _registers(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


class Calls(Expressions):
    """Of one function. ``check_module`` and ``check_function`` look at what is called and raise `Impure`."""

    check_module: Callable[[nn.Module], None]
    check_function: Callable[[Any, nn.Module | None], None]

    def of_Call(self, node: ast.Call) -> What:
        args = [elements_of(self.value(item.value)) if isinstance(item, ast.Starred) else self.value(item)
                for item in node.args]  # fmt: skip
        named = [self.value(keyword.value) for keyword in node.keywords]
        try:
            if isinstance(node.func, ast.Attribute):
                return self.method(self.value(node.func.value), node.func.attr, args, named)
            # data cannot be called: that raises, and does nothing
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
        if not goes_torchs_way(module):
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
        """A class may have an opinion of its own about what its instances are."""
        whats = kinds.parts or (kinds,)
        for what in whats:
            for kind in what.objects:
                if type(kind) is not type and not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
                    raise Impure("it asks a class what its instances are")
        return DATA
