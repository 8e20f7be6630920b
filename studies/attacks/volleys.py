"""The frames of one number of a run: a batch of small requests, made of the seed and the number alone.

A volley is one of: descriptions of cuts that are changed and still can be read, each with requests fitted to it;
descriptions that cannot be read; requests at honest cuts with headers, payloads and fields changed; files; hellos;
bytes of frames changed as they are. Digests and checksums are made right again, so that what is changed is read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from protos.isthmus.v1 import split_pb2
from shared_hooks import Crossing
from shared_hooks.crossing.description import digest_of
from shared_hooks.crossing.format import decode
from shared_hooks.errors import IsthmusError
from studies.attacks.corpus import DIGITS, Recording, files, spec_of
from studies.attacks.families import Attack
from studies.attacks.mutation import TEXTS, Mutator
from studies.attacks.shots import Frames, Shot, padded, sealed

KINDS = {"requests": 58, "descriptions": 22, "unreadable": 6, "files": 6, "hellos": 4, "bytes": 4}
"""Volleys of each kind in a hundred."""
JUMBLED = 0.2
OPENED = 0.25
"""The share of requests whose header comes last."""
"""Share of volleys whose frames come in another order, with others between them."""
BATCH = 64
"""Numbers of requests that a volley has to itself; it uses a quarter of them."""


@dataclass
class Volley:
    """What is sent on one stream, as the bytes of `ClientFrame`.

    ``own``: of each frame whether it belongs to a changed request; the others only pad: honest uploads, frames that are
    sent twice, frames between them that ask for nothing. ``whole``: requests whose payload is complete, so that an
    answer has to come. ``greetings``: hellos, each for a stream of its own.
    """

    name: str
    model_id: str
    kind: str = ""
    frames: list[bytes] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    greetings: bool = False
    cut: str = ""
    jumbled: bool = False

    @classmethod
    def of(cls, attack: Attack, number: int) -> Volley:
        """An attack that was written by hand."""
        made = cls(attack.name, attack.model_id, "by hand")
        made.add(attack.made(number * BATCH), own=True)
        return made

    def add(self, frames: Frames, *, own: bool) -> None:
        """Frames to be sent after the others."""
        self.frames += [frame.SerializeToString() for frame in frames]
        self.own += [own] * len(frames)
        left: dict[int, int] = {}
        for frame in frames:
            kind = frame.WhichOneof("frame")
            if kind == "request":
                left[frame.request.id] = frame.request.payload_bytes
            elif kind == "chunk" and frame.chunk.id in left:
                left[frame.chunk.id] -= len(frame.chunk.data)
        self.asked += left
        self.whole += [id for id, missing in left.items() if missing == 0]

    @property
    def digest(self) -> str:
        """Return the digest of everything that is sent: two volleys with one digest are equal."""
        found = hashlib.blake2b(digest_size=8)
        for frame in self.frames:
            found.update(len(frame).to_bytes(4, "little") + frame)
        return found.hexdigest()


class Gunner:
    """Makes the volleys of one seed on one corpus."""

    def __init__(self, recordings: list[Recording], seed: int) -> None:
        self.recordings = recordings
        self.seed = seed
        self.files = files()
        self.preprocess_digest = spec_of(DIGITS).preprocess_digest()

    def volley(self, number: int) -> Volley:
        """The same for the same number, whatever was made before it."""
        mutator = Mutator(self.recordings, self.seed * 1_000_003 + number)
        chance = mutator.random
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        recording = chance.choice(self.recordings)
        made = Volley(f"{self.seed}:{number}", recording.model_id, kind, cut=recording.reported["cut"][1])
        getattr(self, f"_{kind}")(made, recording, mutator, number * BATCH)
        if chance.random() < JUMBLED and made.frames and not made.greetings:
            _jumble(made, mutator)
        return made

    def _requests(self, made: Volley, recording: Recording, mutator: Mutator, id: int) -> None:
        """At an honest cut."""
        chance = mutator.random
        upload, *_ = Shot.of(recording).frames(id)
        made.add([upload], own=False)
        for number in range(chance.randrange(4, 17)):
            shot = Shot.of(recording)
            kind = chance.randrange(10)
            if kind < 4:
                shot.body = mutator.changed(shot.body, [chance.choice(self.recordings).body])
            elif kind < 6:
                mutator.garble(shot, keep=True)
            elif kind < 7:
                mutator.garble(shot, keep=False)
            elif kind < 8:
                mutator.fields(shot)
            else:
                shot.chunk_bytes = len(shot.payload) // 4 + 1
                mutator.garble(shot, keep=chance.random() < 0.5)
            shot.opened = chance.random() < OPENED
            frames = shot.asking(id + number, upload.cut.digest)
            if kind == 9:
                _change_chunks(frames, mutator)
            made.add(frames, own=True)

    def _descriptions(self, made: Volley, recording: Recording, mutator: Mutator, id: int) -> None:
        """Changed, but such that they can be read: each is rehearsed, and asked for with other bytes and values."""
        for part in range(4):
            shot, crossing = Shot.of(recording), None
            for _ in range(5):
                shot.reported = mutator.description(recording.reported)
                if (crossing := readable(shot.description)) is not None:
                    break
            if crossing is None:
                continue
            made.add(shot.frames(id)[:1], own=True)
            digest = digest_of(shot.description)
            for number in range(mutator.random.randrange(1, 4)):
                if mutator.random.random() < 0.9:
                    mutator.tailor(shot, crossing)
                shot.opened = mutator.random.random() < OPENED
                made.add(shot.asking(id + 4 * part + number, digest), own=True)

    def _unreadable(self, made: Volley, recording: Recording, mutator: Mutator, id: int) -> None:
        """Each ends its stream, so they come alone; mixed ones too, of which one in some can be read."""
        for _ in range(4):
            shot = Shot.of(recording)
            shot.reported = mutator.description(recording.reported)
            if mutator.random.random() < 0.2:
                data = bytearray(shot.description)
                data[mutator.random.randrange(len(data))] = mutator.random.randrange(256)
                shot.raw = bytes(data)
            made.add(shot.frames(id)[:1], own=True)

    def _files(self, made: Volley, recording: Recording, mutator: Mutator, id: int) -> None:
        """Input files for the whole model."""
        made.model_id, made.cut = DIGITS, "file"
        for number in range(mutator.random.randrange(2, 9)):
            suffix, data = mutator.random.choice(self.files)
            data = mutator.file(data)
            if mutator.random.random() < 0.1:
                suffix = mutator.random.choice((".png", ".npy", ".safetensors", ".tiff", ".eps", "", "../x.png"))
            payload, sections = padded([("uint8", [len(data)], data)])
            header = sealed({"v": 1, "meta": "", "sections": sections})
            file = split_pb2.FileInput(suffix=suffix, preprocess_digest=self.preprocess_digest)
            request = split_pb2.RequestHeader(id=id + number, header=header, payload_bytes=len(payload), file=file)
            chunk = split_pb2.Chunk(id=id + number, data=payload)
            made.add([split_pb2.ClientFrame(request=request), split_pb2.ClientFrame(chunk=chunk)], own=True)

    def _hellos(self, made: Volley, recording: Recording, mutator: Mutator, id: int) -> None:
        """First frames with another field; what is right of them is the target's to fill in (`greeting`)."""
        made.greetings = True
        chance = mutator.random
        for _ in range(4):
            hello = split_pb2.Hello(protocol_version=3, client_id=f"h{id}", model_id=recording.model_id)
            kind = chance.randrange(7)
            if kind == 0:
                hello.protocol_version = chance.choice((0, 1, 2, 4, (1 << 32) - 1))
            elif kind == 1:
                hello.client_id = chance.choice(("", "x" * 257, "é" * 256, "\0"))
            elif kind == 2:
                hello.model_id = chance.choice(("", "nobody", "../digits", "x" * 100_000))
            elif kind == 3:
                hello.weights_hash = chance.choice(("", "0" * 64, "x" * 10_000))
            elif kind == 4:
                hello.environment.update({f"{n}{chance.random()}": "x" * chance.choice((0, 300)) for n in range(40)})
            elif kind == 5:
                hello.about.update({"x" * n: "y" * 3000 for n in range(1, 30)})
            else:
                hello.inline_bytes = chance.choice((1, (1 << 32) - 1))
            made.add([split_pb2.ClientFrame(hello=hello)], own=True)

    def _bytes(self, made: Volley, recording: Recording, mutator: Mutator, id: int) -> None:
        """The frames of honest requests with bytes changed as they are: protobuf, digests and checksums are wrong."""
        for number in range(4):
            frames = Shot.of(recording).frames(id + number)[: 1 if number == 3 else None]
            made.add(frames, own=True)
        made.frames = [mutator.file(frame[:4096]) if len(frame) < 4096 else frame for frame in made.frames]
        made.whole.clear()


