"""The head of one step: the model runs up to the cut, and the results of the outermost modules of the prefix are kept.

A module is *outermost* if it is called by the code around the cut. The tail does not run it again; it receives the form
of its result. Inside it only modules with hooks are observed, and their results are reported, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import CutRefused
from shared_hooks.forward import HookExitException, is_mapped
from shared_hooks.generation.bank import Watch
from shared_hooks.generation.cut import GenerationCut
from shared_hooks.generation.hidden import InsideCalls, is_state, is_state_class
from shared_hooks.generation.mirror import Mirror
from shared_hooks.generation.remote_tensor import Origin, RemoteTensor
from shared_hooks.modules.attach import Needed
from shared_hooks.tensors import DTYPE_NAMES, UnknownHolder, flatten

MOST_VALUES = 1_000_000
"""The maximum number of values that one call is given, including nested ones."""


class HeadCall:
    """A call before the cut. ``tensors``: its arguments; ``inner``: calls inside it that have hooks, in order."""

    __slots__ = ("count", "inner", "output", "path", "tensors")

    def __init__(self, path: str, count: int, tensors: list[torch.Tensor]) -> None:
        self.path = path
        self.count = count
        self.tensors = tensors
        self.output: Any = None
        self.inner: list[HeadCall] = []


class GenerationHead:
    """Runs one forward up to the cut (a `Runner`).

    ``seek``: the forward is given no state, but may create one. ``modules``: those of the `WrappedModel` whose
    observers see it. ``look``: observes what its calls change.
    """

    is_bare = False

    is_shown = True

    def __init__(
        self,
        cut: GenerationCut,
        paths: dict[nn.Module, str],
        here: torch.device,
        needed: Needed,
        *,
        seek: bool = False,
        modules: object = None,
        look: InsideCalls | None = None,
    ) -> None:
        self.modules = modules
        self._look = look
        self._needed = needed
        self._simple = needed.simple
        self._cut = cut
        self._paths = paths
        self._here = here
        self._seek = seek
        self._frames: list[str | None] = [""]
        self._counts: dict[str, int] = {}
        self._open: list[HeadCall] = []
        self.exit = HookExitException("the cut of this step")
        self.watch = Watch(self._frames)
        self.calls: list[HeadCall] = []
        self.born: Mirror | None = None
        """The mirror of a state that the forward created, as it was when the prefix first received it."""
        self.leaves: list[torch.Tensor] = []
        """The tensors of the cut's result."""
        self.structure: Any = None
        self.passed: list[int] = []
        """For each of them: which tensor among the cut module's arguments it is, or -1."""
        self.is_shared = False
        """Whether one of them shares memory with what is known before the cut."""
        self.failure: BaseException | None = None

    def share(self, frames: list[str | None], counts: dict[str, int]) -> None:
        """Start where another runner is: in these frames, after so many calls."""
        self._frames, self._counts, self.watch = frames, counts, Watch(frames)

    def failed(self, error: BaseException) -> None:
        """As `Runner.failed`."""
        self.failure = self.failure or error

    @property
    def sees_inside(self) -> bool:
        """Whether the module being called is around the cut, so that its modules must be seen."""
        return self._frames[-1] is not None

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As `Runner.call`."""
        path = self._paths.get(module)
        if path is None:
            return forward(*args, **kwargs)
        if self._frames[-1] is None:
            return forward(*args, **kwargs) if not module._forward_hooks else self._inside(path, forward, args, kwargs)
        if path in self._cut.above:
            self._frames.append(path)
            try:
                return forward(*args, **kwargs)
            finally:
                self._frames.pop()
        self._needed.called.add(module)
        # the watch is for the code around the cut: neither for modules of the prefix nor for our own operations
        mode = torch._C._pop_torch_function_stack() if torch._C._len_torch_function_stack() else None
        try:
            count = self._counts[path] = self._counts.get(path, 0) + 1
            call = HeadCall(path, count, arguments(args, kwargs))
            if self._seek and self.born is None:
                self.born = born(args, kwargs, self._here)
            versions = []
            for one in call.tensors:
                versions.append(0 if one.is_inference() else one._version)
            contents: list[Any] = []
            if not self._simple.issuperset(map(type, (*args, *kwargs.values()))):
                for value in (*args, *kwargs.values()):
                    if isinstance(value, (dict, list)):
                        contents = contents or _contents(args, kwargs)
                    else:
                        self._simple.add(type(value))
            bare = self._needed.settled
            hooks = self._needed.hooks.get(module) or self._needed.hooks_within(module) if bare else ()
            if any(hooks):
                self._needed.need_all()
                bare = False
            self._frames.append(None)
            self._open.append(call)
            try:
                if self._look is None:
                    call.output = forward(*args, **kwargs)
                else:
                    with self._look.around(path, (*args, *kwargs.values())):
                        call.output = forward(*args, **kwargs)
            finally:
                self._open.pop()
                self._frames.pop()
            for one, version in zip(call.tensors, versions, strict=True):
                if version != (0 if one.is_inference() else one._version):
                    raise _changed(path, "writes in place to a tensor that it is given, which is part of no state")
            if contents and _contents(args, kwargs) != contents:
                raise _changed(path, "changes a list or dictionary that it is given")
            if bare and any(hooks):
                raise _changed(path, "has put hooks on modules in it")
            self.calls.append(call)
            if path == self._cut.path and count == self._cut.number:
                self._leave(call)
            return call.output
        finally:
            if mode is not None:
                torch._C._push_on_torch_function_stack(mode)

    def _inside(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count = self._counts[path] = self._counts.get(path, 0) + 1
        call = HeadCall(path, count, [])
        call.output = forward(*args, **kwargs)
        self._open[-1].inner.append(call)
        return call.output

    def _leave(self, call: HeadCall) -> None:
        self.structure, self.leaves = flatten(call.output)
        before = (*call.tensors, *self._given_before())
        if is_mapped([*self.leaves, *before]):
            raise CutRefused(f"a module up to {call.path} runs inside torch.vmap, or another function of torch.func")
        given = {id(tensor): number for number, tensor in enumerate(call.tensors)}
        self.passed = [given.get(id(leaf), -1) for leaf in self.leaves]
        memory = set()
        for leaf in self.leaves:
            if type(leaf) is not RemoteTensor:
                memory.add(leaf.untyped_storage()._cdata)
                if leaf.__dict__ and type(leaf) is torch.Tensor and "_is_buffer" not in leaf.__dict__:
                    raise CutRefused(f"{call.path} gives a tensor with attributes of its own ({min(leaf.__dict__)})")
        for one in before:
            if type(one) is RemoteTensor or one.untyped_storage()._cdata not in memory:
                continue
            self.is_shared = self.is_shared or any(_overlap(one, leaf) for leaf in self.leaves)
        raise self.exit

    def _given_before(self) -> list[torch.Tensor]:
        """Return the results of calls before the cut's."""
        found: list[torch.Tensor] = []
        for call in self.calls[:-1]:
            if isinstance(call.output, torch.Tensor):
                found.append(call.output)
            else:
                found += _leaves(call.output)
        return found

    # What is reported of it

    def given_by_calls(self) -> list[torch.Tensor]:
        """Return the tensors in the results of all calls, in order."""
        return [leaf for call in self.calls for leaf in _leaves(call.output)]

    def reports(self) -> list[Any]:
        """Return the forms of the results: [path, count, structure, sources, inner] of each call.

        A source is a form with what it shares memory with (`CallReport`), or the number of the argument that it is. Of
        the cut's own call only what its inner hooks have seen counts.
        """
        calls = self.calls if self.calls[-1].inner else self.calls[:-1]
        found = []
        for call in calls:
            report = _report(call, call.tensors)
            if report is not None:
                found.append(report)
        return found

    def value(self, origin: Origin) -> torch.Tensor | None:
        """Return a tensor that a call before the cut returned, or None."""
        for call in self._all(self.calls):
            if (call.path, call.count) == (origin.path, origin.count):
                leaves = flatten(call.output)[1]
                return leaves[origin.number] if origin.number < len(leaves) else None
        return None

    def _all(self, calls: list[HeadCall]) -> Iterator[HeadCall]:
        for call in calls:
            yield call
            yield from self._all(call.inner)


