"""What a model's digests are made of, in words: asked for only where the digests of two sides differ.

A manifest is flat, one entry for each fact, so that hostile bytes cannot make more of it than they are. Releases of
torch store the same module in different ways, so a fact that one side alone knows is a *note* where it cannot change a
result: an attribute with the value that the constructor takes by default, or one that a module of torch makes of
others. Everything else that differs is a *difference*.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from shared_hooks.errors import BadFrame, TooLarge
from shared_hooks.modules import agreement

MAX_BYTES: Final = 1 << 20
"""Of a manifest on its way."""
MAX_TEXT: Final = 8 << 20
"""... as characters. A model of a thousand modules has some 300,000."""
MAX_ENTRIES: Final = 100_000
SHOWN: Final = 4
"""Names of tensors with other values, in one line."""

Fact = tuple[str, str, str]
"""Kind, path of the module (of ``code``: the class; of ``operation``: its number), name."""
Manifest = Mapping[Fact, str]

SET, USUAL, MADE = "set", "usual", "made"
"""Attributes: with a value of their own; with the constructor's default; no argument of it, in a module of torch."""
KIND, TENSOR, CODE, OPERATION = "class", "tensor", "code", "operation"
_KINDS: Final = frozenset({SET, USUAL, MADE, KIND, TENSOR, CODE, OPERATION})
_ATTRIBUTE: Final = "attribute"
_FIELD, _ENTRY = "\x1f", "\x1e"


def manifest(
    model: nn.Module,
    attributes: Mapping[str, Mapping[str, Any]],
    depth: int | None = None,
    operations: Iterable[str] = (),
) -> dict[Fact, str]:
    """All that both sides must agree on. ``attributes``: by path, from before the first forward
    (`agreement.attributes`); ``depth``: of the hierarchy; ``operations``: of the plan on the example.
    """
    found: dict[Fact, str] = {(SET, "", "depth of layers"): repr(depth)}
    for path, module in model.named_modules():
        kind = type(module)
        found[KIND, path, ""] = kind.__name__
        found[CODE, kind.__qualname__, ""] = agreement.source_digest(kind)
        usual = _defaults(kind)
        for name, value in attributes.get(path, {}).items():
            found[_sort(kind, name, value, usual), path, name] = repr(value)
    for name, value in agreement.state_of(model):
        path, _, last = name.rpartition(".")
        found[TENSOR, path, last] = " ".join(map(str, (*agreement.form_of(value), agreement.tensor_hash(value))))
    for number, name in enumerate(operations):
        found[OPERATION, str(number), ""] = name
    return found


def _sort(kind: type, name: str, value: Any, usual: Mapping[str, Any]) -> str:
    if name in usual:
        return USUAL if _same(usual[name], value) else SET
    return MADE if agreement.is_torchs(kind) else SET


def _defaults(kind: type) -> dict[str, Any]:
    """Of the constructor's arguments."""
    try:
        return {one.name: one.default for one in inspect.signature(kind).parameters.values()}
    except (TypeError, ValueError):
        return {}


def _same(default: Any, value: Any) -> bool:
    if isinstance(value, tuple) and value and not isinstance(default, tuple):
        return all(_same(default, one) for one in value)  # a stride of 1 is kept as (1, 1)
    return type(default) is type(value) and bool(default == value)


@dataclass(frozen=True)
class Comparison:
    """``differences`` may change a result; ``notes`` cannot. Each is a line that names module and values."""

    differences: tuple[str, ...]
    notes: tuple[str, ...]


