"""What a generation carries that is no output: states, hidden states, and what a model keeps between calls unasked.

* Which objects are states (`register_state`).
* Hidden states in fewer bits a number, where a loss is allowed (`encoded`): a codec of `shared_hooks.codecs`, as one
  uint8 tensor: size of the next (2 bytes, little endian), JSON [codec, dtype, shape, its parameters], its bytes. Each
  token has a step of its own; decoding gives the same numbers on every machine.
* Python state that both sides' code may write and read, and only one of them has (`InsideCalls`, `Unchanged`):
  docs/decisions/0050-two-replays.md.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import os
import random
import re
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from shared_hooks import codecs
from shared_hooks.codecs import Grain
from shared_hooks.codecs.codec import MAX_PARAMS
from shared_hooks.errors import MALFORMED, BadFrame, CutRefused, SpecError, TooLarge
from shared_hooks.generation.remote_tensor import RemoteTensor
from shared_hooks.purity import Turns
from shared_hooks.state import (
    MISSING,
    PLAIN,
    PythonState,
    StateChange,
    agree,
    attribute_in,
    entries,
    held_by_code,
    is_read,
    lasting,
    lasting_name,
    portable,
)
from shared_hooks.state.python_state import is_plain, left
from shared_hooks.tensors import class_name, dtype_name, dtype_named

# Which objects hold tensors between the calls of a model: transformers' caches, and what users register. Such an
# object is taken apart into its attributes and rebuilt without calling its code. The receiver builds only classes
# that it already has, and that are states or parts of states.


_registered: list[type] = []
# classes of transformers outside its module of caches: parts of caches that a model defines
_PART = re.compile(r"(Cache|CacheLayer|Layer|LayerMixin|States?|Params)$")


def register_state(cls: type) -> type:
    """Objects of ``cls`` hold tensors between calls. Do this on both sides; usable as a decorator.

    Its instances must keep all they know in their ``__dict__``: numbers, text, tensors, lists, dictionaries, and other
    registered objects.
    """
    if cls not in _registered:
        _registered.append(cls)
        _is_state.cache_clear()
    return cls


def _caches() -> tuple[type, ...]:
    module = sys.modules.get("transformers.cache_utils")
    found = getattr(module, "Cache", None)
    return (*_registered, found) if isinstance(found, type) else tuple(_registered)


@functools.lru_cache(1024)
def _is_state(cls: Hashable) -> bool:
    # those of transformers are imported once its caches are
    return isinstance(cls, type) and issubclass(cls, _caches())


is_state_class: Callable[[type], bool] = _is_state
"""Whether objects of a class are states."""


def is_state(value: Any) -> bool:
    """Return whether a value is an object that keeps tensors for the next call."""
    return is_state_class(type(value))


def state_in(values: Mapping[str, Any]) -> Any:
    """Return the state among a call's arguments or a result's entries; None if there is none. Its name differs between
    models and releases of transformers.
    """
    return next((value for value in values.values() if is_state(value)), None)


def state_name() -> str:
    """Return the name by which ``generate()`` takes a state, and returns one: "cache" since transformers 5.24."""
    results = importlib.import_module("transformers.generation.utils").GenerateDecoderOnlyOutput
    return "cache" if "cache" in results.__dataclass_fields__ else "past_key_values"


def is_part(cls: type) -> bool:
    """Return whether objects of a class may be part of a state."""
    if issubclass(cls, _caches()):
        return True
    own = cls.__module__.startswith("transformers.") and not issubclass(cls, nn.Module)
    return own and any(_PART.search(base.__name__) for base in cls.__mro__)


def part_class(name: str) -> type:
    """Return the class with that name. Raises BadFrame for an unknown class, or one that is no part of states."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, type) or class_name(found) != name or not is_part(found):
        raise BadFrame(f"{name!r:.80} is no class of states that is known here")
    return found


