"""Structure-aware mutation: of a description's JSON, a parcel's header, a payload, a request's fields, a file."""

from __future__ import annotations

import copy
import random
import struct
from typing import Any

from shared_hooks.crossing.description import Crossing
from studies.attacks.corpus import Recording
from studies.attacks.shots import Shot, padded

NUMBERS = (0, 1, -1, 2, 3, 7, 16, 63, 64, 65, 255, 256, 1023, 4096, 65_536, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 32,
           (1 << 40) - 1, 1 << 40, 1 << 48, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**30,
           0.5, 1e308, True)  # fmt: skip
TEXTS = ("", "t", "v", "x", "list", "tuple", "dict", "named", "data", "enum", "map", "float32", "float64", "int64",
         "bool", "uint8", "bfloat16", "float16", "complex64", "qint8", "quint8", "float8_e4m3fn", "bits8", "uint4",
         "c", "n", "cn", "torch", "python", "numpy", "embedding", "linear", "add", "int", "item", "relu", "relu_",
         "aten.add.Tensor", "studies.attacks.models:Options", "studies.attacks.models:Mood", "torch:Tensor",
         "torch.return_types:max",
         "nan", "cuda", "meta", "\ud800", "a" * 2000, "mask", "options", "ids")  # fmt: skip
NODES: tuple[Any, ...] = (
    None, [], {}, ["v", None], ["v", 10**30], ["v", 1 << 62], ["v", -1], ["v", float("nan")], ["v", "text"],
    ["v", True],
    ["x", "dtype", "float16"], ["x", "dtype", "qint8"], ["x", "device", "cuda:0"], ["x", "device", "meta"],
    ["x", "device", "cpu"], ["x", "slice", [None, None, -1]], ["x", "slice", [0, 1 << 62, 1]], ["x", "ellipsis", None],
    ["x", "size", [1 << 40, 1 << 40]], ["x", "complex", [1e308, -0.0]], ["t", 0], ["t", 1], ["t", -1], ["t", 999],
    ["list", []], ["tuple", []], ["dict", []], ["list", [["t", 0]]], ["tuple", [["t", 0], ["t", 0]]],
    ["data", "studies.attacks.models:Options", [["scale", ["v", "x"]], ["rounds", ["v", 3]], ["__class__", ["v", 1]]]],
    ["data", "studies.attacks.models:Options", [["rounds", ["v", 1 << 40]], ["scale", ["v", 1.0]]]],
    ["enum", "studies.attacks.models:Mood", "LOUD"], ["enum", "studies.attacks.models:Mood", "__class__"],
    ["named", "torch.return_types:max", [["t", 0], ["t", 0]]], ["map", "studies.attacks.models:Options", []],
    ["named", "studies.attacks.models:Options", [["t", 0]]],
)  # fmt: skip


