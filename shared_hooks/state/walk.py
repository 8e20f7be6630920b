"""The walk to all mutable Python state that a model's code can reach.

It starts from the modules and follows attributes, containers, plain objects, closures, class attributes and the globals
that the model's code names; not into torch, the standard library, or tensors (which count by identity).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from shared_hooks.modules import Shim
from shared_hooks.state.probes import function_of, probe_of, results_in
from shared_hooks.state.reach import (
    MISSING,
    ClassEntries,
    Container,
    Fetched,
    Reach,
    file_of,
    is_foreign,
    names_in,
    put_class,
    put_dict,
    put_list,
    put_other,
    sets_in,
)

# Is state that a model leaves behind ever read again? A run of the model shows it, with poison in its place: an
# object that raises on any access. If the run gives the same bits, its path does not depend on that state.


class PoisonRead(BaseException):
    """Poison was read. No Exception, so that the model does not catch it."""


def _raise(*args: Any, **kwargs: Any) -> NoReturn:
    raise PoisonRead


_LOOKS = """
    __abs__ __add__ __aiter__ __and__ __anext__ __array__ __array_ufunc__ __await__ __bool__ __bytes__ __call__ __ceil__
    __complex__ __contains__ __delattr__ __delitem__ __dir__ __divmod__ __enter__ __eq__ __exit__ __float__ __floor__
    __floordiv__ __format__ __fspath__ __ge__ __getattribute__ __getitem__ __gt__ __hash__ __iadd__ __iand__
    __ifloordiv__ __ilshift__ __imatmul__ __imod__ __imul__ __index__ __int__ __invert__ __ior__ __ipow__ __irshift__
    __isub__ __iter__ __itruediv__ __ixor__ __le__ __len__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__
    __next__ __or__ __pos__ __pow__ __radd__ __rand__ __rdivmod__ __repr__ __reversed__ __rfloordiv__ __rlshift__
    __rmatmul__ __rmod__ __rmul__ __ror__ __round__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__
    __setattr__ __setitem__ __str__ __sub__ __torch_function__ __truediv__ __trunc__ __xor__