CODECS: Final = ("int8", "int6", "int5", "int4")
MAX_DIMENSIONS: Final = 8
MAX_ELEMENTS: Final = 1 << 28
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_SIZE: Final = 2
_PER_ELEMENT: Final = 8
"""The memory that decoding takes per element, in bytes."""


def check(codec: str | None) -> str | None:
    """Raise SpecError for an unknown codec."""
    if codec is not None and codec not in CODECS:
        raise SpecError(f"no codec {codec!r} for hidden states: there are {', '.join(CODECS)}")
    return codec


def encoded(tensor: torch.Tensor, codec: str) -> torch.Tensor | None:
    """Return the encoded hidden state as one uint8 tensor on the CPU.

    None for what is sent as it is: other dtypes, few numbers, NaN and infinities, and what would not be smaller.
    """
    if tensor.dtype not in _FLOATS or not 0 < tensor.dim() <= MAX_DIMENSIONS or not tensor.numel():
        return None
    width = tensor.shape[-1]
    tokens = Grain(tensor.numel() // width, width, 1, False)
    coded = codecs.CODECS[codec].encode(tensor.detach().contiguous().view(-1), tokens)
    if coded is None:
        return None
    reported = [codec, dtype_name(tensor.dtype), list(tensor.shape), list(coded.params)]
    head = json.dumps(reported, separators=(",", ":")).encode()
    data = bytearray().join((len(head).to_bytes(_SIZE, "little"), head, coded.data))
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) < tensor.nbytes else None


def decoded(data: torch.Tensor, most_bytes: int) -> torch.Tensor:
    """Return the decoded tensor in its own dtype, on the CPU. Raises BadFrame, and TooLarge before memory beyond
    ``most_bytes`` is taken.
    """
    if data.dtype is not torch.uint8 or data.dim() != 1:
        raise BadFrame(f"malformed hidden state: {data.dtype} of shape {list(data.shape)}, not bytes")
    raw = memoryview(data.detach().cpu().contiguous().numpy())  # type: ignore[arg-type]
    end = _SIZE + int.from_bytes(raw[:_SIZE], "little")
    codec, dtype, shape, params = _head(bytes(raw[_SIZE:end]))
    count = math.prod(shape)
    if count > MAX_ELEMENTS or _PER_ELEMENT * count > most_bytes:
        raise TooLarge(f"a hidden state of {count} numbers is announced")
    try:
        codec.check(params, dtype, count, len(raw) - end)
        found = codec.decode(raw[end:], params, dtype, count)
    except ValueError as error:
        raise BadFrame(f"malformed hidden state: {error}") from error
    if not isinstance(found, torch.Tensor) or found.dtype is not dtype or found.shape != (count,):
        raise BadFrame("malformed hidden state: another one than announced")
    return found.view(shape)


