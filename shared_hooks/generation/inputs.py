"""The inputs of a step on the wire.

Of a *private* input (token ids, embeddings, pixels) the form travels and nothing else. Of others, the *shared* ones
(masks, positions, an encoder's output), what is new since the step before.

    ["p", shape, stride, dtype]  private      ["="]  as before     ["+", columns]  as before, and these columns more
    ["i", values, dtype]  a few integers      ["s", number]  the tensor of that number in the message
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
import weakref
from collections.abc import Callable, Hashable, Iterator
from inspect import getattr_static
from types import MemberDescriptorType
from typing import Any

import torch

from shared_hooks.errors import MALFORMED, BadFrame, InputMismatch, TooLarge
from shared_hooks.generation.hidden import is_part, is_state, is_state_class, part_class
from shared_hooks.generation.remote_tensor import Origin, RemoteTensor, magnitude, shadow, weight
from shared_hooks.tensors import (
    ClassFinder,
    UnknownHolder,
    class_name,
    dtype_name,
    dtype_named,
    flatten,
    tensors_in,
    unflatten,
)

# The form of a state: what the other side must know of it. A tensor stays where it was written; its form travels.
#
#     ("v", literal)                 ("x", kind, text): dtype, device       ("c", class)
#     ("m", shape, stride, dtype): a tensor                          ("i", dtype, values): a few integers, as data
#     ("t", forms): a tuple          `StateNode`: an object, list or dictionary
#
# On the wire "M" in place of "m" is a tensor that the sender has: whatever the receiver had there is gone. What is "m"
# is the receiver's own, at the place where it was.
#
# Of integers that tell a length or a position both sides have the values, which all code may read.


FEW = 16
MAX_ELEMENTS = 1 << 32
MAX_NUMBER = 1 << 40
MAX_DEPTH = 16
OWN = "_isthmus"
"""The attribute in which a session keeps its own data on a state; no part of its form."""

OWN_TENSOR = "M"
INTEGERS = (torch.int64, torch.int32, torch.bool)
LITERALS = frozenset({bool, int, float, str, type(None)})

Form = Any
Path = tuple[Any, ...]


class StateNode:
    """One object ("o"), list ("l") or dictionary ("d") of a state, and the form of its contents by key.

    ``holder``: the live one. ``seen``: its values and their versions when the form was last known to be right.
    """

    __slots__ = ("cls", "forms", "holder", "kind", "seen")

    def __init__(self, kind: str, cls: str, holder: Any) -> None:
        self.kind = kind
        self.cls = cls
        self.holder = holder
        self.forms: dict[Any, Form] = {}
        self.seen: dict[Any, tuple[Any, int]] = {}

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Return its contents by key."""
        holder = self.holder
        if self.kind == "l":
            return enumerate(holder)
        if self.kind == "d":
            return iter(holder.items())
        return iter(self.attributes().items())

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of an object, without those of a session."""
        own: dict[str, Any] = vars(self.holder)
        if OWN in own:
            hidden = own[OWN].hidden
            return {key: value for key, value in own.items() if key not in hidden}
        return own

    def fill(self, values: dict[Any, Any]) -> None:
        """Replace the contents."""
        if self.kind == "l":
            self.holder[:] = list(values.values())
        elif self.kind == "d":
            self.holder.clear()
            self.holder.update(values)
        else:
            own = vars(self.holder)
            for key in [key for key, _ in self.items() if key not in values]:
                del own[key]
            own.update(values)

    def write(self, key: Any, value: Any) -> None:
        """Set a value in the holder."""
        if self.kind == "o":
            vars(self.holder)[key] = value
        elif self.kind == "l" and key == len(self.holder):
            self.holder.append(value)
        else:
            self.holder[key] = value

    def note(self, key: Any, value: Any, form: Form) -> None:
        """Record that ``value`` is there, with that form."""
        self.forms[key] = form
        self.seen[key] = value, version_of(value)


class Loose(StateNode):
    """A node with a weak reference to its holder: that of a state whose own attributes lead here."""

    __slots__ = ("_holder",)

    @property
    def holder(self) -> Any:
        return self._holder()

    @holder.setter
    def holder(self, value: Any) -> None:
        self._holder = weakref.ref(value)


def version_of(value: Any) -> int:
    """Return the number of in-place writes to a tensor; -1 for other values. torch does not count writes to inference
    tensors.
    """
    if not isinstance(value, torch.Tensor):
        return -1
    return 0 if value.is_inference() else value._version


def form_of(value: Any, here: torch.device, depth: int = 0) -> Form:
    """Return the form of a state or a part of one. Raises `UnknownHolder` for an object of an unknown kind."""
    kind = type(value)
    if kind in LITERALS:
        return "v", value
    if isinstance(value, torch.Tensor):
        if value.dtype in INTEGERS and value.numel() <= FEW and kind is not RemoteTensor:
            return "i", dtype_name(value.dtype), value.tolist()
        return "m", tuple(value.shape), tuple(value.stride()), dtype_name(value.dtype)
    if isinstance(value, torch.dtype):
        return "x", "dtype", dtype_name(value)
    if isinstance(value, torch.device):
        return "x", "device", "here" if _same_device(value, here) else str(value)
    if isinstance(value, type) and is_part(value):
        return "c", class_name(value)
    if depth > MAX_DEPTH:
        raise UnknownHolder(f"a state nested deeper than {MAX_DEPTH} levels")
    if kind is tuple:
        return "t", tuple([form_of(item, here, depth + 1) for item in value])
    if kind is list:
        node = StateNode("l", "", value)
    elif kind is dict:
        node = StateNode("d", "", value)
    elif is_part(kind) and hasattr(value, "__dict__"):
        node = StateNode("o", class_name(kind), value)
    else:
        raise UnknownHolder(
            f"a state holds a {class_name(kind)}, of which Isthmus does not know what it keeps between calls: "
            "see register_state, or use another kind of cache"
        )
    for key, item in node.items():
        if node.kind == "d" and type(key) not in (int, str):
            raise UnknownHolder(f"a state has a dictionary with a key of type {type(key).__name__}")
        node.note(key, item, form_of(item, here, depth + 1))
    return node


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def same(one: Form, other: Form) -> bool:
    """Return whether two forms are equal."""
    if isinstance(one, StateNode) and isinstance(other, StateNode):
        return (
            (one.kind, one.cls) == (other.kind, other.cls)
            and list(one.forms) == list(other.forms)
            and all(same(form, other.forms[key]) for key, form in one.forms.items())
        )
    return not isinstance(one, StateNode) and not isinstance(other, StateNode) and bool(one == other)


def plain(form: Form, value: Any) -> Any:
    """Return a form for JSON. ``value``: has that form; its tensors on this side are marked."""
    if isinstance(form, StateNode):
        return [form.kind, form.cls, [[key, plain(item, form.seen[key][0])] for key, item in form.forms.items()]]
    if form[0] == "t":
        return ["t", [plain(item, one) for item, one in zip(form[1], value, strict=True)]]
    return (OWN_TENSOR, *form[1:]) if form[0] == "m" and type(value) is not RemoteTensor else form


def build(form: Any, here: torch.device, old: Form = None, kept: Any = None, depth: int = 0) -> tuple[Any, Form]:
    """Return the value with a form from the wire, and its form. Raises BadFrame, TooLarge.

    ``old`` and ``kept``: the previous form and value. What has kept its form stays the same object, since it may be
    this side's own tensor.
    """
    try:
        kind = form[0]
        if kind in ("o", "l", "d"):
            if depth > MAX_DEPTH:
                raise BadFrame("a state is nested too deep")
            return _node(form, here, old, kept, depth)
        if kind == "t":
            nothing = (None,) * len(form[1])
            is_kept = isinstance(old, tuple) and old[0] == "t" and type(kept) is tuple
            is_kept = is_kept and len(old[1]) == len(kept) == len(form[1])
            befores, values = (old[1], kept) if is_kept else (nothing, nothing)
            items = [build(*one, depth + 1) for one in zip(form[1], itertools.repeat(here), befores, values)]
            return tuple([value for value, _ in items]), ("t", tuple([found for _, found in items]))
        found = _leaf_form(form)
        if found == old and kind != OWN_TENSOR:
            return kept, old
        return _leaf(found, here), found
    except (*MALFORMED, RuntimeError) as error:
        raise BadFrame(f"malformed form of a state: {error!s:.120}") from error


def _node(form: Any, here: torch.device, old: Form, kept: Any, depth: int) -> tuple[Any, StateNode]:
    kind, cls, entries = form
    continues = isinstance(old, StateNode) and (old.kind, old.cls) == (kind, cls)
    if continues:
        holder, before, values = kept, old.forms, dict(old.items())
    else:
        holder = object.__new__(part_class(cls)) if kind == "o" else [] if kind == "l" else {}
        before, values = {}, {}
    node = StateNode(kind, str(cls), holder)
    made: dict[Any, Any] = {}
    for number, (key, item) in enumerate(entries):
        check_key(kind, key, holder)
        if key in made or (kind == "l" and key != number):
            raise BadFrame("malformed form of a state: a key")
        made[key], found = build(item, here, before.get(key), values.get(key), depth + 1)
        node.note(key, made[key], found)
    node.fill(made)
    return holder, node


def check_key(kind: str, key: Any, holder: Any) -> None:
    """Raise BadFrame for a key that a holder of that kind does not have, or must not be given: an attribute must not
    hide a method of its class.
    """
    fits = type(key) is (int if kind == "l" else str) or (kind == "d" and type(key) is int)
    if not fits or (kind == "o" and (key == OWN or key.startswith("__"))):
        raise BadFrame("malformed form of a state: a key")
    if kind == "o" and _is_method((type(holder), key)):
        raise BadFrame(f"malformed form of a state: {key!r:.40} is not for the sender to set")


@functools.lru_cache(maxsize=4096)
def _is_method(place: tuple[Hashable, str]) -> bool:
    found = getattr_static(*place, None)
    return callable(found) or (hasattr(type(found), "__get__") and not isinstance(found, MemberDescriptorType))


def _leaf_form(form: Any) -> Form:
    """Return a leaf's form from JSON, checked."""
    kind = form[0]
    if kind == "m" or kind == OWN_TENSOR:
        return tensor_form(tuple(form[1]), tuple(form[2]), form[3])
    if kind == "v":
        if type(form[1]) not in LITERALS or (type(form[1]) is int and abs(form[1]) > MAX_NUMBER):
            raise BadFrame("malformed form of a state: a literal")
        return kind, form[1]
    if kind not in ("i", "x", "c"):
        raise BadFrame(f"malformed form of a state: {kind!r:.20}")
    return tuple(form)