""".split()  # fmt: skip
# torch takes an object for a generator if ``isinstance`` raises, and reads the memory behind its head: empty slots
_EMPTY = tuple(f"_{number}" for number in range(8))
Poison: type = type("Poison", (), dict.fromkeys(_LOOKS, _raise) | {"is_poison": True, "__slots__": _EMPTY})
Spare: type = type("Spare", (Poison,), {"is_poison": False, "__slots__": ()})
"""Follows the poison in a list, which would be longer if that were read; no run needs to overwrite it."""


MAX_OBJECTS = 50_000

_ATOMS = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented), torch.dtype,
        torch.device, torch.layout, torch.memory_format, torch.Size, torch.Tensor, nn.Parameter, Shim, Poison, Spare,
        types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
        types.MethodDescriptorType, types.ClassMethodDescriptorType,
    }
)  # fmt: skip
# Containers of the standard library and of torch.
_HOLDERS = frozenset(
    """
    UserDict UserList ChainMap SimpleNamespace _local Event Condition Semaphore Barrier Queue LifoQueue PriorityQueue
    SimpleQueue ExitStack WeakKeyDictionary WeakValueDictionary WeakSet ConfigParser RawConfigParser SectionProxy
    """.split()
)
_MODULE_OWN = frozenset(vars(nn.Module()))
_EMPTY_MOSTLY = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and value is not None)


class Walk:
    """The result of one walk from a model. ``overflow``: there is more than is examined; ``probes``: of objects written
    in C: (name, probe, its result); ``caches``: functions with `functools.lru_cache`; ``hooks``: empty dictionaries of
    modules' hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: list[Container] = []
        self.probes: list[tuple[str, Any, Any]] = []
        self.caches: list[Any] = []
        kinds = {type(module) for module in model.modules()}
        self.reach = Reach({file_of(kind) for kind in kinds if not is_foreign(kind)} - {""})
        self.overflow = False
        self.hooks: list[Any] = []
        self.seen: dict[int, Any] = {}
        self._classes: set[int] = set()
        self._todo: collections.deque[tuple[str, Any]] = collections.deque([(type(model).__qualname__, model)])
        self._globals: dict[tuple[int, str], None] = {}
        self._objects: list[tuple[str, Any]] = []
        self._has_classes = False
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._has_tensors = False
        self._walk()

    def _walk(self) -> None:
        while self._todo or self._functions():
            if len(self.seen) > MAX_OBJECTS:
                self.overflow = True
                return
            name, value = self._todo.popleft()
            if id(value) not in self.seen:
                self.seen[id(value)] = value
                self._visit(name, value)

    def _add(self, name: str, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) not in _ATOMS and id(value) not in self.seen:
                self._todo.append((name, value))

    def _keep(self, name: str, owner: Any, view: Any, put: Callable[[Container], None]) -> Container:
        place = Container(name, owner, view, put)
        self.places.append(place)
        return place

    def _visit(self, name: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return
        if isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, dict):
            self._keep(name, value, dict.values(value), put_dict)
            self._entries(name, value)
        elif isinstance(value, (list, set, collections.deque)):
            self._keep(name, value, value, put_list if isinstance(value, list) else put_other)
            if not _ATOMS.issuperset(map(type, value)):
                for number, item in enumerate(value):
                    self._add(f"{name}[{number}]" if not isinstance(value, set) else name, (item,))
        elif isinstance(value, (tuple, frozenset)):
            self._add(name, value)
        elif isinstance(value, types.FunctionType):
            self._function(name, value)
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            self._add(name, (value.__func__, getattr(value, "__self__", None)))
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            owner = value.__self__  # ``itertools.count().__next__``, ``items.append``
            if owner is not None and not isinstance(owner, (types.ModuleType, type)):
                self._add(name, ((owner,),))
        elif isinstance(value, weakref.ReferenceType):
            self._add(name, (value(),))
        elif isinstance(value, super):
            self._add(name, (value.__self__,))  # type: ignore[attr-defined]
        elif isinstance(value, property):
            self._add(name, (value.fget, value.fset))
        elif isinstance(value, functools.partial):
            self._add(name, (value.func, value.args, value.keywords))
        elif isinstance(value, types.CellType):
            self._cell(name, value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType) or kind.__module__.partition(".")[0] == "shared_hooks":
            return
        elif isinstance(value, functools._lru_cache_wrapper):
            self.caches.append(value)
            self._add(name, (value.__wrapped__,))
            self._add(f"{function_of(value)}()", [result for _, result in results_in(value)])
        elif (probe := probe_of(value)) is not None:
            self.probes.append((name, probe, probe.now()))
        if not is_foreign(kind) or kind.__name__ in _HOLDERS:
            self._instance(name, value)

    def _module(self, name: str, module: nn.Module) -> None:
        own = vars(module)
        self._objects.append((name, module))
        self._keep(f"{name}.", own, own.values(), put_dict).kind = type(module)
        for hooks in _EMPTY_MOSTLY:
            found = own.get(hooks)
            if found:
                self._add(f"{name}.{hooks}", (found,))
            elif found is not None:
                self.hooks.append(found)
        for register in ("_parameters", "_buffers", "_modules"):
            held = own.get(register)
            if isinstance(held, dict):
                self.seen[id(held)] = held
                self._keep(f"{name}.", held, held.values(), put_dict).kind = type(module)
                if register == "_modules":
                    self._entries(f"{name}.", held)
                else:
                    named = ((f"{name}.{key}", one) for key, one in held.items() if isinstance(one, torch.Tensor))
                    self._tensors |= {id(one): (path, one) for path, one in named}
        self._entries(f"{name}.", {key: value for key, value in own.items() if key not in _MODULE_OWN})

    def _entries(self, name: str, held: dict[Any, Any]) -> None:
        if not _ATOMS.issuperset(map(type, dict.values(held))):
            for key, value in dict.items(held):
                self._add(f"{name}{key}" if name.endswith(".") else f"{name}[{key!r:.40}]", (value,))
        if not _ATOMS.issuperset(map(type, held)):
            self._add(name, held)

    def _instance(self, name: str, value: Any) -> None:
        """Visit the attributes of an object, and its class."""
        if isinstance(value, type):
            return
        own = getattr(value, "__dict__", None)
        if type(own) is dict and not isinstance(value, (nn.Module, types.FunctionType)):
            self.seen[id(own)] = own
            self._objects.append((name, value))
            self._keep(f"{name}.", own, own.values(), put_dict).kind = type(value)
            self._entries(f"{name}.", own)
        for base in type(value).__mro__:
            for slot, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType) and not is_foreign(base):
                    self._several(f"{name}.{slot}", [functools.partial(member.__get__, value)],
                                  functools.partial(_set_slot, member, value)).kind = type(value)  # fmt: skip
        self._class(type(value))

    def _several(self, name: str, fetch: list[Callable[[], Any]], put: Callable[[Any], None]) -> Container:
        place = self._keep(name, None, Fetched(fetch), lambda place: put(place.values[0]))
        place.set_one = put
        self._add(name, place.values)
        return place

    def _cell(self, name: str, cell: Any) -> None:
        self._several(name, [functools.partial(getattr, cell, "cell_contents")], functools.partial(_set_cell, cell))

    def _function(self, name: str, function: types.FunctionType) -> None:
        self.reach.add(function)
        if function.__closure__:
            for variable, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
                self._add(f"{variable} of {function.__qualname__}", (cell,))
        if self.reach.counts(function.__code__.co_filename):
            self._add(f"{function.__qualname__}'s defaults", (function.__defaults__, function.__kwdefaults__))
            if function.__dict__:
                self._add(f"{function.__qualname__}.", (function.__dict__,))

    def _functions(self) -> bool:
        """Visit the globals named by functions that were found since; returns whether there is more to visit."""
        for function in self.reach.fresh():
            self.seen.setdefault(id(function), function)
            self._function(function.__qualname__, function)
            space = function.__globals__
            names = names_in(function)
            self._named_in(space, names)
            for name in names:
                value = space.get(name)
                if isinstance(value, types.ModuleType) and not _is_foreign_module(value):
                    self._named_in(vars(value), names)
            self._replaced(function, names)
        if not self._todo and not self._has_classes and self.reach.sets("__class__"):
            self._has_classes = True
            for name, value in self._objects:
                self._several(f"{name}.__class__", [functools.partial(getattr, value, "__class__")],
                              functools.partial(setattr, value, "__class__"))  # fmt: skip
        if not self._todo and not self._has_tensors:
            self._has_tensors = True
            self._attributes_of_tensors()
            self._attributes_of_functions()
        return bool(self._todo)

    def _attributes_of_functions(self) -> None:
        """Visit the attributes of functions without any yet, if code that names them sets attributes."""
        functions = list(self.reach.functions.values())
        setting = [one for one in functions if sets_in(one) or "__dict__" in names_in(one)]
        named = {name for one in setting for name in names_in(one)}
        for function in functions:
            if function.__name__ in named and not function.__dict__:
                self._visit(f"{function.__qualname__}.", function.__dict__)

    def _attributes_of_tensors(self) -> None:
        """Visit the attributes of parameters and buffers, if they have any, or some code sets one that no
        object has.
        """
        known = {key for place in self.places if place.is_attributes for key in place.keys or ()}
        may_be_set = not self.reach.names_set() <= known.union(dir(torch.Tensor))
        for name, tensor in self._tensors.values():
            own = vars(tensor)
            if own or may_be_set:
                self._keep(f"{name}.", own, own.values(), put_dict).kind = type(tensor)
                self._entries(f"{name}.", own)

    def _replaced(self, function: types.FunctionType, names: frozenset[str]) -> None:
        """Visit what a function may set in modules and classes of libraries (``torch.relu = ...``)."""
        may_set = sets_in(function)
        if not may_set:
            return
        found: list[tuple[str, Any]] = [(name, function.__globals__.get(name)) for name in names]
        known: set[int] = set()
        while found:
            name, value = found.pop()
            if id(value) in known or not isinstance(value, (types.ModuleType, type)):
                continue
            known.add(id(value))
            held = vars(value)
            found += [(f"{name}.{inner}", held[inner]) for inner in names if inner in held]
            own = self.reach.owns(value) if isinstance(value, type) else not _is_foreign_module(value)
            if own:
                continue  # everything it holds is visited
            for one in may_set & held.keys():
                key = id(held), one
                if key not in self._globals:
                    self._globals[key] = None
                    self._several(f"{name}.{one}", [functools.partial(_held_in, value, one)],
                                  functools.partial(_set_in, value, one))  # fmt: skip

    def _named_in(self, space: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            key = id(space), name
            if key not in self._globals and (name in space or not hasattr(__builtins__, name)):
                self._globals[key] = None
                if name not in space:
                    continue
                value = space[name]
                where = f"global {space.get('__name__', '?').rpartition('.')[2]}.{name}"
                self._several(where, [functools.partial(space.__getitem__, name)],
                              functools.partial(_set_global, space, name))  # fmt: skip
                if isinstance(value, type) and self.reach.owns(value):
                    self._add(where, (value,))

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            # a class may have been met as a value before: its contents were not visited then
            if id(base) in self._classes or not self.reach.owns(base):
                continue
            self._classes.add(id(base))
            self.seen[id(base)] = base
            self.reach.add_class(base)
            self._keep(f"{base.__qualname__}.", base, ClassEntries(base), put_class)
            for name, value in vars(base).items():
                if not isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
                    self._add(f"{base.__qualname__}.{name}", (value,))
        self.seen.setdefault(id(kind), kind)


def _is_foreign_module(module: types.ModuleType) -> bool:
    root = module.__name__.partition(".")[0]
    return root in ("torch", "numpy") or (root in sys.stdlib_module_names and root != "__main__")


def _held_in(owner: Any, name: str) -> Any:
    return vars(owner)[name]


def _set_in(owner: Any, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _set_cell(cell: Any, value: Any) -> None:
    if value is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def _set_slot(member: Any, owner: Any, value: Any) -> None:
    with contextlib.suppress(AttributeError):  # read-only, or missing
        if value is MISSING:
            member.__delete__(owner)
        else:
            member.__set__(owner, value)


def _set_global(space: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value
