"""Attach observers by name for one forward, and return their records as plain data.

Names are those of `kinds.OBSERVERS`, entry points of the group "isthmus.observers" and, as "module:Class", any class
that makes an `Observer` without arguments. Results are bounded, since they travel with the answer: at most
`MAX_RECORDS` records of each observer and `MAX_BYTES` of JSON in all; omitted records are counted, and pictures are
omitted first.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from shared_hooks.config import looks_like_target, raised, resolve
from shared_hooks.errors import BadFrame, IsthmusError, SpecError, near
from shared_hooks.metrics import Reading
from shared_hooks.observers.base import Observer
from shared_hooks.observers.kinds import OBSERVERS
from shared_hooks.observers.thumbnails import Texts, is_thumbnail
from shared_hooks.wrapped import WrappedModel

GROUP = "isthmus.observers"
"""The group of entry points: name -> factory of an `Observer`."""
MAX_RECORDS = 2000
MAX_BYTES = 512 * 2**10
MAX_IDS = 64
"""Maximum ids per record to be shown as text."""

Observations = dict[str, dict[str, Any]]
"""Name -> records (dictionaries), notes, left_out, failures, last_failure, cost_ns; for attention pictures_left_out."""


def check(names: Iterable[str], folder: Path | None = None) -> tuple[str, ...]:
    """Return the names without repetition; a single string is a list of one. A "module:Class" is imported, from
    ``folder`` (None: the current one) if not installed. Raises SpecError for an unknown one, or one that cannot be
    made.
    """
    found = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
    for name in found:
        _factory(name, folder or Path.cwd())()
    return found


@lru_cache(256)
def _factory(name: str, folder: Path) -> Callable[[], Observer]:
    if name in OBSERVERS:
        return partial(OBSERVERS[name], MAX_RECORDS)
    plugged = {one.name: one for one in entry_points(group=GROUP)}
    known = [*OBSERVERS, *sorted(plugged)]
    if name not in plugged and not looks_like_target(name):
        there = f"There are {', '.join(known)}, and module:Class of your own."
        raise SpecError(f'no observer is called "{name[:80]}".{near(name, known)} {there}')
    try:
        return partial(_made, name, plugged[name].load() if name in plugged else resolve(name, folder, "observer"))
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(f"observer {name}: importing it raised {raised(error)}") from error


def _made(name: str, factory: Callable[[], object]) -> Observer:
    try:
        made = factory()
    except Exception as error:
        raise SpecError(f"observer {name}: making it raised {raised(error)}") from error
    if not isinstance(made, Observer):
        raise SpecError(f"observer {name}: it makes a {type(made).__name__}, and no shared_hooks.observers.Observer")
    return made


@contextmanager
def observing(wrapped: WrappedModel, names: Iterable[str]) -> Iterator[Callable[[], Observations]]:
    """Observe this thread's forwards in the block. Yields a function that returns the results so far.

    An observer without anything to observe in this model says so in its notes.
    """
    made = {name: _factory(name, Path.cwd())() for name in names}
    with ExitStack() as stack:
        for observer in made.values():
            try:
                stack.enter_context(observer.attach(wrapped, this_thread=True))
            except IsthmusError as error:
                observer.notes = (*observer.notes, str(error))
        yield lambda: {name: _found(observer) for name, observer in made.items()}


def _found(observer: Observer) -> dict[str, Any]:
    records = list(observer.records)
    return {
        "records": [_record(record) for record in records[-MAX_RECORDS:]],
        "notes": list(observer.notes),
        "left_out": observer.dropped + max(0, len(records) - MAX_RECORDS),
        "failures": observer.failures,
        "last_failure": observer.last_failure,
        "cost_ns": observer.cost_ns,
    }


def _record(record: Any) -> dict[str, Any]:
    """Return the record as a dictionary with a name, whatever a user's observer records."""
    found = plain(record)
    return {"name": "", **found} if isinstance(found, dict) else {"name": "", "value": found}


def plain(value: Any) -> Any:
    """Convert a record to JSON data; non-finite numbers become text: "nan", "inf", "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Reading):
        return value.as_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not isinstance(getattr(value, field.name), torch.Tensor)
        }
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def to_bytes(found: Observations, most: int = MAX_BYTES) -> bytes:
    """Encode as JSON of at most ``most`` bytes: the last pictures are dropped until it fits; then, if needed, the later
    half of the longest list of records.
    """
    found = {name: dict(one) for name, one in found.items()}
    data = json.dumps(found).encode()
    if len(data) > most and "attention" in found:
        _leave_pictures_out(found["attention"], len(data) - most)
        data = json.dumps(found).encode()
    while len(data) > most:
        longest = max(found.values(), key=lambda one: len(json.dumps(one)))
        keep = len(longest["records"]) // 2
        longest["left_out"] += len(longest["records"]) - keep
        longest["records"] = longest["records"][:keep]
        if not keep:
            longest["notes"] = []
        data = json.dumps(found).encode()
    return data


def _leave_pictures_out(found: dict[str, Any], excess: int) -> None:
    """Drop the last pictures, at least ``excess`` bytes of them if possible, and count them."""
    records = found["records"] = [dict(record) for record in found["records"]]
    gone = 0
    excess += len('"pictures_left_out": , ') + len(str(len(records)))
    for record in reversed(records):
        if excess <= 0:
            break
        if record.get("picture"):
            for key in {"picture", "over"} & record.keys():
                excess -= len(record[key])
                record[key] = ""
            gone += 1
    found["pictures_left_out"] = found.get("pictures_left_out", 0) + gone


def add_token_text(found: Observations, texts: Texts) -> None:
    """Add the ids' text to the records of `tokens`, or a note why there is none."""
    tokens = found.get("tokens", {"records": []})
    for record in tokens["records"]:
        ids = record.get("ids")
        if not isinstance(ids, list) or len(ids) > MAX_IDS or not all(type(one) is int and one >= 0 for one in ids):
            continue
        text, why = texts.of(ids)
        record["text"] = list(text)
        if why and not any(note.startswith("the tokenizer") for note in tokens["notes"]):
            tokens["notes"].append(why)


def from_bytes(data: bytes, names: Collection[str] = tuple(OBSERVERS)) -> Observations:
    """Read `to_bytes`, of the observers ``names``. Raises BadFrame."""
    if not data:
        return {}
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes, of {MAX_BYTES} at most")
        found = json.loads(data, parse_constant=_no_number)
        if not isinstance(found, dict) or not all(name in names and _is_sound(one) for name, one in found.items()):
            raise ValueError("not what observers find")
        for one in found.values():
            pictures = (record.get(key, "") for record in one["records"] for key in ("picture", "over"))
            if not all(picture == "" or is_thumbnail(picture) for picture in pictures):
                raise ValueError("a picture that is no small greyscale PNG")
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"malformed observations: {error}") from error
    return found


def _no_number(word: str) -> None:
    raise ValueError(f"{word}, which JSON does not have")


def _is_sound(one: Any) -> bool:
    return (
        isinstance(one, dict)
        and isinstance(one.get("records"), list)
        and all(isinstance(record, dict) and isinstance(record.get("name"), str) for record in one["records"])
        and isinstance(one.get("notes"), list)
        and all(isinstance(note, str) for note in one["notes"])
        and all(isinstance(one.get(key), int) for key in ("left_out", "failures", "cost_ns"))
        and isinstance(one.get("pictures_left_out", 0), int)
        and isinstance(one.get("last_failure"), str)
    )
