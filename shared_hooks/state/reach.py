"""Which Python code a model's forward may run, and the globals and closures that this code names.

An over-approximation by names: starting from ``forward``, every function of a class of the model counts whose name some
counted function mentions. Code of torch and of the standard library does not count.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import csv
import dis
import functools
import itertools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import nn

from shared_hooks.modules import FUNCTIONS, Replacement, Shim
from shared_hooks.modules.constants import cells, is_function
from shared_hooks.modules.tables import is_opaque

# Whether a file of Python code belongs to an installed library, or is its user's own.
#
# Installed are files where an interpreter keeps its libraries, and files listed in the record of a distribution
# beside them: so `pip install --target` counts anywhere, while a project in an editable install stays its author's.

_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = tuple(path + os.sep for kind, path in sysconfig.get_paths().items() if kind in _KINDS)
_NAMES = frozenset({"site-packages", "dist-packages"})
"""The folder names of interpreters' libraries, including other interpreters'."""


@functools.lru_cache(maxsize=1 << 14)
def is_installed(file: str) -> bool:
    """Return whether this file belongs to an installed or the standard library. Not a path: False."""
    path = PurePath(file)
    if not path.is_absolute():
        return False
    if file.startswith(_LIBRARIES) or not _NAMES.isdisjoint(path.parts):
        return True
    return any(path.relative_to(folder).as_posix() in _recorded(folder) for folder in path.parents)


@functools.lru_cache(maxsize=1 << 12)
def _recorded(folder: PurePath) -> frozenset[str]:
    """Return the files below a folder that the records of its distributions list."""
    found: set[str] = set()
    try:
        for record in Path(folder).glob("*.dist-info/RECORD"):
            with record.open(encoding="utf-8", newline="") as lines:
                found.update(line[0] for line in csv.reader(lines) if line)
    except (OSError, ValueError, csv.Error):  # unreadable: nothing is known of it
        pass
    return frozenset(found)


_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_OURS = frozenset({"torch", "numpy", "builtins", "logging", *sys.stdlib_module_names}) - {"__main__"}


_STANDARD = tuple(sysconfig.get_paths()[kind] + os.sep for kind in ("stdlib", "platstdlib"))


def is_foreign(kind: type) -> bool:
    """Return whether a class belongs to torch, NumPy or the standard library, which keep nothing on it for a model."""
    return kind.__module__.partition(".")[0] in _NOT_OURS


def file_of(kind: type) -> str:
    """Return the file that defines a class, or ""."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def unwrapped(value: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions behind an attribute of a class or module, unwrapped from torch's decorators
    (`torch.no_grad`), and from other libraries' if the function is not their own.
    """
    if is_function(value):
        yield value
        file = value.__code__.co_filename
        if is_installed(file):
            held = [value.__dict__.get("__wrapped__"), *cells(value)]
            inner = {id(one): one for one in held if isinstance(one, types.FunctionType) and one is not value}
            for one in inner.values():
                if file.startswith(_TORCH) or not is_installed(one.__code__.co_filename):
                    yield from unwrapped(one)
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from unwrapped(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from unwrapped(part)
    elif isinstance(value, (functools.partial, functools.cached_property)):
        yield from unwrapped(value.func)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from unwrapped(value.__wrapped__)


@functools.lru_cache(maxsize=1 << 14)
def _names(code: _Same) -> frozenset[str]:
    found = set(code.code.co_names)
    for part in code.code.co_consts:
        if isinstance(part, types.CodeType):
            found |= _names(_Same(part))
    return frozenset(found)


class _Same:
    """Code compared by identity: two functions may have equal code in different places."""

    __slots__ = ("code",)

    def __init__(self, code: types.CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.code is other.code


@functools.lru_cache(maxsize=1 << 14)
def _rebinds(code: _Same) -> frozenset[str]:
    found = {str(step.argval) for step in dis.get_instructions(code.code) if step.opname in _REBINDS}
    inner = [_rebinds(_Same(part)) for part in code.code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(found.union(*inner))


@functools.lru_cache(maxsize=1 << 14)
def _loads(code: _Same) -> frozenset[str]:
    """Return the names of globals that code loads."""
    found = {
        str(step.argval) for step in dis.get_instructions(code.code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    inner = [_loads(_Same(part)) for part in code.code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(found.union(*inner))


_REBINDS = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")


def names_in(function: types.FunctionType) -> frozenset[str]:
    """Globals and attributes that a function mentions, and the functions defined in it."""
    return _names(_Same(function.__code__))


_IDLE = ("CACHE", "SWAP", "ROT_TWO", "COPY", "DUP_TOP", "EXTENDED_ARG")
_FAST = re.compile("(?:LOAD|STORE)_FAST")


class Step(NamedTuple):
    """An instruction of Python's bytecode, as in `dis.Instruction`."""

    opname: str
    argval: Any
    argrepr: str


