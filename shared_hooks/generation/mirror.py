"""A mirror: what the other side knows of one state. Each side keeps one and reports its changes to the other.

Checking for changes costs a comparison of identities: only what is another object, or was written in place, is
examined.
"""

from __future__ import annotations

import copy
import itertools
import operator
import types
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shared_hooks.errors import MALFORMED, BadFrame, CutRefused
from shared_hooks.generation.inputs import (
    INTEGERS,
    LITERALS,
    OWN,
    OWN_TENSOR,
    Form,
    Loose,
    Path,
    StateNode,
    build,
    check_key,
    form_of,
    plain,
    same,
    tensor_form,
    version_of,
)
from shared_hooks.generation.remote_tensor import RemoteTensor, ResultPart, StepAllowance, magnitude, shadow
from shared_hooks.tensors import DTYPE_NAMES, UnknownHolder, tensors_in

NUMBERS = (int, float)
NODE_BYTES, ENTRY_BYTES = 1024, 2560
"""The memory of a holder and its form, and of one entry, of which a tensor without data is the largest."""
PLACE_BYTES = 512
"""The memory of the place of a tensor that grows in each step, and of its path."""

Change = tuple[Path, Form, Form, Any]
"""(path, the new form, the form before or None, the new value)."""
Forms = list[tuple[StateNode, dict[Any, Form]]]
WorkOut = Callable[[RemoteTensor], torch.Tensor]
"""Computes the value of a remote tensor that this side's code has put into a state. Raises CutRefused, RemoteRead."""


