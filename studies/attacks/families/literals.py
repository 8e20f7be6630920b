"""Inputs that are no inputs: huge numbers, odd literals, classes, depth, arguments that the model does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from studies.attacks.corpus import READER, Recording
from studies.attacks.families import Attack, changed, refit
from studies.attacks.shots import Shot

OPTIONS = "studies.attacks.models:Options"
MOOD = "studies.attacks.models:Mood"
_DEEP: list[Any] = ["t", 0]
for _ in range(300):
    _DEEP = ["list", [_DEEP]]
_LITERALS: tuple[Any, ...] = (
    ["v", 10**40], ["v", -1], ["v", float("nan")], ["v", {"a": []}], ["v", [[[]]]], ["t", -1], ["t", 999], ["t", "0"],
    ["x", "device", "cuda:99"], ["x", "device", "meta"], ["x", "dtype", "qint8"], ["x", "slice", [1 << 62, None, 0]],
    ["x", "size", [10**30]], ["x", "complex", [10**400, 0]], ["x", "complex", []], ["x", "nothing", None], _DEEP,
    ["enum", MOOD, "__members__"], ["enum", OPTIONS, "scale"],
    ["map", OPTIONS, [["rounds", ["v", 1]]]],
    ["named", OPTIONS, [["v", 1]]], ["named", MOOD, [["v", 1]]], ["data", "torch.nn:Linear", []],
    ["data", "studies.attacks.models:torch.utils.data.DataLoader", []],
    ["data", "studies.attacks.models:enum.Flag", []],
    ["data", OPTIONS, [["__class__", ["v", 1]]]], ["data", OPTIONS, [["__dict__", ["dict", []]]]],
    ["data", OPTIONS, [["rounds", ["v", 1 << 40]], ["scale", ["v", 1.0]], ["mood", ["v", 1]]]],
    ["data", OPTIONS, [["rounds", ["v", -5]], ["scale", ["t", 0]]]], ["dict", [[["list", []], ["v", 1]]]],
    ["named", "torch.return_types:max", [["t", 0]]], ["named", "torch.return_types:max", []],
)  # fmt: skip


def attacks(recordings: list[Recording]) -> Iterator[Attack]:
    """Literals in the place of each argument, and as one more; values and sizes in the parcel's header."""
    for recording in recordings:
        for number, literal in enumerate(_LITERALS):

            def replaced(reported: dict[str, Any], literal: Any = literal) -> None:
                reported["inputs"][0][1][0][1][0] = literal

            def added(reported: dict[str, Any], literal: Any = literal) -> None:
                reported["inputs"][0][1][1][1] = [[["v", "options"], literal]]

            yield changed(recording, f"literal {number} as an argument", replaced)
            yield changed(recording, f"literal {number} as options", added)
        for name in ("nobody", "", "self", "\ud800"):

            def unknown(reported: dict[str, Any], name: str = name) -> None:
                reported["inputs"][0][1][1][1] = [[["v", name], ["v", 1]]]

            yield changed(recording, f"an argument called {name!r}", unknown)
        yield from _sizes(recording)
        yield from _values(recording)


def _sizes(recording: Recording) -> Iterator[Attack]:
    """Batches of 2^16, 2^31 and 2^39 out of the bytes that were sent, and shapes whose product overflows."""
    for batch in (1 << 16, 1 << 31, 1 << 39):

        def large(reported: dict[str, Any], batch: int = batch) -> None:
            for form in reported["inputs"][1]:
                form[0][0], form[1][0] = batch, 0
            for mark in reported["marks"]:
                mark[3][:1], mark[4][:1] = [batch], [0]

        yield changed(recording, f"a batch of {batch}", large)

    def overflow(reported: dict[str, Any]) -> None:
        for form in reported["inputs"][1]:
            form[0], form[1] = [0, 1 << 39, 1 << 39], [0, 1 << 39, 1]

    def rank(reported: dict[str, Any]) -> None:
        for form in reported["inputs"][1]:
            form[0], form[1] = [1] * 32, [1] * 32

    yield changed(recording, "no elements of 2^78", overflow)
    yield changed(recording, "rank 32", rank)


def _values(recording: Recording) -> Iterator[Attack]:
    for value in (10**30, -(10**30), 1 << 62, 1 << 33, 100_000_000, -1, 1e308):
        shot = Shot.of(recording)
        if not recording.reported["reads"]:
            refit(shot, b"\x7e")  # numbers of 10^38: what the tail reads from them
            yield Attack("numbers of 10^38", recording.model_id, shot)
            return
        shot.body["meta"] = ["", [["v", value] for _ in recording.reported["reads"]], []]
        yield Attack(f"the value {value:g} read before {recording.reported['cut'][1]}", recording.model_id, shot)
    if recording.model_id == READER:
        shot = Shot.of(recording)
        shot.raw = json.dumps({**shot.reported, "context": "["}).encode()
        yield Attack("a context that is text", recording.model_id, shot)