def steps_of(code: types.CodeType) -> list[Step]:
    """Return the instructions of code that do something. Those that Python 3.13 has made one (LOAD_FAST_LOAD_FAST) are
    two again.
    """
    found = []
    for step in dis.get_instructions(code):
        if isinstance(step.argval, tuple) and len(each := _FAST.findall(step.opname)) == len(step.argval):
            found += [Step(name, value, value) for name, value in zip(each, step.argval, strict=True)]
        elif step.opname not in _IDLE:
            found.append(Step(step.opname, step.argval, step.argrepr))
    return found


@functools.lru_cache(maxsize=1 << 14)
def _accesses(code: _Same) -> tuple[frozenset[str], frozenset[str]]:
    steps = steps_of(code.code)
    read: set[str] = set()
    written: set[str] = set()
    for number, step in enumerate(steps):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR") and not _only_added_to(steps[number:]):
            read.add(str(step.argval))
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            written.add(str(step.argval))
    for part in code.code.co_consts:
        if isinstance(part, types.CodeType):
            inner = _accesses(_Same(part))
            read |= inner[0]
            written |= inner[1]
        else:  # getattr(self, "name")
            read |= {text for text in (part if isinstance(part, tuple) else (part,)) if isinstance(text, str)}
    return frozenset(read), frozenset(written)