def compare(client: Manifest, server: Manifest) -> Comparison:
    """What differs, the first module first."""
    differences: list[str] = []
    notes: list[str] = []
    mine, theirs = _by_place(client), _by_place(server)
    planned = all(any(place[0] == OPERATION for place in side) for side in (mine, theirs))
    weights: list[str] = []
    others = {place[1] for place in {**theirs, **mine} if place[0] == KIND and mine.get(place) != theirs.get(place)}
    for place in sorted({**theirs, **mine}, key=lambda one: one[0] == OPERATION):  # which come last
        if place[0] == OPERATION and not planned:
            break  # a side without an example has no plan
        there, here = mine.get(place), theirs.get(place)
        if there is not None and here is not None and there[1] == here[1]:
            continue
        one_sided = here if there is None else there if here is None else None
        if place[0] in (_ATTRIBUTE, TENSOR) and place[1] in others:
            continue  # its module is another one, which is told
        if place[0] == CODE and one_sided and others:
            continue  # so is its class
        text = _told(place, there, here)
        if place[0] == TENSOR and there and here and there[1].split("]")[0] == here[1].split("]")[0]:
            weights.append(".".join(filter(None, place[1:])))
            continue
        if one_sided is not None and one_sided[0] in (USUAL, MADE):
            notes.append(text)
        else:
            differences.append(text)
            if place[0] == OPERATION:
                break  # those after it are shifted
    if weights:  # all of them, where one side has another file
        shown = ", ".join(weights[:SHOWN]) + (f" and {len(weights) - SHOWN} more" if len(weights) > SHOWN else "")
        differences.insert(0, f"weights: other values in {printable(shown)}")
    return Comparison(tuple(differences), tuple(notes))


def printable(text: str) -> str:
    """What the other side wrote stands in logs: it may not begin a line there."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _by_place(facts: Manifest) -> dict[Fact, tuple[str, str]]:
    """What sort of attribute it is may differ: another release has another default."""
    found = {}
    for (kind, path, name), value in facts.items():
        place = _ATTRIBUTE if kind in (SET, USUAL, MADE) else kind
        found[place, path, name] = kind, value
    return found


def _told(place: Fact, client: tuple[str, str] | None, server: tuple[str, str] | None) -> str:
    kind, path, name = place
    where = path or "(model)"
    what = {
        _ATTRIBUTE: f"{where}: {name}",
        KIND: f"{where}: class",
        TENSOR: f"{where}: the tensor {name}",
        CODE: f"code of {where}",
        OPERATION: f"operation {path} of the plan",
    }[kind]
    return printable(f"{what}: client {_value(client)}, server {_value(server)}")


def _value(found: tuple[str, str] | None) -> str:
    return "has none" if found is None else found[1][:80]


def encode(facts: Manifest) -> bytes | None:
    """As it goes over the wire; None for one that is too large for that."""
    lines = [_FIELD.join((*fact, value)) for fact, value in facts.items()]
    if len(lines) > MAX_ENTRIES or any(line.count(_FIELD) != 3 or _ENTRY in line for line in lines):
        return None
    text = _ENTRY.join(lines)
    data = zlib.compress(text.encode())
    return data if len(data) <= MAX_BYTES and len(text) <= MAX_TEXT else None


def decode(data: bytes) -> dict[Fact, str]:
    """Raises BadFrame and TooLarge."""
    if len(data) > MAX_BYTES:
        raise TooLarge(f"a manifest of {len(data)} bytes; at most {MAX_BYTES} are taken")
    unpacked = zlib.decompressobj()
    try:
        raw = unpacked.decompress(data, MAX_TEXT + 1)
        text = raw.decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise BadFrame(f"a manifest that cannot be read: {error!s:.80}") from None
    if len(raw) > MAX_TEXT:
        raise TooLarge(f"a manifest of more than {MAX_TEXT} characters")
    if text.count(_ENTRY) >= MAX_ENTRIES:
        raise TooLarge(f"a manifest of more than {MAX_ENTRIES} entries")
    found: dict[Fact, str] = {}
    for line in text.split(_ENTRY):
        fields = line.split(_FIELD, 4)
        if len(fields) != 4 or fields[0] not in _KINDS:
            raise BadFrame("a manifest with an entry that is none")
        found[fields[0], fields[1], fields[2]] = fields[3]
    return found
