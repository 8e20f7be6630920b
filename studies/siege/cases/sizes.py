"""Small messages that become large, and large ones that need not be."""

from __future__ import annotations

import functools
import io
import json

import grpc
import xxhash

from protos.isthmus.v1 import split_pb2
from studies.siege.cases.registry import case
from studies.siege.cases.silence import BOUND
from studies.siege.material import DIGITS, digest_of, header_of
from studies.siege.stranger import SERVICE, Stranger, StreamEnded, chunks

MIB = 1 << 20


@case("fat-headers", BOUND)
def fat_headers(stranger: Stranger) -> None:
    """requests whose headers have a MiB of JSON, whose payload does not come"""
    request = stranger.material.requests[f"{DIGITS}/1"]
    body = json.loads(request.header[8:])
    fat = header_of({**body, "meta": [[]] * (MIB // 3 - 200)})

    def one(_: int) -> None:
        stream = stranger.stream()
        stream.upload(request)
        for id in range(1, 1 << 30):
            stream.ask(id, request, share=0, header=fat)

    stranger.together(4, one)


@case("deep-headers", BOUND)
def deep_headers(stranger: Stranger) -> None:
    """complete requests whose headers have half a MiB of `[]`, 32 at a time on four streams"""
    request = stranger.material.requests[f"{DIGITS}/1"]
    body = json.loads(request.header[8:])
    fat = header_of({**body, "meta": [[]] * (MIB // 6)})

    def one(_: int) -> None:
        stream = stranger.stream()
        stream.upload(request)
        for id in range(1, 1 << 30):
            stream.ask(id, request, header=fat)

    stranger.together(4, one)


@case("cuts-of-lists")
def cuts_of_lists(stranger: Stranger) -> None:
    """descriptions of cuts, 512 of up to a MiB, that are mostly `[]`: as objects they take 24 times the size"""
    request = stranger.material.requests[f"{DIGITS}/1"]
    reported = json.loads(request.crossing)
    stream = stranger.stream()
    context = {**reported["context"], "siege": [[]] * 200_000}
    text = json.dumps({**reported, "context": context, "path": "PATH"}, separators=(",", ":")).encode()
    for number in range(512):
        data = text.replace(b"PATH", b"%032x" % number)
        stream.put(split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=digest_of(data), data=data)))
    stranger.wait()


@case("compressed", "disabled|RESOURCE_EXHAUSTED")
def compressed(stranger: Stranger) -> None:
    """chunks of 64 MiB of zeros, as gzip 64 KiB each, and frames just below the limit"""
    big = split_pb2.ClientFrame(chunk=split_pb2.Chunk(id=1, data=bytes(64 * MIB))).SerializeToString()
    allowed = split_pb2.ClientFrame(chunk=split_pb2.Chunk(id=1, data=bytes(MIB))).SerializeToString()

    def one(number: int) -> None:
        while not stranger.over:
            try:
                stream = stranger.stream(compression=grpc.Compression.Gzip)
                stream.announce_file(1, 16 * MIB - 64)
                for _ in range(4):
                    stream.put(big if number % 2 else allowed)
                while not stranger.over and not stream.ended.wait(0.2):
                    pass
            except StreamEnded:
                stranger.rest(0.1)

    stranger.together(4, one)


@case("big-greetings", BOUND)
def big_greetings(stranger: Stranger) -> None:
    """greetings with 200,000 settings, in four loops"""
    settings = {f"setting-{number}": "x" for number in range(200_000)}
    frame = stranger.hello()
    frame.hello.environment.update(settings)
    large = frame.SerializeToString()
    frame = stranger.hello()
    frame.hello.about.update({f"about-{number}": "y" * 20 for number in range(20_000)})
    small = frame.SerializeToString()

    def one(number: int) -> None:
        channel = stranger.channel()
        while not stranger.over:
            stream = stranger.stream(channel=channel, hello=(large, small)[number % 2])
            stream.welcomed.wait(5)
            stream.close()

    stranger.together(4, one)


@functools.cache
def _pictures() -> list[tuple[str, bytes]]:
    """(suffix, bytes) of files that decode to far more than they are."""
    from PIL import Image

    found = []
    for suffix, kind, side in ((".png", "PNG", 8000), (".webp", "WEBP", 8000), (".gif", "GIF", 8000)):
        file = io.BytesIO()
        quick = {"lossless": True, "method": 0, "quality": 0} if kind == "WEBP" else {}
        Image.new("L", (side, side)).save(file, kind, **quick)
        found.append((suffix, file.getvalue()))
    return found


@case("big-files", BOUND, prepare=_pictures, limits={"max_request_bytes": 256 * MIB, "max_pending_bytes": 512 * MIB})
def big_files(stranger: Stranger) -> None:
    """input files of some kB that decode to 64 megapixels, four loops"""
    files = _pictures()

    def one(number: int) -> None:
        stream = stranger.stream()
        for id in range(1, 1 << 30):
            suffix, data = files[(number + id) % len(files)]
            padded = data + bytes(-len(data) % 64)
            stream.announce_file(id, len(data), suffix, xxhash.xxh3_64_intdigest(data))
            for frame in chunks(id, padded):
                stream.put(frame)
            while stream.answered + 4 < id and stranger.rest(0.05):
                pass

    stranger.together(4, one)


@case("metadata", BOUND)
def metadata(stranger: Stranger) -> None:
    """calls with a MiB of metadata, four loops"""
    ask = split_pb2.ListModelsRequest().SerializeToString()
    heavy = [(f"key-{number}", "v" * 4000) for number in range(256)]

    def one(_: int) -> None:
        channel = stranger.channel([("grpc.max_metadata_size", 4 * MIB)])
        while not stranger.over:
            try:
                stranger.call(SERVICE + "ListModels", ask, 20, channel=channel, metadata=heavy)
            except grpc.RpcError as error:
                stranger.hear_error(error)
                stranger.rest(0.01)

    stranger.together(4, one)
