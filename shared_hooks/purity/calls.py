"""Calls in a source that is vouched for (`purity.code`): of modules, methods, and functions that are known."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_hooks.purity.expressions import Expressions, on_class
from shared_hooks.purity.values import (
    DATA,
    FUNCTIONS,
    METHODS,
    THROUGH,
    Impure,
    What,
    classified,
    elements_of,
    goes_torchs_way,
    joined,
    torch_functions,
    torch_own,
)


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
