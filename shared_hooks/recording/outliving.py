"""Which changes of Python state affect later runs: the rules by which planning judges a recorded run.

A change does not matter if an equal value replaces the old one and does not depend on the inputs, or if no code of the
model ever reads the attribute. Everything else does: the next run would start from another state, and two processes
that each run a part of the model would have two states.
"""

from __future__ import annotations

import ast
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.forward import CallKind, arguments_of, is_escape, kind_of, name_of
from shared_hooks.purity import Impure, source_of
from shared_hooks.recording.kernels import KernelLog, facts_of, written_and_unread
from shared_hooks.recording.trace import NEVER
from shared_hooks.state import MISSING, PLAIN, PythonState, Reach, StateChange, agree, is_read
from shared_hooks.state.reach import steps_of
from shared_hooks.tensors import tensors_in

# Which tensors of one run depend on its inputs, or on random numbers: a coarse analysis, by whole storages.


class Taint(TorchDispatchMode):
    """Tracks what depends on ``inputs`` while the model runs. ``reads_data``: Python read such values; ``escaped``:
    their bytes went to code outside torch, which may have made any tensor of them.
    """

    def __init__(self, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marked: dict[int, StorageWeakRef] = {}
        self._values = _Values(self)
        self.reads_data = False
        self.escaped = False
        for tensor in tensors_in(inputs):
            self._mark(tensor)

    def __enter__(self) -> Any:
        self._values.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._values.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = arguments_of(args, kwargs)
        facts = facts_of(func)
        written, unread = written_and_unread(facts, args, kwargs)
        reads = [] if facts.form_only else [tensor for tensor in given if id(tensor) not in unread]
        taints = facts.may_draw or any(map(self.has, reads))
        result = func(*args, **kwargs)
        self.reads_data |= taints and func._schema.name == "aten::_local_scalar_dense"
        for tensor in [*arguments_of((result,), {}), *(tensor for tensor in given if id(tensor) in written)]:
            if taints:
                self._mark(tensor)
            elif id(tensor) in unread and _is_whole(tensor):
                self._marked.pop(_key(tensor), None)
        return result

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether it depends on the inputs; also if that is unknown."""
        key = _key(tensor)
        return key in self._marked or key == 0

    def _mark(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key:
            # a weak reference keeps the address from being reused
            self._marked[key] = StorageWeakRef(tensor.untyped_storage())


def _key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


class _Values(TorchFunctionMode):
    """Some values are read without the dispatcher: ``tolist``, ``numpy``."""

    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self.taint = taint

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = arguments_of(args, kwargs or {})
        name = name_of(func)
        escapes = is_escape(name)
        if escapes or kind_of(name, bool(given), result) is CallKind.VALUE:
            read = any(map(self.taint.has, given))
            self.taint.reads_data |= read
            self.taint.escaped |= read and escapes
        return result


# Assignments that can never run: a constant flag of the object keeps the method from reaching them.
#
# ``if self.cached: self._edges = ...`` assigns nothing while ``self.cached`` is False, and neither does the code
# after ``if not self.quantised: return x``.

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
    """Return whether ``function`` is a method that sets an attribute of this name for none of ``objects``, given as
    class and attributes: all that its first argument may be. ``is_changed``: whether any code sets attributes of a
    name.

    False if the source is unavailable, or the function is not a method of modules.
    """
    owners = [(kind, flags) for kind, flags in objects if _has(kind, function)]
    # entries of ``_modules`` count as the module's, too; a descriptor of the class comes before its attributes
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
    """Return whether a function, or one inside it, assigns this name."""
    binds = any(step.opname in _BINDS and step.argval == name for step in steps_of(code))
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
        """(whether the assignment may be reached, whether the end may be)."""
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
        """Return the truth of a test; None if it depends."""
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


class Judge:
    """Judges changes since ``state`` by one recording."""

    def __init__(self, state: PythonState, log: KernelLog) -> None:
        self.state = state
        self.log = log
        self.seen: dict[Any, StateChange] = {}
        """What has changed at any time during the run, whether it matters or not."""
        self._read: dict[tuple[str, type], bool] = {}
        self._set: dict[str, bool] = {}

    @property
    def reads_data(self) -> bool:
        """Whether Python has read values that depend on the inputs."""
        return bool(self.log.dynamic or self.log.escaped)

    def changes(self) -> list[StateChange]:
        """Return the changes that matter, now."""
        found = self.state.changes()
        self.seen.update((change.name, change) for change in found)
        return [change for change in found if self.matters(change)]

    def matters(self, change: StateChange) -> bool:
        """Return whether a change tells on later runs."""
        if agree(change.before, change.now, self._may_be_data):
            return False
        return not (change.is_attribute and self._is_unread(change.attribute, change.kind))

    def from_data(self) -> list[str]:
        """Return names of attributes that the model's code sets to plain values, where it reads data: they may
        be data.
        """
        if not self.reads_data:
            return []
        return [
            place.entry(key)
            for place in self.state.places
            if place.is_attributes and place.keys is not None
            for key, value in zip(place.keys, place.values, strict=True)
            if type(value) in PLAIN and self._set_and_read(key, place.kind)
        ]

    def _set_and_read(self, name: Any, kind: type) -> bool:
        return isinstance(name, str) and self._is_set(name) and not self._is_unread(name, kind)

    def _is_set(self, name: str) -> bool:
        """Return whether any code sets an attribute of this name, be it on a path that this run did not take."""
        if name not in self._set:
            reach = self.state.reach
            objects = [(one.kind, one.owner) for one in self.state.places if one.is_attributes and one.keys is not None]
            self._set[name] = not all(
                is_unreachable(function, name, objects, reach.writes) for function in reach.writers(name)
            )
        return self._set[name]

    def _is_unread(self, name: str, kind: type) -> bool:
        """Return whether no code looks at an attribute of this name of such an object, be it by its name as text."""
        if (name, kind) not in self._read:
            self._read[name, kind] = is_read(self.state.reach, name, kind)
        return not self._read[name, kind]

    def _may_be_data(self, value: Any) -> bool:
        """Return whether another input may give another value."""
        if isinstance(value, torch.Tensor):
            return self.log.storage_of(value).tainted < NEVER
        return self.reads_data


def depends(change: StateChange, taint: Taint, reach: Reach) -> bool:
    """Return whether what a change has put there depends on the inputs, or may. An attribute that none of the model's
    own code sets by its name is its library's (a note that hooks are installed).
    """
    own = not change.is_attribute or reach.writes(change.attribute)
    return any(
        taint.escaped or taint.has(leaf) if isinstance(leaf, torch.Tensor) else taint.reads_data and own
        for leaf in _leaves(change.now, set())
    )


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Return what is in containers, functions and objects, however nested: tensors, and all that may be made
    of data.
    """
    if id(value) in seen or value is None or value is MISSING or isinstance(value, (type, types.ModuleType)):
        return
    if not isinstance(value, PLAIN):
        seen.add(id(value))
    held = _held(value)
    own = getattr(value, "__dict__", None)
    if isinstance(value, torch.Tensor) or (held is None and (type(own) is not dict or _keeps_more(type(value)))):
        yield value
        return
    for part in [*(held or ()), *(own.values() if type(own) is dict else ())]:
        yield from _leaves(part, seen)


def _held(value: Any) -> list[Any] | None:
    """Return what a container or a function holds beside its attributes; None for what is neither."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*value]
    if isinstance(value, dict):
        return [part for entry in dict.items(value) for part in entry]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        return [value.__self__, getattr(value, "__func__", None)]
    return None


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


_MADE_BY_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_PYTHONS_OWN = frozenset({object, torch.nn.Module})


def _keeps_more(kind: type) -> bool:
    """Return whether objects of a class may keep anything beside their attributes: in slots, or out of
    Python's sight.
    """
    return any(
        base not in _PYTHONS_OWN and (not base.__flags__ & _MADE_BY_CLASS or bool(vars(base).get("__slots__")))
        for base in kind.__mro__
    )
