"""Name memory that is not the request's: weights, what others left, what lies beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from studies.attacks.corpus import KEEPER, Recording
from studies.attacks.families import Attack, changed

_NEVER = (1 << 40) - 1


def attacks(recordings: list[Recording]) -> Iterator[Attack]:
    """Yield every attack, for every recording."""
    for recording in recordings:
        yield from _views(recording)
        yield from _weights(recording)
        if recording.model_id == KEEPER and recording.reported["fills"]:
            yield changed(recording, "new memory that nobody fills", _without_fills, fit=True)
            yield changed(recording, "new memory that is filled in part", _part_of_fills, fit=True)


def _views(recording: Recording) -> Iterator[Attack]:
    def slot_without_pieces(reported: dict[str, Any]) -> None:
        for slot in reported["slots"]:
            slot[3] = []

    def larger_storage(reported: dict[str, Any]) -> None:
        for slot in reported["slots"]:
            slot[1] *= 4

    def beyond(reported: dict[str, Any]) -> None:
        for mark in reported["marks"]:
            mark[5] += 1

    def far(reported: dict[str, Any]) -> None:
        for mark in reported["marks"]:
            mark[4] = [1 << 39 for _ in mark[4]]

    def negative(reported: dict[str, Any]) -> None:
        for mark in reported["marks"]:
            mark[4] = [-stride for stride in mark[4]]

    def overlapping(reported: dict[str, Any]) -> None:
        for mark in reported["marks"]:
            mark[4] = [1 for _ in mark[4]]
        for slot in reported["slots"]:
            slot[2] = True

    def one_element(reported: dict[str, Any]) -> None:
        for mark in reported["marks"]:
            mark[4] = [0 for _ in mark[4]]

    def flags(reported: dict[str, Any]) -> None:
        for mark in reported["marks"]:
            mark[7] = "cn"

    yield changed(recording, "slots without pieces", slot_without_pieces, fit=True)
    yield changed(recording, "storages larger than their pieces", larger_storage, fit=True)
    yield changed(recording, "views one element beyond", beyond)
    yield changed(recording, "strides of 2^39", far)
    yield changed(recording, "negative strides", negative)
    yield changed(recording, "overlapping strides", overlapping)
    yield changed(recording, "one element seen as a tensor", one_element)
    yield changed(recording, "conjugated and negated", flags)
    for dtype in ("qint8", "quint4x2", "bits8", "int4", "float8_e4m3fn", "complex32", "uint64", "bool"):

        def other_slot(reported: dict[str, Any], dtype: str = dtype) -> None:
            for slot in reported["slots"]:
                slot[0] = dtype

        def other_mark(reported: dict[str, Any], dtype: str = dtype) -> None:
            for mark in reported["marks"]:
                mark[6] = dtype

        def both(reported: dict[str, Any], dtype: str = dtype) -> None:
            other_slot(reported, dtype)
            other_mark(reported, dtype)

        yield changed(recording, f"slots of {dtype}", other_slot)
        yield changed(recording, f"slots seen as {dtype}", other_mark)
        yield changed(recording, f"all of {dtype}", both, fit=True)

    def truth_and_numbers(reported: dict[str, Any]) -> None:
        if len(reported["marks"]) > 1:
            first, *rest = reported["marks"]
            for mark in rest:
                mark[2], mark[6] = first[2], "bool"

    yield changed(recording, "numbers seen as truth values", truth_and_numbers)


def _weights(recording: Recording) -> Iterator[Attack]:
    def fills(number: int) -> Any:
        def change(reported: dict[str, Any]) -> None:
            places = [mark[0] for mark in reported["marks"]] + [given[0] for given in reported["given"]]
            reported["fills"] = [[place, number, 0] for place in places if place[2] >= 0]
            reported["slots"][0][2] = True

        return change

    for number in range(3):
        yield changed(recording, f"fill of argument {number}", fills(number))

    def through(number: int) -> Any:
        def change(reported: dict[str, Any]) -> None:
            for given in reported["given"]:
                given[3] = [number for _ in given[3]]

        return change

    def writing(reported: dict[str, Any]) -> None:
        for given in reported["given"]:
            given[4] = [0, 1, 2]

    if recording.reported["given"]:
        for number in (0, 1, 2, _NEVER):
            yield changed(recording, f"argument {number} handed through", through(number))
        yield changed(recording, "given results that write", writing)

    def given_for_all(reported: dict[str, Any]) -> None:
        shape = [2, 8]
        reported["given"] += [
            [[path, 1, index], name, ["t", 0], [[shape, [8, 1], "float32"]], [1]]
            for path in ("", "(model)", "first", "second", "stem.0", "table")
            for index in range(3)
            for name in ("linear", "conv2d", "embedding", "add", "relu", "arange", "empty", "rand")
        ]

    yield changed(recording, "given results of what can be worked out", given_for_all)


def _without_fills(reported: dict[str, Any]) -> None:
    gone = {fill[2] for fill in reported["fills"]}
    reported["fills"] = []
    kept = [number for number in range(len(reported["slots"])) if number not in gone]
    reported["slots"] = [reported["slots"][number] for number in kept]
    reported["marks"] = [[*mark[:2], kept.index(mark[2]), *mark[3:]] for mark in reported["marks"] if mark[2] in kept]


def _part_of_fills(reported: dict[str, Any]) -> None:
    for fill in reported["fills"]:
        reported["slots"][fill[2]][3] = [[[1], [1], 0]]