class Mutator:
    """Changes parts of requests; the same seed changes them alike."""

    def __init__(self, recordings: list[Recording], seed: int) -> None:
        self.recordings = recordings
        self.random = random.Random(seed)

    # -- JSON -----------------------------------------------------------------------------------------------------

    def description(self, reported: Any) -> Any:
        """A cut's description with one change, or with some."""
        for _ in range(self.random.choice((1, 1, 1, 2, 2, 3, 6))):
            reported = self.changed(
                reported, [recording.reported for recording in self.random.sample(self.recordings, 2)]
            )
        return reported

    def changed(self, reported: Any, others: list[Any]) -> Any:
        """The value with one change at one place, found by walking down at random; only what leads there is copied."""
        chance = self.random
        made = node = copy.copy(reported)
        path: list[tuple[Any, Any]] = []
        while isinstance(node, (list, dict)) and node and (not path or chance.random() < 0.85):
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key = chance.choice([key for key in keys if key not in _RARE or chance.random() < 0.05] or list(keys))
            path.append((node, key))
            node[key] = copy.copy(node[key])
            node = node[key]
        if not path:
            return chance.choice(NODES)
        holder, key = path[-1]
        self._change(holder, key, node, [key for _, key in path], others)
        return made

    def _change(self, holder: Any, key: Any, node: Any, path: list[Any], others: list[Any]) -> None:
        chance = self.random
        roll = chance.random()
        if roll < 0.15:
            found = _at(chance.choice(others), path)
            holder[key] = copy.deepcopy(found) if found is not None else chance.choice(NODES)
        elif isinstance(holder, list) and roll < (0.35 if _is_open(holder) else 0.18):
            kind = chance.randrange(4)
            if kind == 0:
                del holder[key]
            elif kind == 1:
                holder.insert(key, copy.deepcopy(node))
            elif kind == 2:
                other = chance.randrange(len(holder))
                holder[key], holder[other] = holder[other], holder[key]
            else:
                holder.insert(key, copy.deepcopy(chance.choice((*NODES, *NUMBERS[:9]))))
        elif isinstance(node, bool):
            holder[key] = not node
        elif isinstance(node, (int, float)):
            near = chance.random()
            holder[key] = (
                node + chance.choice((-1, 1)) if near < 0.35 else chance.choice(NUMBERS[: 13 if near < 0.8 else None])
            )
        elif isinstance(node, str) and chance.random() < 0.8:
            holder[key] = chance.choice(TEXTS)
        else:
            holder[key] = copy.deepcopy(chance.choice(NODES))

    # -- payload --------------------------------------------------------------------------------------------------

    def tailor(self, shot: Shot, crossing: Crossing) -> None:
        """Give a shot the payload and the values that a changed description asks for, so that it gets further."""
        if crossing.payload_bytes > 1 << 20 or not isinstance(shot.body, dict):
            return
        sections = [
            (str(slot.dtype).removeprefix("torch."), list(piece.shape), self.bytes(piece.numel * slot.dtype.itemsize))
            for slot in crossing.slots
            for piece in slot.pieces
        ]
        states = [("uint8", [5056], self.bytes(5056)) for _ in crossing.generators]
        shot.carry(*padded(sections + states))
        if crossing.reads:
            shot.body["meta"] = ["", [self.value(read.form) for read in crossing.reads], self.starts(crossing)]
        elif self.random.random() < 0.3:
            shot.body["meta"] = ["", [], self.starts(crossing)]
        else:
            shot.body["meta"] = ""

    def bytes(self, size: int) -> bytes:
        """Zeros, ones, small numbers of either kind; rarely anything: loops over huge numbers take all the time."""
        kind = self.random.randrange(24)
        if kind < 4:
            return bytes(size)
        if kind < 8:
            return b"\xff" * size
        if kind < 12:
            return (b"\x01" + bytes(7)) * (size // 8) + bytes(size % 8)
        if kind < 23:
            floats = [self.random.uniform(-4, 4) for _ in range(16)]
            return (struct.pack("<16f", *floats) * (size // 64 + 1))[:size]
        return self.random.randbytes(size)

    def value(self, form: Any) -> Any:
        """A value of a form (`trees.form_of`)."""
        if isinstance(form, list) and len(form) == 2 and form[0] == "v":
            numbers = (0, 1, 2, 3, -1, 1 << 20, 1 << 62, 10**30)
            kinds = {
                "int": numbers,
                "bool": (True, False),
                "float": (0.0, -1.5, 1e308),
                "str": TEXTS,
                "NoneType": (None,),
            }
            return ["v", self.random.choice(kinds.get(str(form[1]), (None,)))]
        return [self.value(part) for part in form] if isinstance(form, list) else form

    def starts(self, crossing: Crossing) -> list[int]:
        return [self.random.choice((0, 0, 8, 16, 63)) // s.dtype.itemsize * s.dtype.itemsize for s in crossing.slots]

    def garble(self, shot: Shot, *, keep: bool) -> None:
        """Other bytes. ``keep``: with checksums made right again."""
        if not isinstance(shot.body, dict) or not shot.payload:
            return
        sections = [(entry[1], entry[2], self.bytes(entry[4])) for entry in shot.body["sections"]]
        if keep:
            shot.carry(*padded(sections))
        else:
            data = bytearray(shot.payload)
            for _ in range(self.random.randrange(1, 4)):
                data[self.random.randrange(len(data))] = self.random.randrange(256)
            shot.payload = bytes(data[: self.random.choice((len(data), len(data), len(data) // 2))])

    def fields(self, shot: Shot) -> None:
        """Another number or text in the request's frame."""
        chance = self.random
        name, value = chance.choice(
            (
                ("id", chance.choice((0, 1, 1 << 63))),
                ("cut_digest", chance.choice(("", "0" * 32, "é" * 40))),
                ("payload_bytes", chance.choice((0, 1, 63, 1 << 20, 1 << 29, 1 << 63, (1 << 64) - 1))),
                ("session_id", 1),
                ("step", 1),
                ("deadline_ms", chance.choice((1, (1 << 32) - 1))),
                ("want_metrics", True),
                ("hooks", ["activation", "x" * 300]),
                ("header", chance.choice((b"", b"x" * 9, bytes(100), b"\xff" * 70_000))),
            )
        )
        shot.fields[name] = value

    def file(self, data: bytes) -> bytes:
        """An input file with some bytes changed, most of them in front, left out or repeated."""
        chance, made = self.random, bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 4))):
            at = (
                min(int(chance.expovariate(1 / 40)), len(made) - 1)
                if chance.random() < 0.7
                else chance.randrange(len(made))
            )
            kind = chance.randrange(5)
            if kind == 0:
                made[at] ^= 1 << chance.randrange(8)
            elif kind == 1:
                made[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            elif kind == 2:
                made[at : at + 4] = chance.choice((bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\x01\0"))
            elif kind == 3 and len(made) > 16:
                del made[at : at + chance.choice((1, 8, len(made) // 2))]
            else:
                made[at:at] = made[at : at + chance.choice((1, 8, 64))]
        return bytes(made) or b"\0"


_RARE = ("path", "format", "depth", "context", "v", "sections", "cut")


def _is_open(holder: list[Any]) -> bool:
    """Whether a list may be of any length: of entries, not of an entry's fields."""
    return all(isinstance(item, (list, int)) for item in holder)


def _at(value: Any, path: list[Any]) -> Any:
    try:
        for key in path:
            value = value[key]
    except (IndexError, KeyError, TypeError):
        return None
    return value
