"""The facts behind a model's digests, as text: needed only if the digests of two sides differ.

A manifest is flat, with one entry per fact, so that hostile bytes cannot inflate it. Releases of torch store the same
module in different ways, so an attribute that torch's own code keeps, with its constructor's default value, is a *note*
if only one side has it. Every other difference is a *difference*.
"""

from __future__ import annotations

import functools
import inspect
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from shared_hooks.errors import BadFrame, TooLarge
from shared_hooks.modules.constants import Word, assigned_by, form_of, source_digest, state_of, tensor_hash
from shared_hooks.modules.tables import Tables, compared

MAX_BYTES: Final = 1 << 20
"""Most bytes of a manifest on the wire."""
MAX_TEXT: Final = 8 << 20
"""Most bytes unpacked. A model of a thousand modules has about 300,000."""
MAX_ENTRIES: Final = 100_000
TIMES: Final = 4
"""Most entries and bytes of a manifest, relative to the one that it is compared with, plus the spare ones: models that
differ more have little in common.
"""
SPARE_ENTRIES: Final = 1000
SPARE_BYTES: Final = 64 << 10
MAX_DIFFERENCES: Final = 16
"""The number of differences that are named; one more line says that there are more."""
MAX_NOTES: Final = 32
MAX_LINE: Final = 300
"""Most characters of a line."""
SHOWN: Final = 4
"""The number of names of tensors with other values in one line."""

Fact = tuple[str, str, str]
"""(kind, path of the module (for ``code``: the class; for ``operation``: its number), name)."""
Manifest = Mapping[Fact, str]

SET, USUAL, HELD = "set", "usual", "held"
"""Kinds of attributes: with a value of its own; kept by torch's own code, with its constructor's default; and what one
side alone may have without harm.
"""
KIND, TENSOR, TABLE, CODE, OPERATION = "class", "tensor", "table", "code", "operation"
_KINDS: Final = frozenset({SET, USUAL, HELD, KIND, TENSOR, TABLE, CODE, OPERATION})
_ATTRIBUTE: Final = "attribute"
_FIELD, _ENTRY = "\x1f", "\x1e"


def manifest(
    model: nn.Module,
    attributes: Mapping[str, Mapping[str, Any]],
    depth: int | None = None,
    operations: Iterable[str] = (),
    tables: Tables | None = None,
    held: Mapping[str, str] = MappingProxyType({}),
) -> dict[Fact, str]:
    """Return all facts that both sides must agree on. ``attributes``: by path, from before the first forward
    (`constants.attributes`), as ``tables`` (`tables.tables`); ``depth``: of the hierarchy; ``operations``: of the plan
    on the example; ``held``: numbers in code.
    """
    found: dict[Fact, str] = {(SET, "", "depth of layers"): repr(depth)}
    for path, module in model.named_modules():
        kind = type(module)
        found[KIND, path, ""] = kind.__name__
        found[CODE, kind.__qualname__, ""] = source_digest(kind)
        usual: Mapping[str, Any] = _usual(kind)  # type: ignore[arg-type]  # mypy: a class is not hashable
        for name, value in attributes.get(path, {}).items():
            sort = USUAL if name in usual and _same(usual[name], value) else SET
            if isinstance(value, Word) or "." in name:  # the other side may have another object there
                sort = HELD
            found[sort, path, name] = repr(value)
    for name, value in state_of(model):
        path, _, last = name.rpartition(".")
        found[TENSOR, path, last] = " ".join(map(str, (*form_of(value), tensor_hash(value))))
    for (path, name), reported in (tables or {}).items():
        found[TABLE, path, name] = reported
    found |= {(HELD, "", name): text for name, text in held.items()}
    for number, name in enumerate(operations):
        found[OPERATION, str(number), ""] = name
    return found


@functools.lru_cache(maxsize=1024)
def _usual(kind: Any) -> Mapping[str, Any]:
    """Return the defaults of the constructor of this class, or of the first of torch's that it is derived from, for
    arguments that torch's own code keeps under their names. Attributes set by others may mean anything.
    """
    torchs = [one for one in kind.__mro__ if one is not nn.Module and one.__module__.partition(".")[0] == "torch"]
    if not torchs:
        return {}
    kept = {name for one in torchs for name in _kept_by(one)}
    try:
        arguments = inspect.signature(torchs[0]).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {one.name: one.default for one in arguments if one.name in kept and one.default is not one.empty}


def _kept_by(kind: type) -> Iterator[str]:
    """Return the names of attributes that the functions of a class assign to."""
    return (name for one in vars(kind).values() if isinstance(one, types.FunctionType) for name in assigned_by(one))


def _same(default: Any, value: Any) -> bool:
    if isinstance(value, tuple) and value and not isinstance(default, tuple):
        return all(_same(default, one) for one in value)  # a stride of 1 is kept as (1, 1)
    return type(default) is type(value) and repr(default) == repr(value)


@dataclass(frozen=True)
class ManifestComparison:
    """``differences`` may change a result; ``notes`` cannot; ``rounding`` may change its last bits. Each is a line that
    names module and values.
    """

    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rounding: tuple[str, ...] = ()