def tensor_form(shape: tuple[Any, ...], stride: tuple[Any, ...], dtype: Any) -> Form:
    """Return a tensor's form from JSON. Raises as `check_sizes`."""
    # anything but numbers ends in `check_sizes`, including what equals one
    if {*map(type, shape), *map(type, stride)} <= {int}:
        _known_sizes(shape, stride)
    else:
        check_sizes(shape, stride)
    return "m", shape, stride, str(dtype)


def check_sizes(shape: tuple[Any, ...], stride: tuple[Any, ...]) -> None:
    """Raise BadFrame, and TooLarge for an implausible number of elements."""
    sizes = (*shape, *stride)
    if len(shape) != len(stride) or not {*map(type, sizes)} <= {int} or min(sizes, default=0) < 0:
        raise BadFrame("malformed form: sizes and strides")
    most = 1
    for size, step in zip(shape, stride, strict=True):
        most += max(0, size - 1) * max(1, step)
    if most > MAX_ELEMENTS:
        raise TooLarge(f"a tensor of {most} elements is announced; at most {MAX_ELEMENTS} are taken")


_known_sizes = functools.lru_cache(1024)(check_sizes)


def _leaf(form: Form, here: torch.device) -> Any:
    kind = form[0]
    if kind == "v":
        return form[1]
    if kind == "m":
        return shadow(form[1], form[2], form[3], here)
    if kind == "i":
        made = torch.tensor(form[2], dtype=dtype_named(form[1]), device=here)
        if made.dtype not in INTEGERS or made.numel() > FEW:
            raise BadFrame("malformed form of a state: integers")
        return made
    if kind == "c":
        return part_class(form[1])
    if form[1] == "dtype":
        return dtype_named(form[2])
    return here if form[2] == "here" else torch.device(form[2])


