"""Other clients' requests, and the log."""

from __future__ import annotations

import json
import math

import grpc
import zstandard

from protos.inference import inference_pb2
from protos.isthmus.v1 import split_pb2
from studies.siege.cases.registry import case
from studies.siege.material import DIGITS
from studies.siege.stranger import Stranger, StreamEnded

FORGED = "2026-01-01 00:00:00,000 WARNING cloud_server: FORGED"


@case("nothing")
def nothing(stranger: Stranger) -> None:
    """no request at all: what the measurement itself does to honest clients"""
    while not stranger.over:
        stranger.rest(0.1)


@case("forged-lines", forged=FORGED)
def forged_lines(stranger: Stranger) -> None:
    """line breaks of every kind in model ids, client ids, digests and suffixes"""
    breaks = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\x1b[2K\r"]
    channel = stranger.channel()
    request = stranger.material.requests[f"{DIGITS}/1"]
    while not stranger.over:
        for one in breaks:
            text = f"x{one}{FORGED} by {one!a}"
            unknown = stranger.stream(channel=channel, hello=_hello(stranger, model_id=text))
            stream = stranger.stream(channel=channel, client_id=text[:200])
            settings = _hello(stranger)
            settings.hello.environment[text] = text
            differs = stranger.stream(channel=channel, hello=settings)
            try:
                stream.ask(1, request, cut_digest=text)
                stream.ask(2, request, hooks=[text])
                stream.announce_file(3, 64, suffix=text)
                stream.put(split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=text, data=b"{}")))
            except StreamEnded:
                pass
            for each in (unknown, stream, differs):
                each.welcomed.wait(5)
            stream.ended.wait(2)
            for each in (unknown, stream, differs):
                each.close()
            stranger.rest(0.01)


def _hello(stranger: Stranger, model_id: str = "") -> split_pb2.ClientFrame:
    frame = stranger.hello()
    frame.hello.model_id = model_id or frame.hello.model_id
    return frame


@case("tails-by-name")
def tails_by_name(stranger: Stranger) -> None:
    """tensors by name for a tail: batches of all sizes, shapes that lie, codecs that inflate, other weights"""
    shapes = [[1, 16, 16, 16], [64, 16, 16, 16], [1 << 40, 16, 16, 16], [1, 16, 16], [0, 16, 16, 16]]
    codecs = ["", json.dumps({"stem.2": ["zstd", []]}), json.dumps({"stem.2": ["int8", [1 << 60] * 6]}), "[" * 60_000]
    bomb = zstandard.compress(bytes(64 * 16 * 16 * 16 * 4))

    def one(number: int) -> None:
        call = stranger.channel().unary_unary("/inference.GRPCInferenceService/ModelInfer")
        while not stranger.over:
            for at, shape in enumerate(shapes):
                request = inference_pb2.ModelInferRequest(model_name="digits@stem.2")
                request.inputs.add(name="stem.2", datatype="FP32", shape=shape)
                codec = codecs[(at + number) % len(codecs)]
                size = 4 * math.prod(shape)
                request.raw_input_contents.append(bomb if codec else bytes(size if size < 1 << 22 else 64))
                request.parameters["isthmus_codecs"].string_param = codec or "{}"
                if at == number:
                    request.parameters["isthmus_weights"].string_param = "0" * 32
                try:
                    call(request.SerializeToString(), timeout=10, metadata=stranger._metadata)
                except grpc.RpcError as error:
                    stranger.hear_error(error)

    stranger.together(4, one)


@case("stolen-ids")
def stolen_ids(stranger: Stranger) -> None:
    """greets with others' client ids, cancels their requests and uses up the ids they come to next"""
    request = stranger.material.requests[f"{DIGITS}/1"]

    def one(number: int) -> None:
        victim = stranger.victims[number]
        stream = stranger.stream(client_id=victim)
        stream.upload(request)
        at = 1
        while not stranger.over:
            for id in range(at, at + 200):
                stream.put(split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=id)))
            for id in range(at + 200, at + 210):
                stream.ask(id, request, share=0)
            stream.put(split_pb2.ClientFrame(acknowledge=split_pb2.Acknowledge(ids=range(at, at + 200))))
            at = at + 50 if at < 2000 else 1
            stranger.rest(0.02)

    stranger.together(len(stranger.victims), one)