def compare(client: Manifest, server: Manifest) -> ManifestComparison:
    """Return the differences, the first module first: at most `MAX_DIFFERENCES` and one more, and `MAX_NOTES`."""
    mine, theirs = _by_place(client), _by_place(server)
    differences = list(_other_values(mine, theirs))
    notes: list[str] = []
    rounding: list[str] = []
    for place, there, here in _unequal(mine, theirs):
        if len(differences) > MAX_DIFFERENCES:
            break
        if place[0] == TABLE and there and here:
            found = compared(there[1], here[1])
            lines = differences if not found.alike else rounding
            if len(lines) <= MAX_NOTES:
                lines.append(_difference_line(place, (TABLE, found.client), (TABLE, found.server)))
            continue
        sorts, values = (set(one) for one in zip(*filter(None, (here, there)), strict=True))
        one_sided = here is None or there is None
        if not (one_sided and sorts <= {USUAL, HELD}):
            differences.append(_difference_line(place, there, here))
            if place[0] == OPERATION:
                break  # those after it are shifted
        elif len(notes) < MAX_NOTES and not (sorts == {HELD} and "None" in values):
            notes.append(_difference_line(place, there, here))
    return ManifestComparison(tuple(differences), tuple(notes), tuple(rounding[:MAX_NOTES]))


Value = tuple[str, str]
"""(kind of attribute, or the kind again; the value)."""


def _unequal(
    mine: Mapping[Fact, Value], theirs: Mapping[Fact, Value]
) -> Iterator[tuple[Fact, Value | None, Value | None]]:
    """Yield the places whose facts differ, without those that follow from others; the plan's operations come last."""
    # otherwise one of them has no example
    planned = all(any(place[0] == OPERATION for place in side) for side in (mine, theirs))
    others = {place[1] for place in {**theirs, **mine} if place[0] == KIND and mine.get(place) != theirs.get(place)}
    for last in (False, True) if planned else (False,):
        for place in {**theirs, **mine}:
            there, here = mine.get(place), theirs.get(place)
            if (place[0] == OPERATION) is not last or (there and there[1]) == (here and here[1]):
                continue
            if place[0] in (_ATTRIBUTE, TENSOR, TABLE) and place[1] in others:
                continue  # its module is another one, which is reported
            if place[0] == CODE and others and (there is None or here is None):
                continue  # so is its class
            if not _is_other_value(place, there, here):
                yield place, there, here


def _other_values(mine: Mapping[Fact, Value], theirs: Mapping[Fact, Value]) -> Iterator[str]:
    """Yield one line for all tensors of the same form with other values: with another weights file, all of
    them differ.
    """
    names = [place[1:] for place, here in theirs.items() if _is_other_value(place, mine.get(place), here)]
    if names:
        shown = ", ".join(".".join(filter(None, name))[:MAX_LINE] for name in names[:SHOWN])
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"weights: other values in {printable(shown)}{more}"


def _is_other_value(place: Fact, there: Value | None, here: Value | None) -> bool:
    if place[0] != TENSOR or there is None or here is None or there == here:
        return False
    return there[1].split("]")[0] == here[1].split("]")[0]


def printable(text: str) -> str:
    """Return the other side's text for logs, without line breaks."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _by_place(facts: Manifest) -> dict[Fact, Value]:
    """Return the facts by place: the kind of an attribute may differ, because another release has another default."""
    found = {}
    for (kind, path, name), value in facts.items():
        place = _ATTRIBUTE if kind in (SET, USUAL, HELD) else kind
        found[place, path, name] = kind, value
    return found


def _difference_line(place: Fact, client: Value | None, server: Value | None) -> str:
    kind, (path, name) = place[0], (text[: MAX_LINE // 3] for text in place[1:])
    where = path or "(model)"
    what = {
        _ATTRIBUTE: f"{where}: {name}",
        KIND: f"{where}: class",
        TENSOR: f"{where}: the tensor {name}",
        TABLE: f"{where}: the table {name}",
        CODE: f"code of {where}",
        OPERATION: f"operation {path} of the plan",
    }[kind]
    return printable(f"{what}: client {_value(client)}, server {_value(server)}"[:MAX_LINE])


def _value(found: Value | None) -> str:
    return "has none" if found is None else found[1][: MAX_LINE // 6]


def encode(facts: Manifest) -> bytes | None:
    """Return the manifest for the wire; None if it is too large."""
    lines = [_FIELD.join((*fact, value)) for fact, value in facts.items()]
    if len(lines) > MAX_ENTRIES or any(line.count(_FIELD) != 3 or _ENTRY in line for line in lines):
        return None
    raw = _ENTRY.join(lines).encode("utf-8", "replace")
    data = zlib.compress(raw)
    return data if len(data) <= MAX_BYTES and len(raw) <= MAX_TEXT else None


def decode(data: bytes, like: Manifest | None = None) -> dict[Fact, str]:
    """Return the manifest in ``data``. ``like``: the one to compare it with. Raises BadFrame, and TooLarge before it is
    decoded.
    """
    most_entries, most = MAX_ENTRIES, MAX_TEXT
    if like is not None:
        most_entries = min(most_entries, TIMES * len(like) + SPARE_ENTRIES)
        most = min(
            most, TIMES * sum(len(text) + 1 for fact in like.items() for text in (*fact[0], fact[1])) + SPARE_BYTES
        )
    if len(data) > MAX_BYTES:
        raise TooLarge(f"a manifest of {len(data)} bytes; at most {MAX_BYTES} are taken")
    unpacked = zlib.decompressobj()
    try:
        raw = unpacked.decompress(data, most + 1)
    except zlib.error as error:
        raise BadFrame(f"a manifest that cannot be read: {error!s:.80}") from None
    if len(raw) > most:
        raise TooLarge(f"a manifest of more than {most} bytes")
    if raw.count(_ENTRY.encode()) >= most_entries:
        raise TooLarge(f"a manifest of more than {most_entries} entries")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise BadFrame(f"a manifest that cannot be read: {error!s:.80}") from None
    found: dict[Fact, str] = {}
    for line in text.split(_ENTRY):
        fields = line.split(_FIELD, 4)
        if len(fields) != 4 or fields[0] not in _KINDS:
            raise BadFrame("a manifest with an entry that is none")
        found[fields[0], fields[1], fields[2]] = fields[3]
    return found