def _only_added_to(steps: list[Step]) -> bool:
    """Return whether a load begins ``x.n += constant or name``, so that the value of x.n is used for nothing else."""
    if len(steps) < 4:
        return False
    load, operand, operation, last = steps[:4]
    return (
        operand.opname in ("LOAD_CONST", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_SMALL_INT")
        and ((operation.argrepr.endswith("=") and operation.opname == "BINARY_OP") or "INPLACE_" in operation.opname)
        and last.opname == "STORE_ATTR"
        and last.argval == load.argval
    )


def accesses(function: types.FunctionType) -> tuple[frozenset[str], frozenset[str]]:
    """Return names of attributes (read, set) in a function. Text counts as read; what is only added to in place does
    not.
    """
    return _accesses(_Same(function.__code__))


def sets_in(function: types.FunctionType) -> frozenset[str]:
    """Return names of attributes that a function may set: by a statement, or as text for ``setattr`` and the like."""
    read, written = accesses(function)
    return written | read if names_in(function) & _SETTERS else written


_SETTERS = frozenset({"setattr", "delattr", "patch"})
_MAKERS = frozenset({"__init__", "__post_init__"})
"""Methods that set attributes of an object that has just been created."""


@functools.lru_cache(maxsize=1 << 14)
def _set_on_self(code: _Same) -> frozenset[str]:
    """Attributes that a function sets on its first argument only."""
    steps = steps_of(code.code)
    me = code.code.co_varnames[0] if code.code.co_argcount else None
    if any(step.opname in ("STORE_FAST", "DELETE_FAST") and step.argval == me for step in steps):
        return frozenset()
    mine: set[str] = set()
    others = set().union(*(_names(_Same(part)) for part in code.code.co_consts if isinstance(part, types.CodeType)))
    for before, step in itertools.pairwise(steps):
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            on_me = before.opname.startswith("LOAD_FAST") and before.argval == me
            (mine if on_me else others).add(str(step.argval))
    return frozenset(mine - others)


class Reach:
    """The functions that a model's forward may run; grows by classes and functions that are found. The setter of a
    property counts if some function sets an attribute of its name.

    ``files``: where the model's own classes are defined. Of installed libraries only functions in these count, because
    a model's library has thousands of others.
    """

    def __init__(self, files: set[str]) -> None:
        self.files = files
        self.functions: dict[int, types.FunctionType] = {}
        self.names: set[str] = {"forward"}
        self._waiting: dict[str, list[types.FunctionType]] = {}
        self._kinds: set[type] = set()
        self._fresh: list[types.FunctionType] = []
        self._set: set[str] = set()
        self._setters: dict[str, list[types.FunctionType]] = {}
        self._sets_by_text = False
        self._on_contexts: set[int] = set()
        """Functions whose first argument is an object that torch creates for each of their calls."""

    def counts(self, file: str) -> bool:
        """Return whether code of this file is the model's own."""
        if file in self.files:
            return True
        return not file.startswith(_OWN) and not is_installed(file)

    def owns(self, kind: type) -> bool:
        """Return whether a class is the model's own."""
        return not is_foreign(kind) and self.counts(file_of(kind))

    def add_class(self, kind: type) -> None:
        """Add a class that has an instance, or that some function names, with its bases."""
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        for name, value in list(vars(kind).items()):
            always = name.startswith("__") and not (name == "__init__" and issubclass(kind, nn.Module))
            for function in unwrapped(value):
                if issubclass(kind, torch.autograd.Function) and isinstance(value, staticmethod):
                    self._on_contexts.add(id(function))
                is_set = isinstance(value, property) and function not in unwrapped(value.fget)
                known, waiting = (self._set, self._setters) if is_set else (self.names, self._waiting)
                if always or name in known:
                    self.add(function)
                else:
                    waiting.setdefault(name, []).append(function)

    def add(self, function: types.FunctionType) -> None:
        """Add a function that may run."""
        if id(function) in self.functions or not self.counts(function.__code__.co_filename):
            return
        self.functions[id(function)] = function
        self._fresh.append(function)
        names = names_in(function)
        self._sets_by_text |= not names.isdisjoint({*_SETTERS, "__setattr__"})
        if function.__name__ == "__init__":
            names -= _MAKERS  # an object's ``super().__init__()`` is not a call of a module's
        self._release(names, self.names, self._waiting)
        self._release(self.names if self._sets_by_text else accesses(function)[1], self._set, self._setters)

    def _release(self, names: Collection[str], known: set[str], waiting: dict[str, list[types.FunctionType]]) -> None:
        for name in [name for name in names if name not in known]:
            known.add(name)
            for function in waiting.pop(name, ()):
                self.add(function)

    def fresh(self) -> list[types.FunctionType]:
        """Return the functions that were added since the last call."""
        found, self._fresh = self._fresh, []
        return found

    def reads(self, attribute: str) -> bool:
        """Return whether any function may read an attribute of this name."""
        return any(attribute in accesses(function)[0] for function in self.functions.values())

    def names_of_others(self, kind: type) -> set[str]:
        """Return the names in inherited code that is not the model's own: torch's normalisation reads ``training``."""
        others = [base for base in kind.__mro__[:-1] if not self.owns(base)]
        functions = (function for base in others for value in vars(base).values() for function in unwrapped(value))
        return {name for function in functions for name in names_in(function)}

    def sets(self, attribute: str) -> bool:
        """Return whether any function may set an attribute of this name, including by ``setattr``."""
        return any(attribute in sets_in(function) for function in self.functions.values())

    def names_read(self) -> set[str]:
        """Return names of attributes that any function may read."""
        return set().union(*(accesses(function)[0] for function in self.functions.values()))

    def names_set(self) -> set[str]:
        """Return names of attributes that any function may set, except on an object that it has just created."""
        return {
            name
            for function in self.functions.values()
            for name in sets_in(function)
            if not self._constructs(function, name)
        }

    def names_rebound(self) -> set[str]:
        """Return names of globals and closure variables that any function may set."""
        return set().union(*(_rebinds(_Same(function.__code__)) for function in self.functions.values()))

    def writes(self, attribute: str) -> bool:
        """Return whether any function sets an attribute of this name, except on an object that it has just created."""
        return bool(self.writers(attribute))

    def writers(self, attribute: str) -> list[types.FunctionType]:
        """Return the functions that do."""
        return [
            function
            for function in self.functions.values()
            if attribute in accesses(function)[1] and not self._constructs(function, attribute)
        ]

    def _constructs(self, function: types.FunctionType, attribute: str) -> bool:
        makes = function.__name__ in _MAKERS and _MAKERS.isdisjoint(self.names)
        of_context = id(function) in self._on_contexts and not self.reads(function.__name__)
        return (makes or of_context) and attribute in _set_on_self(_Same(function.__code__))


class ForwardCode:
    """What a forward may read, including in functions of installed libraries that its code calls by name, or behind
    their decorators, which `Reach` omits. What is only read for a warning does not count.

    ``attributes``: names that are read and not set. ``names``: all names that code mentions; ``rebound``: variables
    that it sets; ``written_to``: what may be written to as a container.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._functions = list(_any_functions(model))
        bases = {base for module in model.modules() for base in type(module).__mro__ if not is_foreign(base)}
        self._kinds = [base for base in bases if not is_installed(file_of(base))]
        read: frozenset[str] = frozenset().union(*(accesses(one)[0] for one in self._functions))
        self.attributes = read.difference(*map(sets_in, self._functions))
        mentioned = [names_in(one) | {*one.__code__.co_freevars} for one in self._functions]
        self.names: frozenset[str] = frozenset().union(*mentioned)
        self.rebound: frozenset[str] = frozenset().union(*(_rebinds(_Same(one.__code__)) for one in self._functions))
        writers = [names for names, one in zip(mentioned, self._functions, strict=True) if _writes_inside(one, names)]
        self.written_to: frozenset[str] = frozenset().union(*writers)

    def constants(self) -> Iterator[tuple[str, Any]]:
        """(name on any machine, value) of globals, attributes of classes and functions, closure variables, defaults of
        arguments, and environment variables that no code sets or writes to.

        Those of installed libraries, which may depend on the machine, do not count, and neither do functions.
        """
        for function in self._functions:
            if is_installed(function.__code__.co_filename):
                continue
            space, code = function.__globals__, function.__code__
            found = {f"global {name}": (name, space[name]) for name in names_in(function) if name in space}
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                found[f"{name} of {function.__qualname__}"] = name, _content(cell)
            last = reversed(code.co_varnames[: code.co_argcount])
            named = {**dict(zip(last, reversed(function.__defaults__ or ()), strict=False))}
            for name, value in {**named, **(function.__kwdefaults__ or {})}.items():
                found[f"{function.__qualname__}({name})"] = name, value
            own = self.attributes.intersection(vars(function))
            found |= {f"{function.__qualname__}.{name}": (name, vars(function)[name]) for name in own}
            if names_in(function) & _ENVIRONMENT:
                texts = filter(_VARIABLE.fullmatch, accesses(function)[0] - _OF_MACHINES)
                found |= {f"environment {name}": (name, os.environ.get(name, "not set")) for name in texts}
            yield from ((where, value) for where, (name, value) in found.items() if self._is_constant(name, value))
        for kind in self._kinds:
            for name, value in list(vars(kind).items()):
                if name not in self.attributes or name.startswith("__") or type(value) in (bool, int, float):
                    continue  # numbers are part of the class's code
                if self._is_constant(name, value):
                    yield f"{kind.__qualname__}.{name}", value

    def compiled(self) -> list[str]:
        """Functions made by `torch.compile`, which also depends on the code that calls them."""
        modules = [module for module in self._model.modules() if not is_opaque(module)]
        held = [one for module in modules for value in vars(module).values() for one in _parts(value)]
        for function in self._functions:
            near = [*map(function.__globals__.get, names_in(function)), *cells(function)]
            held += [one for value in near for one in _parts(value)]
        made = (vars(one).get("_torchdynamo_orig_callable") for one in held if isinstance(one, types.FunctionType))
        return sorted({one.__qualname__ for one in made if one is not None})

    def sources(self) -> Iterator[tuple[str, types.FunctionType]]:
        """Functions of the model's own code by qualified name, except for its modules' methods; globals only if a
        function loads them as such.
        """
        methods = {id(one) for kind in self._kinds for value in vars(kind).values() for one in unwrapped(value)}
        loaded = frozenset().union(*(_loads(_Same(one.__code__)) for one in self._functions))
        for function in self._functions:
            if id(function) in methods or is_installed(function.__code__.co_filename):
                continue
            if "." in function.__qualname__ or function.__name__ in loaded:
                yield function.__qualname__, function

    def _is_constant(self, name: str, value: Any) -> bool:
        if name in self.rebound or isinstance(value, (*FUNCTIONS, *_DESCRIPTORS)):
            return False
        if isinstance(value, (type, types.ModuleType)):
            return not is_installed(file_of(value) if isinstance(value, type) else getattr(value, "__file__", "") or "")
        return name not in self.written_to or not isinstance(value, (list, dict, set))


_ENVIRONMENT = frozenset({"environ", "getenv"})
_VARIABLE = re.compile("[A-Z][A-Z0-9_]*")
_OF_MACHINES = frozenset(
    """
    CUDA_VISIBLE_DEVICES HOSTNAME LOCAL_RANK LOCAL_WORLD_SIZE LOGNAME MASTER_ADDR MASTER_PORT OMP_NUM_THREADS RANK USER
    WORLD_SIZE
    """.split()
)
"""Variables that identify a process or machine."""
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)


def _content(cell: types.CellType) -> Any:
    with contextlib.suppress(ValueError):  # empty so far
        return cell.cell_contents
    return MISSING


_FILLS = frozenset("append extend insert add update setdefault pop popitem remove discard clear sort reverse".split())


def _writes_inside(function: types.FunctionType, names: Collection[str]) -> bool:
    """Return whether a function may write to a list, a dictionary or a set."""
    if not _FILLS.isdisjoint(names):
        return True
    return _sets_entries(_Same(function.__code__))


@functools.lru_cache(maxsize=1 << 14)
def _sets_entries(code: _Same) -> bool:
    parts = (part for part in code.code.co_consts if isinstance(part, types.CodeType))
    own = any(step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for step in dis.get_instructions(code.code))
    return own or any(_sets_entries(_Same(part)) for part in parts)


MOST_READ = 4000
"""The maximum number of functions that are examined."""


def _any_functions(model: nn.Module) -> Iterator[types.FunctionType]:
    names, known, waiting = {"forward"}, set[int](), list[types.FunctionType]()
    methods: dict[str, list[Any]] = {}
    held_by_modules = [one for module in model.modules() for value in vars(module).values() for one in _parts(value)]
    waiting += [function for one in held_by_modules for function in unwrapped(one)]
    met: set[type] = set()
    looked_into: set[int] = set()

    def meet(values: Iterable[Any]) -> None:
        kinds = [value if isinstance(value, type) else type(value) for value in values]
        for kind in {base for one in kinds for base in type.mro(one) if not is_foreign(base)} - met:
            met.add(kind)
            entries = list(vars(kind).items())
            meet(value for _, value in entries if not is_foreign(type(value)))
            for name, value in entries:
                if name in names or _is_called_by_syntax(name):
                    waiting.extend(unwrapped(value))
                methods.setdefault(name, []).append(value)

    meet((*model.modules(), *held_by_modules))
    fresh = {*names}
    while fresh:
        for name in sorted(fresh):
            waiting += [one for value in methods.pop(name, ()) for one in unwrapped(value)]
        fresh = set()
        while waiting and len(known) < MOST_READ:
            function = waiting.pop()
            file = function.__code__.co_filename
            if id(function) in known or file.startswith(_OWN) or function.__name__.startswith("warn"):
                continue
            known.add(id(function))
            held = [function.__dict__.get("__wrapped__"), *cells(function)]
            waiting += [one for one in held if isinstance(one, types.FunctionType)]
            if file.startswith(_TORCH) or (file.startswith(_STANDARD) and _NAMES.isdisjoint(PurePath(file).parts)):
                continue
            yield function
            found = names_in(function)
            fresh |= found - names - {"__init__"}
            around = [function.__globals__.get(name) for name in sorted(found)]
            near = {id(value): value for value in (*around, *cells(function), *(function.__defaults__ or ()))}
            held = [one for key, value in near.items() if key not in looked_into for one in _parts(value)]
            looked_into |= near.keys()
            waiting += [one for value in held for one in unwrapped(value)]
            meet(held)
        names |= fresh


def _is_called_by_syntax(name: str) -> bool:
    """Return whether a method runs without being named: when an object is called or indexed, for example."""
    return name.startswith("__") and name.endswith("__") and name not in _CALLED_ELSEWHERE


_CALLED_ELSEWHERE = frozenset(
    """
    __init__ __post_init__ __new__ __del__ __repr__ __str__ __copy__ __deepcopy__ __reduce__ __reduce_ex__ __getstate__
    __setstate__ __getnewargs__ __init_subclass__ __class_getitem__ __dir__ __sizeof__ __format__ __subclasshook__
    """.split()
)


def _parts(value: Any) -> Iterable[Any]:
    """Return what a module holds in an attribute: an object, or several."""
    if isinstance(value, dict):
        return list(dict.values(value))[:MOST_READ]
    return list(value)[:MOST_READ] if type(value) in (list, tuple) else (value,)


# Where Python state lies: containers as they were at one moment, to compare with their present contents, and to
# restore.
#
# A shallow copy of each is kept, so "the same" means the same objects: an equal one is a change.


_BY_CODE = re.compile(
    r"global [^.\[]+\.([^.\[]+)(?:\[.*)?|([^.\[]+) of [^\[]+(?:\[.*)?|[^\[]+'s defaults(?:\[.*)?", re.DOTALL
)


def held_by_code(name: str) -> str:
    """Return the global or closure variable of a function that holds the `Container.entry` with this name; "defaults"
    for those of its arguments, "" for what an object holds.
    """
    found = _BY_CODE.fullmatch(name)
    return "" if found is None else found[1] or found[2] or "defaults"


def attribute_in(name: str) -> str:
    """Return the last attribute in a name of `Container.entry`: the one that holds it."""
    last = name
    while last.endswith("]") and "[" in last:
        last = last[: last.rindex("[")]
    last = last.rpartition(".")[2]
    return last if last.isidentifier() else name.partition("[")[0].rpartition(".")[2]  # a key may be any text


MISSING = object()
_OURS = (Shim, Replacement)


@dataclass(frozen=True, eq=False)
class StateChange:
    """One difference: the place, the value before and now (`MISSING` for none)."""

    name: str
    before: Any
    now: Any
    is_attribute: bool = False
    can_be_undone: bool = True
    spot: tuple[int, str] | None = None
    """The identity of what holds an attribute, and the attribute's name."""
    kind: type = object
    """The class of what holds an attribute."""

    @property
    def attribute(self) -> str:
        """The last attribute in ``name``: the one that holds it."""
        return attribute_in(self.name)


class Container:
    """One container. ``view``: always gives the current content; ``name``: for people; ``owner``: restores it.

    ``kind``: the class of the object whose attributes or slots these are. ``set_one``: how to set a single value.
    """

    __slots__ = ("keys", "kind", "name", "owner", "put", "set_one", "values", "view")

    def __init__(self, name: str, owner: Any, view: Iterable[Any], put: Callable[[Container], None]) -> None:
        self.name = name
        self.owner = owner
        self.view = view
        self.put = put
        self.kind: type = object
        self.set_one: Callable[[Any], None] | None = None
        self.values = list(view)
        self.keys: list[Any] | None = list(owner) if isinstance(owner, dict) else None

    def changes(self) -> list[StateChange]:
        """Return the current differences."""
        now = list(self.view)
        if self.keys is not None:
            return self._changed_entries()
        if len(now) != len(self.values):
            fresh = {id(value) for value in self.values}
            new = [StateChange(self.name, MISSING, value) for value in now if id(value) not in fresh]
            return new or [StateChange(self.name, len(self.values), len(now))]
        pairs = enumerate(zip(self.values, now, strict=True))
        if isinstance(self.view, ClassEntries):
            found = zip(self.view.names, self.values, now, strict=True)
            return [StateChange(self.name + key, old, new) for key, old, new in found if old is not new]
        name = self.name if isinstance(self.view, Fetched) else self.name + "[{}]"
        return [StateChange(name.format(n), before, value) for n, (before, value) in pairs if before is not value]

    def _changed_entries(self) -> list[StateChange]:
        before = dict(zip(self.keys or (), self.values, strict=True))
        now = dict(dict.items(self.owner))
        found = []
        for key in [*now, *(key for key in before if key not in now)]:
            old, new = before.get(key, MISSING), now.get(key, MISSING)
            if new is not old and not _is_attaching(old, new):
                found.append(
                    StateChange(self.entry(key), old, new, self.is_attributes, True, (id(self.owner), key), self.kind)
                )
        if not found and self.in_order and list(now) != [key for key in before if key in now]:
            found.append(StateChange(self.name, MISSING, MISSING))
        return found

    @property
    def is_attributes(self) -> bool:
        """Whether these are the attributes of an object."""
        return self.keys is not None and self.name.endswith(".")

    @property
    def in_order(self) -> bool:
        """Whether the order of the entries matters, which it does not for attributes."""
        return not self.is_attributes

    def entry(self, key: Any) -> str:
        return f"{self.name}{key}" if self.name.endswith(".") else f"{self.name}[{key!r:.40}]"

    def key_of(self, rest: str) -> Any:
        """Return the key whose `entry` has the name ending in ``rest``; `MISSING` if that is unknown."""
        if self.name.endswith("."):
            return rest if rest.isidentifier() else MISSING
        try:
            key = ast.literal_eval(rest[1:-1])
            return key if hash(key) is not None and f"[{key!r:.40}]" == rest else MISSING
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return MISSING


def put_dict(place: Container) -> None:
    """Restore entry by entry, because another thread may be running the model."""
    owner, kept = place.owner, dict(zip(place.keys or (), place.values, strict=True))
    # an OrderedDict keeps its order beside the entries, and does not notice a dictionary's own methods
    base: Any = collections.OrderedDict if isinstance(owner, collections.OrderedDict) else dict
    for key in [key for key, value in dict.items(owner) if key not in kept and not _is_attaching(MISSING, value)]:
        base.pop(owner, key)
    for key, value in kept.items():
        found = dict.get(owner, key, MISSING)
        if found is not value and not _is_attaching(value, found):
            base.__setitem__(owner, key, value)
    if place.in_order and list(owner) != list(kept):
        base.clear(owner)
        base.update(owner, kept)


def _is_attaching(before: Any, now: Any) -> bool:
    """Return whether one of this package's wrappers was attached or detached there. Something else in between is
    another matter.
    """
    return type(now) in _OURS or (type(before) in _OURS and (now is MISSING or now is before.before))


def put_list(place: Container) -> None:
    list.__setitem__(place.owner, slice(None), place.values)


def put_other(place: Container) -> None:
    place.owner.clear()
    (place.owner.extend if isinstance(place.owner, collections.deque) else place.owner.update)(place.values)


def put_class(place: Container) -> None:
    kind, kept = place.owner, dict(zip(place.view.names, place.values, strict=True))  # type: ignore[attr-defined]
    for name in [name for name in vars(kind) if name not in kept]:
        type.__delattr__(kind, name)
    for name, value in kept.items():
        if vars(kind).get(name, place) is not value:
            type.__setattr__(kind, name, value)


class ClassEntries:
    """What a class holds, by name."""

    def __init__(self, kind: type) -> None:
        self.held = vars(kind)
        self.names = list(self.held)

    def __iter__(self) -> Any:
        return iter(self.held.values())

    def __len__(self) -> int:
        return len(self.held)


class Fetched:
    """Values fetched one by one: cells, slots, globals. A missing one counts as a value."""

    def __init__(self, fetch: list[Callable[[], Any]]) -> None:
        self.fetch = fetch

    def __iter__(self) -> Any:
        return iter(fetched_all(self.fetch))

    def __len__(self) -> int:
        return len(self.fetch)


def fetched_all(several: list[Callable[[], Any]]) -> list[Any]:
    """Return the values; a missing one counts as a value."""
    try:
        return [fetch() for fetch in several]
    except (AttributeError, KeyError, ValueError):
        return [_fetched(fetch) for fetch in several]


def _fetched(fetch: Callable[[], Any]) -> Any:
    try:
        return fetch()
    except (AttributeError, KeyError, ValueError):
        return MISSING
