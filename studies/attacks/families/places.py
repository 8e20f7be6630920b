"""Steps, places, layers and values that are not, or that belong to another cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from studies.attacks.corpus import Recording
from studies.attacks.families import Attack, changed


def attacks(recordings: list[Recording]) -> Iterator[Attack]:
    """Yield the attacks for every recording; parts of others come from the recording before it."""
    for before, recording in zip([recordings[-1], *recordings], recordings, strict=False):
        for key in ("slots", "marks", "fills", "given", "reads", "layouts", "path", "context", "inputs", "cut"):

            def swapped(reported: dict[str, Any], key: str = key, other: dict[str, Any] = before.reported) -> None:
                reported[key] = other[key]

            yield changed(
                recording, f"{key} of {before.model_id} {before.reported['cut'][1]}", swapped, fit=key == "slots"
            )
        for name, change in _CHANGES.items():
            yield changed(recording, name, change)


def _swapped_marks(reported: dict[str, Any]) -> None:
    marks = reported["marks"]
    for one, other in zip(marks, reversed(marks), strict=True):
        one[2] = other[2]


def _all(key: str, index: int, value: Any) -> Any:
    def change(reported: dict[str, Any]) -> None:
        for entry in reported[key]:
            entry[index] = value

    return change


def _set(key: str, value: Any) -> Any:
    def change(reported: dict[str, Any]) -> None:
        reported[key] = value

    return change


_CHANGES: dict[str, Any] = {
    "marks swapped": _swapped_marks,
    "marks at a place that is not": _all("marks", 0, ["nowhere", 1, 0]),
    "marks at place 2^39": _all("marks", 0, ["", 1 << 39, 1 << 39]),
    "marks of leaf 2^39": _all("marks", 1, 1 << 39),
    "marks all at the input": _all("marks", 0, ["", 0, -1]),
    "given of another name": _all("given", 1, "relu_"),
    "given structure": _all("given", 2, ["data", "studies.attacks.models:Options", []]),
    "given number": _all("given", 2, ["v", 10**30]),
    "layer 10^6": _set("cut", [10**6, "stem.0"]),
    "layer of another name": _set("cut", [1, "stage3.1.relu"]),
    "no layer": _set("cut", [-1, "first"]),
    "depth 1": _set("depth", 1),
    "depth -1": _set("depth", -1),
    "autocast of integers": _set("context", {"autocast": [["cpu", "int64"]], "environment": {}, "training": []}),
    "context of another kind": _set("context", {"autocast": 5, "environment": [], "training": None}),
    "generators of all kinds": _set("generators", ["torch", "python", "numpy"]),
    "a generator many times": _set("generators", ["torch"] * 60_000),
    "reads that nobody brings": _set("reads", [[["", 1, 0], "int", ["v", "int"]]] * 100),
    "layouts of 2^39": _set("layouts", [[["", 1, n], 0, [1 << 39, 1 << 39]] for n in range(20)]),
}