INPUTS_FEW = 64
MOST_COLUMNS = 16
_INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIVATE = re.compile(r"input_ids|embeds|pixel|feature|input_values|image|audio|video|spectrogram|waveform")
_SHARED = re.compile(r"mask|position|grid|sizes|lengths|token_type|_idx$|cache")


@functools.lru_cache(4096)
def is_private(name: str) -> bool:
    """Return whether an input of that name never leaves this side, by default."""
    return _PRIVATE.search(name) is not None and _SHARED.search(name) is None


class SentInputs:
    """The edge's side: what has been sent of the inputs."""

    def __init__(self, private: frozenset[str] | None = None) -> None:
        self._private = private
        self._is_private: Callable[[str], bool] = is_private if private is None else private.__contains__
        self._structure: Any = None
        self._forms: Any = None
        self._last: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self.leaves: list[torch.Tensor] = []
        """The tensors of the last inputs."""

    def add_to(self, kwargs: dict[str, Any], header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Add a step's inputs to a message. Raises `UnknownHolder`."""
        structure, leaves, names = [], [], []
        for name, value in kwargs.items():
            if type(value) in LITERALS:
                structure.append([name, ["v", value], 0])
                continue
            if type(value) is torch.Tensor:
                structure.append([name, ["t", 0], 1])
                leaves.append(value)
                names.append(name)
                continue
            if is_state(value):
                structure.append([name, 0])
                continue
            part, found = flatten(value)
            structure.append([name, part, len(found)])
            leaves += found
            names += [name] * len(found)
        forms, sent = [], len(tensors)
        for number, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
            forms.append(self._form(number, leaf, name, tensors))
        self.leaves = leaves
        if structure != self._structure:
            header["in"] = self._structure = structure
        if forms != self._forms or len(tensors) > sent:
            header["f"] = forms
        self._forms = forms

    def shared(self, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among a step's inputs that the other side receives."""
        found: list[torch.Tensor] = []
        for name, value in kwargs.items():
            if type(value) in LITERALS or is_state_class(type(value)) or self._is_private(name):
                continue
            if isinstance(value, torch.Tensor):
                found.append(value)
            else:
                found += tensors_in(value)
        return found

    def _form(self, number: int, leaf: torch.Tensor, name: str, tensors: list[torch.Tensor]) -> Any:
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise InputMismatch(f'the input "{name}" holds a {type(leaf).__name__}: pass plain tensors')
        if self._is_private(name):
            return ["p", list(leaf.shape), list(leaf.stride()), dtype_name(leaf.dtype), name]
        known = self._last.get(number)
        try:
            if known is not None:
                tensor, version, content = known
                if _same(content, leaf) if content is not tensor else tensor is leaf and version == version_of(leaf):
                    return ["="]
                columns = _grown(content, leaf)
                if columns is not None:
                    return ["+", columns]
                if leaf.numel() <= INPUTS_FEW and not leaf.is_floating_point() and not leaf.is_complex():
                    return ["i", leaf.tolist(), dtype_name(leaf.dtype)]
            tensors.append(leaf)
            return ["s", len(tensors) - 1]
        finally:
            # the caller may continue to write to it, and not only through torch, which counts writes
            most = INPUTS_FEW**2 if leaf.is_floating_point() or leaf.is_complex() else INPUTS_FEW**3
            content = leaf.clone() if leaf.numel() <= most else leaf
            self._last[number] = leaf, version_of(leaf), content

    def copied(self) -> SentInputs:
        """Return a copy for a session that continues from here independently."""
        made = SentInputs(self._private)
        made._structure, made._forms, made._last = self._structure, self._forms, dict(self._last)
        made.leaves = self.leaves
        return made


def _same(old: torch.Tensor, new: torch.Tensor) -> bool:
    form = old.dtype == new.dtype and old.shape == new.shape and old.stride() == new.stride()
    return form and torch.equal(_bits(old), _bits(new))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers: as numbers, two zeros are equal and NaN equals nothing."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF[tensor.itemsize]) if tensor.is_floating_point() else tensor


def _grown(old: torch.Tensor, new: torch.Tensor) -> Any:
    """Return the columns of ``new`` beyond ``old``; None if it differs otherwise."""
    if new.is_floating_point() or new.dim() < 1 or new.dim() != old.dim() or new.dtype != old.dtype:
        return None
    more = new.shape[-1] - old.shape[-1]
    if not 0 < more <= MOST_COLUMNS or new.numel() > INPUTS_FEW**3 or new.shape[:-1] != old.shape[:-1]:
        return None
    return new[..., -more:].tolist() if torch.equal(new[..., :-more], old) else None


def with_own_containers(value: Any) -> Any:
    """Return an input with copies of its lists and dictionaries: the model may change them, and a step may be
    repeated.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(map(with_own_containers, value))
    if kind is dict:
        return {name: with_own_containers(one) for name, one in value.items()}
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def has_same_content(one: Any, other: Any) -> bool:
    """Return whether the first still equals what `with_own_containers` made of the other."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(has_same_content, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(has_same_content, one.values(), other.values()))
    return one is other


class ReceivedInputs:
    """The cloud's side: the inputs of the previous step, and of this one."""

    def __init__(self, here: torch.device, find: ClassFinder) -> None:
        self._here = here
        self._find = find
        self._structure: Any = None
        self._forms: Any = None
        self._last: dict[int, torch.Tensor] = {}
        self._sent: tuple[Any, Any] = None, None
        self._magnitudes: Any = None
        self.leaves: list[torch.Tensor] = []

    def read(self, header: dict[str, Any], tensors: list[torch.Tensor], state: Any) -> tuple[dict[str, Any], int]:
        """Return the inputs of a step, and how many of the tensors belong to them. Raises BadFrame, TooLarge."""
        self._structure = header.get("in", self._structure)
        self._forms = header.get("f", self._forms)
        if self._structure is None or self._forms is None:
            raise BadFrame("a step without inputs")
        used = 0
        try:
            self.leaves = []
            for number in [number for number in self._last if number >= len(self._forms)]:
                del self._last[number]
            for number, form in enumerate(self._forms):
                leaf = self._leaf(number, form, tensors)
                used += form[0] == "s"
                if form[0] != "p":
                    self._last[number] = leaf
                self.leaves.append(leaf)
            kwargs, at = {}, 0
            for name, part, *count in self._structure:
                if part == 0:
                    kwargs[str(name)] = state
                    continue
                leaves = self.leaves[at : at + count[0]]
                kind = part[0]
                plain = kind == "t" or kind == "v"
                kwargs[str(name)] = (
                    (leaves[part[1]] if kind == "t" else part[1]) if plain else unflatten(part, leaves, self._find)
                )
                at += count[0]
        except (*MALFORMED, RuntimeError) as error:
            raise BadFrame(f"malformed inputs of a step: {error!s:.120}") from error
        return kwargs, used

    def magnitude(self) -> Any:
        """See `remote_tensor.magnitude`: of what was reported, and of the tensors' sizes."""
        if self._sent[0] is not self._structure or self._sent[1] is not self._forms:
            self._sent = self._structure, self._forms
            self._magnitudes = magnitude(self._structure), magnitude(self._forms)
        sizes: list[int] = []
        for leaf in self.leaves:
            sizes += (-1, *map(int.bit_length, leaf.shape))
        return self._magnitudes, sizes

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors kept for the next step."""
        return list(self._last.values())

    @property
    def nbytes(self) -> int:
        """The approximate bytes of the rest."""
        return 2 * weight(self._structure) + weight(self._forms)

    def _leaf(self, number: int, form: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        kind = form[0]
        if kind == "p":
            _, shape, stride, dtype = tensor_form(tuple(form[1]), tuple(form[2]), form[3])
            return RemoteTensor(shape, stride, dtype_named(dtype), self._here, Origin("input", str(form[4]), 0, number))
        if kind == "=":
            return self._last[number]
        if kind == "+":
            old = self._last[number]
            return torch.cat([old, torch.tensor(form[1], dtype=old.dtype, device=self._here)], dim=-1)
        if kind == "i":
            return torch.tensor(form[1], dtype=dtype_named(form[2]), device=self._here)
        found: torch.Tensor = tensors[form[1]]
        return found

    def copied(self) -> ReceivedInputs:
        """Return a copy for a fork."""
        made = ReceivedInputs(self._here, self._find)
        made._structure, made._forms, made._last = self._structure, self._forms, dict(self._last)
        made._sent, made._magnitudes = self._sent, self._magnitudes
        return made
