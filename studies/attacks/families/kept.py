"""What a server keeps for others: lines, uploads, generators, lists of ids, files. Found by reading its source."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import torch

from protos.isthmus.v1 import split_pb2
from studies.attacks.corpus import DIGITS, Recording, files, spec_of
from studies.attacks.families import Attack
from studies.attacks.shots import Shot, padded, sealed


def attacks(recordings: list[Recording]) -> Iterator[Attack]:
    """Frames on one model each, and states at every cut that has some."""
    first = recordings[0]
    many = [split_pb2.ClientFrame(acknowledge=split_pb2.Acknowledge(ids=range(1_000_000)))]
    yield Attack("a million acknowledged at once", first.model_id, frames=many)
    for name, change in (("left unfinished until they expire", False), ("given up in the line", True)):
        yield Attack(f"uploads {name}", first.model_id, frames=_given_up(first, whole=change))
    for recording in recordings:
        if recording.reported["generators"]:
            yield from _zeros(recording)
        yield from _deep(recording)
    yield from _files()


def _given_up(recording: Recording, *, whole: bool) -> list[split_pb2.ClientFrame]:
    """Payloads that come but for the last byte, or wholly; and then nobody wants them."""
    upload, *_ = Shot.of(recording).frames(0)
    frames = [upload]
    for id in range(1 << 40, (1 << 40) + 24):
        request, *chunks = Shot.of(recording).asking(id, upload.cut.digest)
        request.request.deadline_ms = 60_000 if whole else 1
        frames += [request, *chunks]
        if whole:
            frames.append(split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=id)))
        elif chunks:
            chunks[-1].chunk.data = chunks[-1].chunk.data[:-1]
    return frames


def _zeros(recording: Recording) -> Iterator[Attack]:
    """Generators that give nothing but zeros: who draws until a number fits draws for ever."""
    torch_state = bytearray(torch.get_rng_state().numpy().tobytes())
    struct.pack_into("<624Q", torch_state, 24, *bytes(624))
    numpy_state = json.dumps([[0] * 624, 624, 0, 0.0]).encode()
    python_state = json.dumps([3, [0] * 624 + [624], None]).encode()
    low = json.dumps([[0x7FFF_FFFF] + [0] * 623, 624, 0, 0.0]).encode()
    honest = torch.get_rng_state().numpy().tobytes()
    for name, generators, states in (
        ("torch's state of zeros", ["torch"], [bytes(torch_state)]),
        ("NumPy's state of zeros", ["torch", "numpy"], [honest, numpy_state]),
        ("NumPy's state of bits that do not count", ["torch", "numpy"], [honest, low]),
        ("Python's state of zeros", ["torch", "python"], [honest, python_state]),
    ):
        shot = Shot.of(recording)
        shot.reported = {**shot.reported, "generators": generators}
        sections, at = [], 0
        for entry in shot.body["sections"][:-1]:
            sections.append((entry[1], entry[2], shot.payload[at : at + entry[4]]))
            at += -(-entry[4] // 64) * 64
        shot.carry(*padded(sections + [("uint8", [len(state)], state) for state in states]))
        yield Attack(name, recording.model_id, shot)


def _deep(recording: Recording) -> Iterator[Attack]:
    """Nesting about as deep as a parser takes, wherever JSON is kept as it came."""
    for depth in (60, 70, 900, 980, 990, 1000):
        deep = "[" * depth + "]" * depth
        for key in ("context", "inputs", "given", "reads"):
            value = {
                "context": '{"autocast":[],"x":' + deep + "}",
                "inputs": f"[{deep},[]]",
                "given": f'[[["",1,0],"add",{deep},[],[]]]',
                "reads": f'[[["",1,0],"int",{deep}]]',
            }[key]
            reported = json.dumps({**recording.reported, key: "HERE"}, separators=(",", ":"))
            shot = Shot.of(recording)
            shot.raw = reported.replace('"HERE"', value).encode()
            yield Attack(f"{key} of {depth} levels", recording.model_id, shot)


def _files() -> Iterator[Attack]:
    """Files that say they are larger than they are, or something else."""
    objects = BytesIO()
    np.save(objects, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    png = dict(files())[".png"]
    bomb = bytearray(png)
    bomb[16:24] = struct.pack(">II", 60_000, 60_000)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }"
    digest = spec_of(DIGITS).preprocess_digest()
    for suffix, data in (
        (".npy", objects.getvalue()),
        (".npy", _npy(header % b"1099511627776, 1099511627776")),
        (".npy", _npy(header % b"0, 1, 32, 32")),
        (".npy", _npy(header % b"-1, 32")),
        (".npy", _npy(header % (b"(" * 3000))),
        (".png", bytes(bomb)),
        (".gif", png),
        (".eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
        (".safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
        (".safetensors", _safetensors('{"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}')),
        ("/../../x.png", png),
    ):
        payload, sections = padded([("uint8", [len(data)], data)])
        body = sealed({"v": 1, "meta": "", "sections": sections})
        file = split_pb2.FileInput(suffix=suffix, preprocess_digest=digest)
        request = split_pb2.RequestHeader(id=77, header=body, payload_bytes=len(payload), file=file)
        chunk = split_pb2.Chunk(id=77, data=payload)
        frames = [split_pb2.ClientFrame(request=request), split_pb2.ClientFrame(chunk=chunk)]
        yield Attack(f"a file {suffix} of {data[:12]!r}", DIGITS, frames=frames)


def _npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def _safetensors(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode()