@dataclass(frozen=True)
class Snapshot:
    """The contents of all containers of a state at one time. See `Mirror.snapshot`."""

    root: StateNode
    nodes_changed: int
    contents: list[tuple[StateNode, dict[Any, Form], dict[Any, tuple[Any, int]]]]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of this side in it."""
        return [tensor for _, _, seen in self.contents for value, _ in seen.values() for tensor in _real(value)]

    @property
    def form_bytes(self) -> int:
        """See `Mirror.form_bytes`."""
        return sum([NODE_BYTES + ENTRY_BYTES * len(forms) for _, forms, _ in self.contents])

    @property
    def is_whole(self) -> bool:
        """Whether everything can be restored: no tensor was written in place since, except for the few integers."""
        for _, forms, seen in self.contents:
            for key, (value, version) in seen.items():
                if version >= 0 and type(value) is not RemoteTensor and version != version_of(value):
                    form = forms[key]
                    if isinstance(form, StateNode) or form[0] != "i":
                        return False
        return True

    def restore(self, gone: list[torch.Tensor]) -> bool:
        """Restore everything; ``gone`` gets the tensors of this side that replaced others.

        Returns False if a tensor was written in place since: its old content is lost, unless it is one of the few
        integers whose form contains it.
        """
        for _, forms, seen in self.contents:
            for key, (value, version) in seen.items():
                if version < 0:
                    continue
                form = forms[key]
                if type(value) is RemoteTensor:
                    now = 0 if value.is_inference() else value._version
                    if version != now or value.memory.writes != value.writes:
                        # the values were written on the other side
                        fresh = shadow(form[1], form[2], form[3], value.device)
                        seen[key] = fresh, version_of(fresh)
                elif version != (0 if value.is_inference() else value._version):
                    if isinstance(form, StateNode) or form[0] != "i":
                        return False
                    old = torch.tensor(form[2], dtype=value.dtype, device=value.device)
                    seen[key] = old, old._version
        for node, forms, seen in self.contents:
            node.forms, node.seen = dict(forms), dict(seen)
            held = node.holder if node.kind != "o" else vars(node.holder)
            if node.kind == "o" and OWN in held:
                held = node.attributes()
            if len(held) == len(seen) and (node.kind == "l" or list(held) == list(seen)):
                for value, known in zip(held if node.kind == "l" else held.values(), seen.values(), strict=True):
                    if value is not known[0]:
                        break
                else:
                    continue
            kept = {id(value) for value, _ in seen.values()}
            new = [value for value in (held if node.kind == "l" else held.values()) if id(value) not in kept]
            gone += [tensor for tensor in tensors_in(new) if type(tensor) is not RemoteTensor]
            node.fill({key: value for key, (value, _) in seen.items()})
        return True


class Mirror:
    """The form of ``state`` as known to both sides. ``here``: the device of this side's part. Raises
    `UnknownHolder`.
    """

    def __init__(self, state: Any, here: torch.device) -> None:
        self._begin(here)
        with torch._C.DisableTorchFunction():  # our own reads are not operations of the model
            self.root = form_of(state, here)
        if not isinstance(self.root, StateNode):
            raise BadFrame("a state is an object")
        self._check_single()

    @classmethod
    def built(cls, form: Any, here: torch.device) -> Mirror:
        """Return a mirror with a state rebuilt from its form; its tensors are shadows. Raises BadFrame."""
        made = cls.__new__(cls)
        made._begin(here)
        state, made.root = build(form, here)
        if not isinstance(made.root, StateNode) or made.root.kind != "o":
            raise BadFrame("a state is an object")
        del state
        return made

    def _begin(self, here: torch.device) -> None:
        self.here = here
        self.moved: list[Path] = []
        """Places where the last check found another shadow than before."""
        self.nodes_changed = 0
        """Changes whenever a node is added or removed."""
        self._places: dict[int, _Places] = {}

    @property
    def state(self) -> Any:
        """The state itself."""
        return self.root.holder

    def loosen(self) -> None:
        """Stop keeping the state alive; the state keeps the mirror alive from now on."""
        loose = Loose(self.root.kind, self.root.cls, self.root.holder)
        loose.forms, loose.seen = self.root.forms, self.root.seen
        self.root = loose
        self._renumber()

    def look(self, work_out: WorkOut | None = None) -> list[Change]:
        """Find what has changed here since the last `look` or `put`; both sides know it from now on.

        ``work_out``: returns what replaces a remote tensor at a new place; without it the place is added to `moved`.
        """
        found: list[Change] = []
        self.moved = []
        with torch._C.DisableTorchFunction():
            has_new_nodes = self._look(found, work_out)
        if has_new_nodes:
            self._renumber()
            self._check_single()
        return found

    def _renumber(self) -> None:
        self.nodes_changed = next(_numbers)

    def _check_single(self) -> None:
        """Raise UnknownHolder if a container occurs twice, which the other side would make two."""
        known: set[int] = set()
        for node in self._nodes(self.root):
            if id(node.holder) in known:
                raise UnknownHolder(f"a state holds one {node.cls or type(node.holder).__name__} in two places")
            known.add(id(node.holder))

    def _look(self, found: list[Change], work_out: WorkOut | None) -> bool:
        """Collect changes; returns whether nodes came or went. Unchanged parts cost no calls, because each step checks
        a state of many layers.
        """
        waiting: list[tuple[StateNode, Path, list[Change]]] = [(self.root, (), found)]
        has_new_nodes = False
        while waiting:
            node, path, changes = waiting.pop()
            forms, seen = node.forms, node.seen
            left, inner = len(seen), len(waiting)
            # several new entries are described by their differences, which are unordered
            whole = node.kind == "l" and len(node.holder) > left + 1
            entries: Any = node.items() if node.kind != "o" else vars(node.holder)
            if node.kind == "o":
                entries = (node.attributes() if OWN in entries else entries).items()
            for key, value in entries:
                known = seen.get(key)
                if known is not None:
                    left -= 1
                    if known[0] is value:
                        if known[1] < 0:
                            if type(value) not in LITERALS and isinstance(forms[key], StateNode):
                                waiting.append((forms[key], (*path, key), changes))
                            continue
                        if type(value) is RemoteTensor:
                            # writes through a view do not raise its version
                            version = 0 if value.is_inference() else value._version
                            if known[1] == version and value.memory.writes == value.writes:
                                continue
                        elif known[1] == (0 if value.is_inference() else value._version):
                            continue
                before = forms.get(key)
                if type(value) is torch.Tensor and type(before) is tuple and before[0] == "m":
                    dtype = value.dtype
                    if DTYPE_NAMES[dtype] == before[3] and dtype not in INTEGERS:  # as a cache grows
                        form = "m", tuple(value.shape), tuple(value.stride()), before[3]
                        if form != before or (known is not None and type(known[0]) is RemoteTensor):
                            changes.append(((*path, key), form, before, value))
                        forms[key] = form
                        seen[key] = value, 0 if value.is_inference() else value._version
                        continue
                placed = self._placed(value, None if known is None else known[0], (*path, key), work_out)
                if placed is not value:
                    value = placed
                    node.write(key, value)
                form = form_of(value, self.here)
                if isinstance(form, StateNode):
                    self._settle(form, before, (*path, key), work_out)
                has_new_nodes = has_new_nodes or isinstance(form, StateNode) or isinstance(before, StateNode)
                # tensors of this side may be where the other side's were, whatever their form
                if known is None or isinstance(value, (tuple, list, dict, torch.Tensor)) or not same(form, before):
                    changes.append(((*path, key), form, before, value))
                node.note(key, value, form)
            if left or whole:  # something was removed: the whole is sent
                has_new_nodes = True
                gone = seen.keys() - {key for key, _ in node.items()}
                for key in gone:
                    del forms[key], seen[key]
                changes[:] = [change for change in changes if change[0][: len(path)] != path]
                changes.append((path, node, None, node.holder))
                # what is found within it is part of the whole
                waiting[inner:] = [(one, where, []) for one, where, _ in waiting[inner:]]
        return has_new_nodes

    def _placed(self, value: Any, before: Any, path: Path, work_out: WorkOut | None) -> Any:
        """Return what replaces ``value`` at a place that held ``before``: remote tensors that are new there are not
        kept.
        """
        if type(value) is tuple:
            old = before if type(before) is tuple and len(before) == len(value) else (None,) * len(value)
            found = tuple([self._placed(one, was, path, work_out) for one, was in zip(value, old, strict=True)])
            return value if all(map(operator.is_, found, value)) else found
        if type(value) is not RemoteTensor or (value is before and value.memory.writes == value.writes):
            return value
        if work_out is not None:
            return work_out(value)
        self.moved.append(path)
        return value

    def _settle(self, node: StateNode, before: Form, path: Path, work_out: WorkOut | None) -> None:
        """As `_placed`, for everything in a new part of a state."""
        for key, (value, _) in list(node.seen.items()):
            old = before.seen.get(key, (None, 0))[0] if isinstance(before, StateNode) else None
            form = node.forms[key]
            if isinstance(form, StateNode):
                self._settle(
                    form, before.forms.get(key) if isinstance(before, StateNode) else None, (*path, key), work_out
                )
                continue
            placed = self._placed(value, old, (*path, key), work_out)
            if placed is not value:
                node.write(key, placed)
                node.note(key, placed, form_of(placed, self.here))

    def put(self, known: LastSent, reported: Any) -> LastSent:
        """Apply the other side's changes; tensors whose form stays the same are kept.

        ``known``: what it reported before. Returns what must be known for the next call. Raises BadFrame.
        """
        again = type(reported) is int and reported == AGAIN
        if again and known is None:
            raise BadFrame("the changes of a state are those of the step before, and there is none")
        message = known if again else reported
        try:
            places = self._places.get(id(known)) if again else self._places.pop(id(known), None)
            if again and places is not None and places.sent is known and places.nodes_changed == self.nodes_changed:
                for difference, found in places.all:
                    self.grow(difference, found)
            else:
                self._put_new(message, again)
        except MALFORMED as error:
            raise BadFrame(f"malformed changes of a state: {error!s:.120}") from error
        return message

    def _put_new(self, reported: LastSent, again: bool) -> None:
        """Apply changes whose places are not known yet. Those that are repeated are remembered."""
        places: list[tuple[Any, list[tuple[StateNode, Any]]]] = []
        for form, paths in reported:
            found = []
            for path in paths:
                if not path:
                    _, self.root = build(form, self.here, self.root, self.state)
                    self._renumber()
                    continue
                node, key = self._at(tuple(path[:-1])), path[-1]
                check_key(node.kind, key, node.holder)
                if form[0] in DIFFERENCES:
                    found.append((node, key))
                else:
                    self._put_one(node, key, form)
            if found:
                self.grow(form, found)
            places.append((form, found))
        if again and places and all(form[0] in DIFFERENCES for form, _ in places):
            if len(self._places) > MOST_MORE:  # of steps that failed
                self._places.clear()
            self._places[id(reported)] = _Places(reported, self.nodes_changed, places)

    def _put_one(self, node: StateNode, key: Any, form: Any) -> None:
        before = node.forms.get(key)
        value, found = build(form, self.here, before, node.seen.get(key, (None, -1))[0])
        if node.kind == "l" and not 0 <= key <= len(node.holder):
            raise BadFrame(f"a state has no place {key}")
        node.write(key, value)
        node.note(key, value, found)
        if isinstance(found, StateNode) or isinstance(before, StateNode):
            self._renumber()

    def grow(self, difference: Any, places: list[tuple[StateNode, Any]]) -> None:
        """Change the sizes and strides of tensors, and numbers, by a difference."""
        if difference[0] != "+m":
            for node, key in places:
                self._put_one(node, key, _sum(node.forms.get(key), difference))
            return
        grown: dict[Form, Form] = {}
        for node, key in places:
            before = node.forms.get(key)
            form = grown.get(before)
            if form is None:
                form = grown[before] = _grown(before, difference)
            value = shadow(form[1], form[2], form[3], self.here)
            if node.kind == "o":
                vars(node.holder)[key] = value
            else:
                node.write(key, value)
            node.forms[key], node.seen[key] = form, (value, 0 if value.is_inference() else value._version)

    def _at(self, path: Path) -> StateNode:
        node: Any = self.root
        for key in path:
            try:
                node = node.forms[key]
            except (KeyError, TypeError):
                raise BadFrame(f"a state has no part {key!r:.40}") from None
            if not isinstance(node, StateNode):
                raise BadFrame(f"{key!r:.40} of a state has no parts")
        assert isinstance(node, StateNode)
        return node

    def renew(self) -> None:
        """Both sides have called the same method of the state, so both know its changes."""
        self.look()
        for node in self._nodes(self.root):
            for key, (value, _) in list(node.seen.items()):
                if type(value) is RemoteTensor and isinstance(value.origin, ResultPart):
                    # a method of a shadow returns a shadow: how it was computed is not recorded
                    _, shape, stride, dtype = node.forms[key]
                    fresh = shadow(shape, stride, dtype, self.here)
                    node.write(key, fresh)
                    node.note(key, fresh, node.forms[key])

    def snapshot(self) -> Snapshot:
        """Return the current contents, to restore if a step fails; cheap, because no tensor is copied."""
        contents = [(node, dict(node.forms), dict(node.seen)) for node in self._nodes(self.root)]
        return Snapshot(self.root, self.nodes_changed, contents)

    def back_to(self, snapshot: Snapshot, gone: list[torch.Tensor] | None = None) -> bool:
        """Restore the state and what is known of it. Returns False if that is impossible; see `Snapshot`."""
        self.root, self.nodes_changed = snapshot.root, snapshot.nodes_changed
        return snapshot.restore([] if gone is None else gone)

    def _nodes(self, node: StateNode) -> list[StateNode]:
        """Return the node and those inside it, at any depth."""
        found = [node]
        for one in found:  # which grows while it is read
            for form in one.forms.values():
                if isinstance(form, StateNode):
                    found.append(form)
        return found

    def forms(self) -> Forms:
        """Return what both sides know of the state now, for comparisons."""
        return [(node, dict(node.forms)) for node in self._nodes(self.root)]

    def real(self) -> list[torch.Tensor]:
        """Return the tensors of the state on this side."""
        found: list[torch.Tensor] = []
        for node in self._nodes(self.root):
            for value, _ in node.seen.values():
                for tensor in value if type(value) is tuple else (value,):
                    if isinstance(tensor, torch.Tensor) and type(tensor) is not RemoteTensor:
                        found.append(tensor)
        return found

    @property
    def has_shadows(self) -> bool:
        """Whether some of its tensors are on the other side."""
        return any(type(value) is RemoteTensor for node in self._nodes(self.root) for value, _ in node.seen.values())

    @property
    def form_bytes(self) -> int:
        """The approximate memory of the form, without the tensors of this side."""
        nodes = sum([NODE_BYTES + ENTRY_BYTES * len(node.forms) for node in self._nodes(self.root)])
        places = [found for one in self._places.values() for _, found in one.all]
        return nodes + PLACE_BYTES * sum(map(len, places))

    def magnitude(self) -> Any:
        """See `remote_tensor.magnitude`: of every size and number in the state."""
        found: list[Any] = []
        for node in self._nodes(self.root):
            found.append(node.cls)
            for key, one in node.forms.items():
                if type(one) is not tuple:  # a node, which is read later
                    found.append(key)
                elif one[0] == "m":
                    found += (key, "m", *map(int.bit_length, one[1]), *map(int.bit_length, one[2]), one[3])
                elif one[0] in ("c", "x") or (one[0] == "v" and type(one[1]) not in NUMBERS):
                    found += (key, one)
                else:
                    found += (key, magnitude(one))
        return tuple(found)

    def _twins(self) -> dict[int, torch.Tensor]:
        """Copies of the tensors of this side by id, sharing memory as the originals do."""
        real = self.real()
        memory = Counter(one.untyped_storage()._cdata for one in {id(one): one for one in real}.values())
        twins: dict[int, torch.Tensor] = {}
        memo: dict[int, Any] = {}
        for one in real:
            if id(one) not in twins:
                alone = memory[one.untyped_storage()._cdata] == 1
                twins[id(one)] = one.clone() if alone else copy.deepcopy(one, memo)
        return twins

    def copied(self) -> Mirror:
        """Return a mirror of a copy of the state, which shares no tensors of this side with it."""
        made = Mirror.__new__(Mirror)
        made._begin(self.here)
        made.root = _copied(self.root, self._twins())
        return made


_numbers = itertools.count(1)


def _real(value: Any) -> list[torch.Tensor]:
    values = value if type(value) is tuple else (value,)
    return [one for one in values if isinstance(one, torch.Tensor) and type(one) is not RemoteTensor]


def _copied(node: StateNode, twins: dict[int, torch.Tensor]) -> StateNode:
    holder = object.__new__(type(node.holder)) if node.kind == "o" else [] if node.kind == "l" else {}
    made = StateNode(node.kind, node.cls, holder)
    for key, form in node.forms.items():
        value = node.seen[key][0]
        if isinstance(form, StateNode):
            inner = _copied(form, twins)
            made.write(key, inner.holder)
            made.note(key, inner.holder, inner)
        else:
            twin = _twin(value, twins)
            made.write(key, twin)
            made.note(key, twin, form)
    return made


def _twin(value: Any, twins: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return value if type(value) is RemoteTensor else twins[id(value)]
    return tuple([_twin(item, twins) for item in value]) if type(value) is tuple else value


# Changes of a state on the wire. Steps of one generation change a state alike: lengths grow by one. They are said as
# differences, and what is said exactly as in the step before is said by ``1``.
#
#     ["+m", shape difference, stride difference]    ["+v", difference] of a number    ["+i", difference] of one integer


AGAIN = 1
DIFFERENCES = ("+m", "+v", "+i")
MOST_MORE = 16
LastSent = Any
"""What one side of a session reported last; the other keeps it, too. None before the first step."""


@dataclass(frozen=True)
class _Places:
    """The places of the values whose growth one `LastSent` describes."""

    sent: LastSent
    nodes_changed: int
    all: list[tuple[Any, list[tuple[StateNode, Any]]]]


def differences(changes: list[Change], known: LastSent) -> tuple[Any, LastSent]:
    """Changes for JSON, and what is known after they were sent. ``known``: what was sent before."""
    groups: dict[Any, tuple[Any, list[Any]]] = {}
    for path, form, before, value in changes:
        if type(form) is tuple and type(before) is tuple and form[0] == before[0] == "m" and form[3] == before[3]:
            shape, stride = tuple(map(operator.sub, form[1], before[1])), tuple(map(operator.sub, form[2], before[2]))
            same_rank = len(form[1]) == len(before[1]) and len(form[2]) == len(before[2])
            difference: Any = ("+m", shape, stride) if same_rank else (OWN_TENSOR, *form[1:])
        else:
            difference = _difference(before, form, value)
        try:
            groups.setdefault(difference, (difference, []))[1].append(path)
        except TypeError:  # a whole object: lists are not hashable
            groups[path] = difference, [path]
    reported = list(groups.values())
    return (AGAIN, known) if reported == known else (reported, reported)


def put_more(mirror: Mirror, known: list[LastSent], header: dict[str, Any]) -> None:
    """Apply what further machines of a chain changed, in order. ``known``: what each reported before. Raises
    BadFrame.
    """
    more = header.get("more", [])
    if not isinstance(more, list) or len(more) > MOST_MORE:
        raise BadFrame("malformed changes of a state by a chain")
    known += [None] * (len(more) - len(known))
    for number, reported in enumerate(more):
        known[number] = mirror.put(known[number], reported)


def _difference(before: Form, form: Form, value: Any) -> Any:
    if before is None or isinstance(before, StateNode) or isinstance(form, StateNode) or before[0] != form[0]:
        return plain(form, value)
    kind = form[0]
    if kind == "v" and type(form[1]) is int and type(before[1]) is int:
        return "+v", form[1] - before[1]
    if kind == "i" and type(form[2]) is int and type(before[2]) is int and before[1] == form[1]:
        return "+i", form[2] - before[2]
    return plain(form, value)


def _grown(before: Form, difference: Any) -> Form:
    if type(before) is not tuple or before[0] != "m":
        raise ValueError("a difference to something else")
    _, more, further = difference
    if len(more) != len(before[1]) or len(further) != len(before[2]):
        raise ValueError("a difference of another length")
    return tensor_form(
        tuple(map(operator.add, before[1], more)), tuple(map(operator.add, before[2], further)), before[3]
    )


def _sum(before: Form, form: Any) -> Any:
    kind = form[0]
    if before is None or isinstance(before, StateNode) or before[0] != kind[1:]:
        raise ValueError("a difference to something else")
    if kind == "+v":
        return "v", before[1] + form[1]
    return "i", before[1], before[2] + form[1]


# Methods of a state that are called between steps by code other than the model: rollback, reordering of beams, copies
# of rows.
#
# They are called on both sides, each on its own tensors: ``[name, arguments]``. Other changes of the caller to the
# Python part of a state are sent: ``["=", changes]``.


MUTATORS = (
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "reorder_cache",
    "reset",
)
MAX_NUMBERS = 65_536


def written(arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments for the wire: numbers as they are, a tensor of integers as a list."""
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in arguments]