def _leaves(value: Any) -> list[torch.Tensor]:
    try:
        return flatten(value)[1]
    except UnknownHolder:
        return []


def born(args: tuple[Any, ...], kwargs: dict[str, Any], here: torch.device) -> Mirror | None:
    """Return the mirror of the state among a module's arguments, or None."""
    return next((Mirror(value, here) for value in (*args, *kwargs.values()) if is_state(value)), None)


def _report(call: HeadCall, arguments: list[torch.Tensor]) -> Any:
    structure: Any = ["t", 0]
    leaves = [call.output]
    if type(call.output) is not torch.Tensor:
        try:
            structure, leaves = flatten(call.output)
        except UnknownHolder:
            return None  # the tail runs the module on remote tensors, or refuses
    forms: list[Any] = []
    memory: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for number, one in enumerate(arguments):
        if type(one) is not RemoteTensor:
            memory.setdefault(one.untyped_storage()._cdata, []).append((number, one))
    for number, leaf in enumerate(leaves):
        for argument, one in enumerate(arguments):
            if one is leaf:
                forms.append(argument)
                break
        else:
            form: list[Any] = [list(leaf.shape), list(leaf.stride()), DTYPE_NAMES[leaf.dtype]]
            if type(leaf) is not RemoteTensor:
                others = memory.setdefault(leaf.untyped_storage()._cdata, [])
                if others:
                    form += [number for number, one in others if _overlap(one, leaf)][:1]
                others.append((-number - 1, leaf))
            forms.append(form)
    # hooks inside do not get the arguments
    inner = [] if not call.inner else [_report(one, []) for one in call.inner]
    return [call.path, call.count, structure, forms, [one for one in inner if one is not None] if inner else inner]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of this side may share elements; what crossed in one message is in one memory."""
    if type(one) is RemoteTensor or type(other) is RemoteTensor:
        return False
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or not one.numel() or not other.numel():
        return False
    (first, last), (begin, end) = _extent(one), _extent(other)
    return first < end and begin < last


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that it covers, and the one after the last."""
    steps = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + (int(steps) + 1) * tensor.itemsize


def _changed(path: str, what: str) -> CutRefused:
    """Return the error for a change that a tail could not repeat."""
    return CutRefused(f"{path}, before the cut, {what}: the other side would not see that")


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among a module's arguments, including nested ones, but not those in states."""
    found: list[torch.Tensor] = []
    waiting = [*args, *kwargs.values()]
    waiting.reverse()
    for _ in range(MOST_VALUES):
        if not waiting:
            return found
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            waiting += reversed(value)
        elif type(value) is dict:
            waiting += reversed(value.values())
    raise CutRefused(f"a module before the cut is given more than {MOST_VALUES} values, or a list that holds itself")


def _contents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the contents of lists and dictionaries among a module's arguments, by identity."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (dict, list)) and not is_state_class(type(value)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            found.append([(key, id(item)) for key, item in items])
    return found