def _head(text: bytes) -> tuple[codecs.Codec, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """Codec, dtype, shape and parameters."""
    try:
        name, dtype, shape, params = json.loads(text)
    except MALFORMED as error:
        raise BadFrame(f"malformed hidden state: {error!s:.100}") from error
    if name not in CODECS or not isinstance(dtype, str) or dtype_named(dtype) not in _FLOATS:
        raise BadFrame("malformed hidden state: no such codec or dtype")
    if not _numbers(shape, MAX_DIMENSIONS) or not shape or min(shape) < 1 or not _numbers(params, MAX_PARAMS):
        raise BadFrame("malformed hidden state: its sizes or parameters")
    return codecs.CODECS[name], dtype_named(dtype), tuple(shape), tuple(params)


def _numbers(found: Any, most: int) -> bool:
    return isinstance(found, list) and len(found) <= most and all(type(one) is int for one in found)


# Whether a model's own code keeps something between calls beside its state objects: in attributes of modules, in
# globals, in what they reach. Sessions share the server's model, and neither side sees what the other one wrote. So
# what would be read is refused by name; what is written before it is read, and tables that every step makes alike,
# are allowed. Runs with poison in their place show which is which (`shared_hooks.state.walk`).


HOOKS = "hooks of a module"


class Settled:
    """What one model's states are like after a step; shared by all sessions. Thread-safe."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.state: PythonState | None = None
        self.rewritten: set[str] = set()
        """Names of what calls write before they read it, so that each step may."""
        self._changed: set[str] = set()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Called after a step. Raises CutRefused if the model has changed something that it had changed before."""
        with self._lock:
            if self.state is not None and self.state.is_same:
                return
            names = (set() if self.state is None else _changed(self.state)) - {HOOKS} - self.rewritten
            again = sorted(names & self._changed)
            self._changed |= names
            self.state = PythonState(self._model, settings=False)
        if again:
            raise refusal(again[0])


def _changed(state: PythonState) -> set[str]:
    """Return the names, as in `entries`, of what has changed since."""
    return {portable(lasting_name(change, state.places)) for change in state.changes()}


def check_cached(state: PythonState) -> None:
    """Raise CutRefused if a function with `functools.lru_cache` has kept a result that it would not return any more."""
    if name := state.unrepeatable_result():
        raise refusal(f"what functools.lru_cache has of {name}()")


LOOKS: Final = 2
"""`InsideCalls` observes this many steps of a session at its beginning, and then every so many."""
EVERY: Final = 64

MOST_KEPT: Final = 4096
"""The maximum number of values that a model keeps and its code may change."""
MOST_KEYS: Final = 256
"""The maximum number of keys of a table held by functions that are checked one by one."""
KEPT: Final = "kept"
"""A server's request to compare what the other side's model keeps with what this one's does (`KeptState.compared`)."""
MOST_UNREAD: Final = 64
"""How many ways of leaving things out are remembered of a session's steps; beyond that all are tried again."""
MOST_COMPARED: Final = 8
"""How often it may request a comparison in one step: more would be guesses at values that do not cross."""


@dataclass(frozen=True)
class KeptState:
    """What a model keeps at a cut that its code may change and read.

    The other side receives names, and values without numbers: what is computed from an input stays here. For the others
    it sends its own values, which are compared here.
    """

    summaries: dict[str, Any]
    """By name; None: unknown."""
    clear: frozenset[str] = frozenset()
    """Names of values without numbers."""

    @staticmethod
    def of(state: PythonState) -> KeptState:
        """Return what the model keeps. Raises CutRefused if that is too much."""
        read, changed = state.reach.names_read(), state.reach.names_set()
        kept = entries(state, lambda attribute, is_attribute: attribute in (changed if is_attribute else read))
        large = Counter(name.rpartition("[")[0] for name in kept if held_by_code(name))
        keyed = {name for name in kept if _KEYED.search(name) or large[name.rpartition("[")[0]] > MOST_KEYS}
        if keyed:  # keys may come from an input, and those of a large table are one value
            every = entries(state)
            for name in keyed:
                del kept[name]
                name = name.rpartition("[")[0]
                while _KEYED.search(name):
                    name = name.rpartition("[")[0]
                kept |= {name: every[name]} if name in every else {}
        if len(kept) > MOST_KEPT:
            raise CutRefused(f"the model's code may change {len(kept)} values that it keeps; at most {MOST_KEPT}")
        clear = frozenset(name for name, one in kept.items() if _is_clear(one.value))
        return KeptState({name: _summary(one.value) for name, one in kept.items()}, clear)

    def with_left(self, behind: dict[str, tuple[Any, Any]]) -> KeptState:
        """Return what one model would keep that runs on both sides: this, with `left_behind` where it has not changed
        here since. What has changed is unknown.
        """
        here = self.summaries
        there = {name: there if _near(here.get(name, mine), mine) else None for name, (there, mine) in behind.items()}
        return KeptState(here | there, self.clear - there.keys())

    def without(self, names: set[str]) -> KeptState:
        """This, with unknown values for ``names``."""
        return KeptState(self.summaries | dict.fromkeys(names), self.clear - names)

    def header_data(self) -> list[list[Any]]:
        """Return the data for a step's header."""
        return [[name, one] if name in self.clear else [name] for name, one in self.summaries.items()]

    def compared(self, there: Any) -> list[list[Any]]:
        """Return how the other side's values compare: [name, its summary at the cut, whether this side's equals that,
        and whether it equals what the step leaves there].

        ``there``: names with summaries at the cut and at the step's end, each name once. Raises BadFrame.
        """

        def is_here(name: str, summary: Any) -> int:
            return int(name in self.summaries and _near(self.summaries[name], summary))

        try:
            once = {name: (at_cut, end) for name, at_cut, end in there}
            return [[name, at_cut, is_here(name, at_cut), is_here(name, end)] for name, (at_cut, end) in once.items()]
        except MALFORMED as error:
            raise BadFrame(f"malformed state of a model: {error!s:.120}") from error


def read_comparison(reported: Any, requested: dict[str, Any]) -> tuple[set[str], set[str], set[str]]:
    """Process the edge's comparison (`KeptState.compared`) of the ``requested`` values: the names of those it does not
    have at the cut, of what it has as the step leaves it, and of what it does not report for these values. Raises
    BadFrame.
    """
    other, as_left, rest = set(), set(), set(requested)
    try:
        for name, at_cut, is_here, is_left in reported:
            if name in rest and _near(at_cut, requested[name]):
                rest.discard(name)
                other |= set() if is_here else {name}
                as_left |= {name} if is_left and not is_here else set()
    except MALFORMED as error:
        raise BadFrame(f"malformed comparison of a model's state: {error!s:.120}") from error
    return other, as_left, rest


_KEYED = re.compile(r"\[(?!\d+\][.\[]|'[a-z_]{1,40}'\]|\])")
"""In a name: a key of a dictionary that is no word, or a number that is no index on the way to an object."""


def _is_clear(value: Any, depth: int = 4) -> bool:
    if value is None or isinstance(value, (bool, str, nn.Module, type, types.FunctionType)):
        return True
    if isinstance(value, (list, tuple, set, frozenset, deque)) and depth:
        return all(_is_clear(one, depth - 1) for one in value)
    if isinstance(value, dict) and depth:
        return all(isinstance(key, str) and _is_clear(one, depth - 1) for key, one in value.items())
    return False


def differing(reported: Any, state: PythonState) -> tuple[set[str], dict[str, Any]]:
    """Compare what the edge's model keeps at the cut (`KeptState.header_data`) with this side's ``state`` at the same
    point, as far as code here may read it: the names of differences, and this side's summaries of what only the edge
    can compare. Raises BadFrame.
    """
    here = entries(state)
    found: set[str] = set()
    requested: dict[str, Any] = {}
    try:
        if len(reported) > 2 * MOST_KEPT:
            raise BadFrame(f"{len(reported)} values of a model's state in one step")
        for name, *summary in reported:
            entry = here.get(name)
            mine = _summary(MISSING if entry is None else entry.value)
            if summary and _near(summary[0], mine):
                continue
            kind, attribute = (object, attribute_in(name)) if entry is None else (entry.kind, entry.attribute)
            if held_by_code(name) or is_read(state.reach, attribute, kind):
                found |= {name} if summary else set()
                requested |= {} if summary else {name: mine}
    except MALFORMED as error:
        raise BadFrame(f"malformed state of a model: {error!s:.120}") from error
    return found, requested


def changed_since(state: PythonState) -> dict[str, Any]:
    """Return names and summaries of what has changed since."""
    named = [lasting(change, state.places) for change in left(state)]
    return {portable(one.name): _summary(one.now) for one in named if one.name != HOOKS}


def left_behind(reported: Any, model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return what the other side's calls have left on its model (`Unchanged.summaries`) and this side's lacks: both
    summaries by name. Raises BadFrame.
    """
    mine = entries(PythonState(model, settings=False))
    try:
        found = {name: (there, _summary(mine[name].value if name in mine else MISSING)) for name, there in reported}
        return {name: both for name, both in found.items() if not _near(*both)}
    except MALFORMED as error:
        raise BadFrame(f"malformed state of a model: {error!s:.120}") from error


def _summary(value: Any, depth: int = 4) -> Any:
    """Return a JSON value by which values are compared; numbers in tensors differ in their last bits between
    machines.
    """
    if type(value) is RemoteTensor:
        return "on the other side"
    if isinstance(value, torch.Tensor):
        form = [dtype_name(value.dtype), list(value.shape)]
        if value.is_meta or value.layout != torch.strided or not value.numel():
            return form
        flat = value.detach().flatten()
        picked = flat[:: max(1, len(flat) // 16)].to(torch.complex128)
        return [*form, [float(part) for one in picked.cpu().tolist() for part in (one.real, one.imag)]]
    if isinstance(value, PLAIN):
        return value if type(value) is float else repr(value)[:200]
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)) and len(value) > 16 and _is_all_plain(value):
        in_order = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
        return [len(value), hashlib.sha256(repr(in_order).encode()).hexdigest()[:16]]
    if isinstance(value, (list, tuple, deque)) and depth:
        return [len(value), [_summary(one, depth - 1) for one in list(value)[:16]]]
    if isinstance(value, (set, frozenset)) and depth:
        return [len(value), sorted(repr(_summary(one, depth - 1)) for one in value)[:16]]
    if isinstance(value, dict) and depth:
        return [len(value), [[repr(key)[:80], _summary(value[key], depth - 1)] for key in list(value)[:16]]]
    return class_name(type(value))


def _is_remote(value: Any, depth: int = 4) -> bool:
    """Return whether a value contains a remote tensor, left by a replayed call before the cut."""
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)) and depth:
        held = value.values() if isinstance(value, dict) else value
        return any(_is_remote(one, depth - 1) for one in held)
    return type(value) is RemoteTensor


def _is_all_plain(value: Any) -> bool:
    held = [*value, *value.values()] if isinstance(value, dict) else value
    return all(is_plain(one) for one in held)


NEAR: Final = {"float16": 2e-3, "bfloat16": 1e-2}
"""The tolerated difference of numbers between two machines, relative to the largest one; for others 1e-5."""


def _near(one: Any, other: Any, tolerance: float = 1e-5) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return _close([one], [other], tolerance)
    if not isinstance(one, list) or not isinstance(other, list):
        return type(one) is type(other) and one == other
    if len(one) != len(other):
        return False
    if all(isinstance(value, float) for value in (*one, *other)):
        return _close(one, other, tolerance)
    within = NEAR.get(one[0], tolerance) if isinstance(one[0], str) else tolerance
    return all(_near(a, b, within) for a, b in zip(one, other, strict=True))


def _close(one: list[float], other: list[float], tolerance: float) -> bool:
    most = max((abs(value) for value in (*one, *other) if math.isfinite(value)), default=0.0)
    return all(
        a == b or (a != a and b != b) or (math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * most)
        for a, b in zip(one, other, strict=True)
    )


class InsideCalls:
    """Detects what calls before the cut change besides tensors: the other side does not make these calls, and code
    behind the cut may read it.
    """

    def __init__(self, model: nn.Module, state: PythonState | None = None) -> None:
        """``state``: the model's recent one; making one takes 10 to 20 ms."""
        self._model = model
        if state is None or not state.looks_same:
            state = PythonState(model, settings=False)
        self._before = state
        self._threads = [vars(one) for one in state.of_threads()]
        self.outside: set[str] = set()
        """Changes to what belongs to no object of the model."""
        self.given: set[str] = set()
        """Calls that change their arguments: objects, sets, iterators, what a function closes over."""

    @staticmethod
    def wanted(step: int) -> bool:
        """Return whether to observe a session's ``step``."""
        return step < LOOKS or step % EVERY == 0

    @contextmanager
    def around(self, path: str, given: tuple[Any, ...]) -> Iterator[None]:
        """A context around one call."""
        kept: dict[int, Any] = {}
        before, environment, held = _seen_in(given, kept), dict(os.environ), dict[int, Any]()
        own = _seen_in(self._threads, held)
        yield
        if before != _seen_in(given, {}):
            self.given.add(path)
        if environment != dict(os.environ):
            self.outside.add("os.environ")
        if own != _seen_in(self._threads, {}):
            self.outside.add("a threading.local")

    def changed(self) -> set[str]:
        """Return the names, as in `entries`, of what has changed on the model since this was created.

        Raises CutRefused if `functools.lru_cache` keeps something that is no result.
        """
        check_cached(self.state())
        return set() if self._before.looks_same else _changed(self._before)

    def state(self) -> PythonState:
        """Return the model's current state."""
        return self._before if self._before.looks_same else PythonState(self._model, settings=False)

    def refuse(self) -> None:
        """Raise CutRefused for changes that no other run of the calls can confirm."""
        if self.outside:
            raise refusal(min(self.outside))
        self.refuse_given()

    def refuse_given(self) -> None:
        """As `refuse`, for what calls are given."""
        if self.given:
            raise CutRefused(
                f"{min(self.given)}, before the cut, changes an object that it is given, which is part of no state: "
                "the other side would not see that"
            )


MOST_SEEN: Final = 10_000
"""The maximum number of values examined within a call's arguments."""
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, slice, type)


def _seen_in(value: Any, kept: dict[int, Any]) -> list[Any]:
    """Return what can be seen of a value, for a later comparison; ``kept`` keeps the identified objects alive.

    Tensors, modules and states are checked elsewhere. An iterator cannot be seen without being consumed, and equals
    nothing.
    """
    found: list[Any] = []
    waiting = [value]
    while waiting and len(kept) < MOST_SEEN:
        one = waiting.pop()
        if isinstance(one, _VALUES):
            found.append(one)
            continue
        found.append(id(one))
        if id(one) in kept or isinstance(one, (torch.Tensor, nn.Module, types.ModuleType)) or is_state(one):
            continue
        kept[id(one)] = one
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, (tuple, list, set, frozenset, deque)):
            found.append(len(one))
            waiting += one
        elif isinstance(one, (bytearray, np.ndarray)):
            found.append(bytes(one))
        elif isinstance(one, torch.Generator):
            found.append(bytes(one.get_state().numpy()))
        elif isinstance(one, random.Random):
            found.append(one.getstate())
        elif isinstance(one, np.random.Generator):
            found.append(str(one.bit_generator.state))
        elif isinstance(one, np.random.RandomState):
            found.append(str(one.get_state(legacy=False)))
        elif isinstance(one, functools.partial):
            waiting += [one.func, one.args, one.keywords]
        elif isinstance(one, types.FunctionType):
            waiting += [cell.cell_contents for cell in one.__closure__ or () if _is_full(cell)]
        elif hasattr(type(one), "__next__"):
            found.append(object())
        elif isinstance(one, types.MethodType):
            waiting.append(one.__self__)
        with suppress(Exception):  # attributes that a user has made may raise
            waiting += vars(one).values()
        for kind in type(one).__mro__:
            if "__slots__" in vars(kind):
                slots = [slot for slot in vars(kind).values() if type(slot) is types.MemberDescriptorType]
                waiting += [slot.__get__(one) for slot in slots if _is_set(slot, one)]
    return found


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_set(slot: Any, one: Any) -> bool:
    try:
        slot.__get__(one)
    except AttributeError:
        return False
    return True