def apply(mirror: Mirror, calls: Any, most: int) -> None:
    """Call methods of the state; together they may create ``most`` bytes. Raises TooLarge beyond that, and BadFrame for
    an unknown method, or an index out of range.
    """
    name: Any = ""
    allowance = StepAllowance(most)
    try:
        for name, arguments in calls:
            if name == "=":
                mirror.put(None, arguments)
                continue
            # of the class: an attribute named by a sender is not a method
            method = getattr(type(mirror.state), name, None) if name in MUTATORS else None
            if not isinstance(method, types.FunctionType):
                raise BadFrame(f"a state has no method {name!r:.40}")
            with allowance:
                method(mirror.state, *[_read(one, mirror.here) for one in arguments])
            mirror.renew()
    except BadFrame:
        raise
    except (*MALFORMED, RuntimeError) as error:
        raise BadFrame(f"{name!r:.40} of the state fails: {error!s:.160}") from error


def _read(argument: Any, here: torch.device) -> Any:
    if isinstance(argument, list):
        if len(argument) > MAX_NUMBERS or any(type(one) is not int for one in argument):
            raise BadFrame("malformed call of a state's method")
        return torch.tensor(argument, dtype=torch.int64, device=here)
    if argument is not None and type(argument) not in (int, bool):
        raise BadFrame("malformed call of a state's method")
    return argument


