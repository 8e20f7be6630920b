"""One hostile request as the frames of the wire, with every digest and checksum made right again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import xxhash

from protos.isthmus.v1 import split_pb2
from shared_hooks.crossing.description import digest_of
from studies.attacks.corpus import Recording

Frames = list[split_pb2.ClientFrame]


@dataclass
class Shot:
    """A cut's description and a request at it. ``fields``: of the request's header frame, instead of the right ones.

    ``links``: whether the parcel's header names the digest of this description.
    """

    reported: Any
    body: Any
    payload: bytes
    fields: dict[str, Any] = field(default_factory=dict)
    links: bool = True
    chunk_bytes: int = 256 << 10
    raw: bytes | None = None
    """The description's bytes as they are, in place of those of the crossing."""
    opened: bool = False
    """Whether the payload comes before the header."""

    @classmethod
    def of(cls, recording: Recording) -> Shot:
        """The honest request."""
        return cls(dict(recording.reported), dict(recording.body), recording.payload)

    @property
    def description(self) -> bytes:
        """The cut's description as it is sent."""
        return self.raw if self.raw is not None else json.dumps(self.reported, separators=(",", ":")).encode()

    def frames(self, id: int) -> Frames:
        """Cut, request, chunks."""
        data = self.description
        digest = digest_of(data)
        upload = split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=digest, data=data))
        return [upload, *self.asking(id, digest)]

    def asking(self, id: int, digest: str) -> Frames:
        """Request and chunks, at the cut of this digest."""
        header = sealed(self.linked(digest))
        values = {"id": id, "cut_digest": digest, "header": header, "payload_bytes": len(self.payload), **self.fields}
        step = max(self.chunk_bytes, 1)
        ends: Frames = []
        if self.opened:
            closing = split_pb2.Closing(id=values["id"], header=header, payload_bytes=values["payload_bytes"])
            ends = [split_pb2.ClientFrame(closing=closing)]
            values |= {"header": b"", "open": True, **self.fields}
        return [
            split_pb2.ClientFrame(request=split_pb2.RequestHeader(**values)),
            *(
                split_pb2.ClientFrame(
                    chunk=split_pb2.Chunk(id=values["id"], offset=at, data=self.payload[at : at + step])
                )
                for at in range(0, len(self.payload), step)
            ),
            *ends,
        ]

    def linked(self, digest: str) -> Any:
        """The parcel's header for this digest."""
        if not self.links or not isinstance(self.body, dict) or "meta" not in self.body:
            return self.body
        meta = self.body["meta"]
        if isinstance(meta, list) and meta:
            return {**self.body, "meta": [digest, *meta[1:]]}
        return {**self.body, "meta": digest}

    def carry(self, payload: bytes, sections: list[list[Any]]) -> None:
        """Another payload, described correctly."""
        self.payload = payload
        if isinstance(self.body, dict):
            self.body = {**self.body, "sections": sections}


def sealed(body: Any) -> bytes:
    """A parcel's header with its checksum."""
    data = json.dumps(body, separators=(",", ":")).encode()
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little") + data


def padded(sections: list[tuple[str, list[int], bytes]]) -> tuple[bytes, list[list[Any]]]:
    """(dtype, shape, bytes) of each tensor as a payload, and its sections."""
    payload, reported = bytearray(), []
    for dtype, shape, data in sections:
        stride, step = [], 1
        for size in reversed(shape):
            stride.insert(0, step)
            step *= max(size, 1)
        reported.append(["raw", dtype, shape, stride, len(data), xxhash.xxh3_64_intdigest(data)])
        payload += data + bytes(-len(data) % 64)
    return bytes(payload), reported
