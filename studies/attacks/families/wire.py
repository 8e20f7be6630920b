"""The frames themselves: old protocol, order, sizes, states of generators, JSON that is none."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import torch

from protos.isthmus.v1 import split_pb2
from shared_hooks.crossing.description import digest_of
from studies.attacks.corpus import Recording
from studies.attacks.families import Attack
from studies.attacks.shots import Shot, padded

RECIPE = {"format": 1, "signature": "s", "plan": "p", "steps": [["give", "conv2d", [["real", 1]]]], "slots": []}


def attacks(recordings: list[Recording]) -> Iterator[Attack]:
    """Raw frames on one model each, and parcels of every recording."""
    for data in (
        json.dumps(RECIPE).encode(), b"", b"[]", b"null", b"[" * 100_000, b'{"format":2}', b"\xff" * 100, b"1" * 5000,
        b'{"format":2,"cut":' + b"[" * 900 + b"]" * 900 + b"}", json.dumps([[]] * 300_000).encode(),
    ):  # fmt: skip
        upload = split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=digest_of(data), data=data))
        yield Attack(f"a description that is {data[:12]!r}", recordings[0].model_id, frames=[upload])
    yield from _orders(recordings[0])
    for recording in recordings:
        if recording.reported["generators"]:
            yield from _states(recording)
        for name, body in _BODIES.items():
            for opened in (False, True):
                shot = Shot.of(recording)
                shot.body, shot.opened = body(shot.body), opened
                how = ", opened" if opened else ""
                yield Attack(f"{name} at {recording.reported['cut'][1]}{how}", recording.model_id, shot)
        shot = Shot.of(recording)
        shot.opened, shot.fields = True, {"payload_bytes": 1 << 62}
        yield Attack(f"opened for all that there is at {recording.reported['cut'][1]}", recording.model_id, shot)


def _orders(recording: Recording) -> Iterator[Attack]:
    cut, request, *chunks = Shot.of(recording).frames(7)
    shot = Shot.of(recording)
    shot.opened = True
    _, opened, *pieces, closing = shot.frames(7)
    hello = split_pb2.ClientFrame(hello=split_pb2.Hello(protocol_version=1, client_id="old"))
    for name, frames in {
        "a second hello": [hello],
        "a chunk before its request": chunks,
        "a request twice": [cut, request, request],
        "chunks twice": [cut, request, *chunks, *chunks],
        "closed before it is announced": [cut, closing],
        "closed before its payload": [cut, opened, closing, *pieces],
        "closed twice": [cut, opened, *pieces, closing, closing],
        "opened twice": [cut, opened, opened, *pieces, closing],
        "opened, then announced whole": [cut, opened, request, *chunks, closing],
        "announced whole, then closed": [cut, request, closing, *chunks],
        "opened and left": [cut, opened, *pieces],
        "an unknown frame": [split_pb2.ClientFrame()],
        "cancel of nothing": [split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=1 << 60))],
        "acknowledged": [split_pb2.ClientFrame(acknowledge=split_pb2.Acknowledge(ids=range(10_000)))],
    }.items():
        yield Attack(name, recording.model_id, frames=list(frames))


def _states(recording: Recording) -> Iterator[Attack]:
    honest = torch.get_rng_state().numpy().tobytes()
    beyond = bytearray(honest)
    struct.pack_into("<i", beyond, 8, 624)
    struct.pack_into("<Q", beyond, 16, 624)
    numpy = json.dumps([[1] * 624, 50_000_000, 0, 0.0]).encode()
    for name, generators, states in (
        ("torch's state beyond its words", ["torch"], [bytes(beyond)]),
        ("torch's state of no bytes", ["torch"], [b""]),
        ("torch's state of ones", ["torch"], [b"\xff" * len(honest)]),
        ("NumPy's state beyond its words", ["torch", "numpy"], [honest, numpy]),
        ("Python's state of nonsense", ["torch", "python"], [honest, b"[3, [1, 2], null]"]),
        ("a state of a megabyte", ["torch"], [bytes(1 << 20)]),
    ):
        shot = Shot.of(recording)
        shot.reported = {**shot.reported, "generators": generators}
        sections: list[Any] = []
        at = 0
        for entry in shot.body["sections"][:-1]:
            sections.append((entry[1], entry[2], shot.payload[at : at + entry[4]]))
            at += -(-entry[4] // 64) * 64
        shot.carry(*padded(sections + [("uint8", [len(state)], state) for state in states]))
        yield Attack(name, recording.model_id, shot)


def _every(index: int, value: Any) -> Any:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        sections = [[*entry[:index], value, *entry[index + 1 :]] for entry in body["sections"]]
        return {**body, "sections": sections}

    return change


_BODIES: dict[str, Any] = {
    "quantised sections": _every(1, "qint8"),
    "sections of 2^47": _every(2, [1 << 47]),
    "sections of another codec": _every(0, "lz4"),
    "sections without a checksum": _every(5, None),
    "no sections": lambda body: {**body, "sections": []},
    "60,000 sections": lambda body: {**body, "sections": body["sections"] * 60_000},
    "a header of another version": lambda body: {**body, "v": 2},
    "a header that is a list": lambda body: [body],
    "starts beyond": lambda body: {**body, "meta": ["", [], [63] * 100]},
    "values of 500 levels": lambda body: {**body, "meta": ["", json.loads("[" * 500 + "]" * 500), []]},
}