# What a session leaves on a state object: its owner, and the calls on it between steps.
#
# A copy of the state (``copy.deepcopy``: beams, prompts that many answers share) has a handle with the session and
# step that it copies: the next step of either makes it a session of its own.


class Handle:
    """What a session keeps on one state. ``session``: the edge's; a handle without a mirror belongs to a copy not used
    yet.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self.mirror: Mirror | None = None
        self.done: list[Any] = []
        """What was done to the state since the last step, for the wire."""
        self.busy = False
        """Whether a step is in progress: what the model itself does to the state is no call from outside."""
        self.hidden = frozenset({OWN, *MUTATORS})
        self.spoilt = False
        """Whether a failed step has written to the state's tensors."""
        self.fork: Any = None
        """For a copy: what its session continues from."""
        self.growth: Any = None
        """How the state grows with each answer (`ahead.AnswerGrowth`); None if unknown."""
        self.last: Any = None
        """The record of the last step that was not sent ahead."""
        self.misjudged = 0
        """How often the state was foreseen wrongly."""

    def put_on(self, state: Any, here: torch.device) -> None:
        """Attach the handle to a state. Raises CutRefused for a state that is partly elsewhere and belongs to no
        session.
        """
        own = vars(state)
        own[OWN] = self
        for name in MUTATORS:
            if hasattr(type(state), name):
                own[name] = Called(self, state, name)
        self.mirror = Mirror(state, here)
        self.mirror.loosen()

    def opening(self) -> Any:
        """Return for the wire the form of the state in the first step of a session; else None."""
        if self.mirror is None or self.session.number or self.fork is not None:
            return None
        return plain(self.mirror.root, self.mirror.state)

    def take_off(self) -> None:
        """Detach the handle from the state."""
        if self.mirror is not None and self.mirror.state is not None:
            own = vars(self.mirror.state)
            for name in self.hidden:
                if name == OWN or isinstance(own.get(name), Called):
                    own.pop(name, None)

    def note(self) -> None:
        """Add the caller's own changes to `done`. Raises CutRefused for what the other side cannot repeat."""
        assert self.mirror is not None
        changes = self.mirror.look()
        if self.mirror.moved:
            name = ".".join(map(str, self.mirror.moved[0]))
            raise CutRefused(
                f"{name} of the state was changed between two steps, and its tensor is on the other side: use "
                f"methods of the state ({', '.join(MUTATORS)})"
            )
        if changes:
            self.done.append(["=", differences(changes, None)[0]])

    def repeat(self, done: list[Any]) -> None:
        """Apply to the state what was done to another one."""
        for name, arguments in done:
            assert self.mirror is not None
            if name == "=":
                self.mirror.put(None, arguments)
                self.done.append([name, arguments])
            else:
                method = getattr(self.mirror.state, name)
                method(*[torch.tensor(one) if isinstance(one, list) else one for one in arguments])

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        made = Handle(self.session)
        made.done, made.spoilt = list(self.done), self.spoilt
        unused = self.mirror is None  # a copy of a copy that was not used yet
        made.fork = (self.fork if unused else self.session).copied()
        return made


class Called:
    """A method of a state that is called here, and recorded for the other side."""

    def __init__(self, handle: Handle, state: Any, name: str) -> None:
        self._handle = handle
        self._kept = weakref.ref(state)
        self.__name__ = name

    @property
    def _state(self) -> Any:
        return self._kept()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle, method = self._handle, getattr(type(self._state), self.__name__)
        if handle.busy or handle.mirror is None:
            result = method(self._state, *args, **kwargs)
            if not handle.busy:
                handle.done.append([self.__name__, written((*args, *kwargs.values()))])
            return result
        handle.note()
        result = method(self._state, *args, **kwargs)
        handle.done.append([self.__name__, written((*args, *kwargs.values()))])
        handle.mirror.renew()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Called:
        twin = memo.get(id(self._state))
        return Called(copy.deepcopy(self._handle, memo), self._state if twin is None else twin, self.__name__)


def handle_of(state: Any) -> Handle | None:
    """Return the handle on a state, or None."""
    found = vars(state).get(OWN)
    return found if isinstance(found, Handle) else None