def readable(data: bytes) -> Crossing | None:
    """What a server reads of a description; None for one that it refuses."""
    try:
        return decode(data, 8 << 20, remember=False)
    except IsthmusError:
        return None


def _change_chunks(frames: Frames, mutator: Mutator) -> None:
    """One chunk at another place, of another size, twice, or left out."""
    chance, chunks = (
        mutator.random,
        [number for number, frame in enumerate(frames) if frame.WhichOneof("frame") == "chunk"],
    )
    if not chunks:
        return
    at, kind = chance.choice(chunks), chance.randrange(5)
    if kind == 0:
        frames[at].chunk.offset = chance.choice((0, 1, 63, 1 << 20, (1 << 64) - 1))
    elif kind == 1:
        frames[at].chunk.data += bytes(chance.choice((1, 64)))
    elif kind == 2:
        frames[at].chunk.data = b""
    elif kind == 3:
        frames.insert(at, frames[at])
    else:
        del frames[at]


def _jumble(made: Volley, mutator: Mutator) -> None:
    """Frames of a volley out of order and repeated, and others between them that ask for nothing."""
    chance = mutator.random
    made.jumbled = True
    ids = [*made.asked, 1, 1 << 63]
    for _ in range(chance.randrange(2, 12)):
        kind = chance.randrange(6)
        if kind == 0:
            one, other = chance.randrange(len(made.frames)), chance.randrange(len(made.frames))
            for of_each in (made.frames, made.own):
                of_each[one], of_each[other] = of_each[other], of_each[one]  # type: ignore[index]
            continue
        if kind == 1:
            extra = chance.choice(made.frames)
        elif kind == 2:
            extra = split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=chance.choice(ids))).SerializeToString()
        elif kind == 3:
            values = {"id": chance.choice(ids), "offset": chance.choice((0, 1, 64, 1 << 40)), "data": mutator.bytes(64)}
            extra = split_pb2.ClientFrame(chunk=split_pb2.Chunk(**values)).SerializeToString()
        elif kind == 4:
            request = split_pb2.RequestHeader(id=chance.choice(ids), cut_digest=chance.choice(TEXTS[:30]))
            extra = split_pb2.ClientFrame(request=request).SerializeToString()
        else:
            many = [chance.choice(ids) for _ in range(chance.randrange(9))]
            extra = split_pb2.ClientFrame(acknowledge=split_pb2.Acknowledge(ids=many)).SerializeToString()
        at = chance.randrange(len(made.frames) + 1)
        made.frames.insert(at, extra)
        made.own.insert(at, False)
    made.whole.clear()  # nobody can say