@dataclass(frozen=True)
class Unchanged:
    """What the steps of one session have left on the server's model, which all sessions share, so that it is restored.

    That equals keeping it only if steps write it before they read it; or if the step, repeated from what it left,
    returns the same and changes nothing, and later steps leave the same: a table that is built on first use, and now in
    each step.
    """

    same: Mapping[str, Any] = field(default_factory=dict)
    """What the first step has left by name, as later ones do."""
    rewritten: frozenset[str] = frozenset()
    """Names of what steps write before they read it."""
    unread: frozenset[frozenset[str]] = frozenset()
    """What some steps did not leave and did not read, of what others have left."""

    def check(
        self, before: PythonState, turns: Turns, again: Callable[[], bool] | None
    ) -> tuple[Unchanged, dict[str, StateChange], set[str]]:
        """After a forward that began with the state ``before``: this with what it left; that by name; and which of it
        no step may read before writing it.

        ``again`` repeats the step from there, and returns whether it gave the same; None if other code runs in between.
        Raises CutRefused.
        """
        check_cached(before)
        if before.looks_same:
            turns.looked = turns.nested == 1
            return self, {}, self._missing(())
        named = [lasting(change, before.places) for change in left(before)]
        changes = {portable(change.name): change for change in named if not _is_remote(change.now)}
        found = {name: change.now for name, change in changes.items() if name not in self.rewritten}
        new = found.keys() - self.same.keys()
        others = {name for name in found.keys() - new if not _same_kind(self.same[name], found[name])}
        unproven = (others - _sizes(self.same, found, others)) | self._missing(changes)
        if not new:
            return self, changes, unproven
        if again is None:
            raise refusal(min(new))
        state = PythonState(turns.model, settings=False)
        tables = new if again() else set()
        moved = set() if state.looks_same else _changed(state)
        unproven |= (new - tables) | (moved - self.rewritten)
        return replace(self, same={**self.same, **{name: found[name] for name in tables - moved}}), changes, unproven

    def _missing(self, found: Iterable[str]) -> set[str]:
        """Return what earlier steps have left and this one (``found``) has not: had it been kept, it might be read."""
        names = frozenset((self.same.keys() | self.rewritten).difference(found))
        return set() if names in self.unread else set(names)

    def proven(self, unproven: set[str], changes: dict[str, StateChange]) -> Unchanged:
        """This, after a step has been shown not to read ``unproven`` before writing it (`check`)."""
        missing = frozenset(unproven - changes.keys())
        same = {name: one for name, one in self.same.items() if name not in unproven or name in missing}
        unread = self.unread if len(self.unread) < MOST_UNREAD else frozenset()
        return Unchanged(same, self.rewritten | (unproven & changes.keys()), unread | {missing})

    def summaries(self, changes: dict[str, StateChange]) -> list[Any]:
        """Return for the answer to a step names and summaries of what it left behind the cut; no summaries for what is
        written each time.
        """
        names = [name for name in changes if name != HOOKS][:MOST_KEPT]
        return [[name, None if name in self.rewritten else _summary(changes[name].now)] for name in names]


def _sizes(first: Mapping[str, Any], now: dict[str, Any], names: set[str]) -> set[str]:
    """Return those of ``names`` that are integers equal to the length of a table of the same object."""
    tables: dict[str, set[tuple[int, int]]] = {}
    for name in first.keys() & now.keys():
        one, other = first[name], now[name]
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            pairs = zip(one.shape, other.shape, strict=False)
            tables.setdefault(name.rpartition(".")[0], set()).update(pairs)
    return {name for name in names if (first[name], now[name]) in tables.get(name.rpartition(".")[0], ())}


def _same_kind(first: Any, now: Any) -> bool:
    """Return whether two tables are of one kind, the longer with more entries."""
    if isinstance(first, torch.Tensor) and isinstance(now, torch.Tensor) and first.dim() == now.dim():
        both = tuple(slice(min(sizes)) for sizes in zip(first.shape, now.shape, strict=True))
        first, now = first[both].contiguous(), now[both].contiguous()
    return first is now or agree(first, now)


def refusal(name: Any) -> CutRefused:
    return CutRefused(
        f"the model's code keeps {name!s:.200} from one call to the next, and not in a state object that is "
        "passed to it: sessions would share it, and the other side would not see it"
    )
