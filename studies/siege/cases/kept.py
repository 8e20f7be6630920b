"""What a server keeps: descriptions, recipes, answers."""

from __future__ import annotations

import json
import time

from protos.isthmus.v1 import split_pb2
from studies.siege.cases.registry import case
from studies.siege.cases.silence import BOUND
from studies.siege.material import DIGITS, SHAPES, digest_of, header_of
from studies.siege.models import WIDE
from studies.siege.stranger import Stranger, varied


@case("cut-churn")
def cut_churn(stranger: Stranger) -> None:
    """small descriptions of cuts, ever new ones, as fast as they are taken: they push others' out"""
    request = stranger.material.requests[f"{DIGITS}/1"]

    def one(number: int) -> None:
        stream = stranger.stream()
        for k in range(1 << 30):
            data = varied(request, (number << 40) + k)
            stream.put(split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=digest_of(data), data=data)))

    stranger.together(2, one)


@case("recipe-churn", BOUND)
def recipe_churn(stranger: Stranger) -> None:
    """ever new cuts, each asked for: each is rehearsed, and refused"""
    request = stranger.material.requests[f"{DIGITS}/1"]
    body = json.loads(request.header[8:])

    def one(number: int) -> None:
        stream = stranger.stream()
        for k in range(1, 1 << 30):
            data = varied(request, (number << 40) + k)
            digest = digest_of(data)
            stream.put(split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=digest, data=data)))
            stream.ask(k, request, cut_digest=digest, header=header_of({**body, "meta": digest}))

    stranger.together(2, one)


@case("new-shapes", BOUND)
def new_shapes(stranger: Stranger) -> None:
    """batches of ever new sizes, each of which is rehearsed; several cuts of each by other names"""

    def one(number: int) -> None:
        stream = stranger.stream()
        for id in range(1, 1 << 30):
            request = stranger.material.requests[f"{DIGITS}/{1 + (id + number * 16) % SHAPES}"]
            if id <= SHAPES:
                stream.upload(request)
            stream.ask(id, request)

    stranger.together(3, one)


@case("answers-unread", BOUND)
def answers_unread(stranger: Stranger) -> None:
    """answers of 8 MiB each, asked for by 512 bytes and never fetched, 32 on each of four streams"""
    request = stranger.material.requests[f"{WIDE}/8"]

    def one(_: int) -> None:
        stream = stranger.stream(WIDE, read=False)
        stream.upload(request)
        for id in range(1, 1 << 30):
            stream.ask(id, request)
            if id >= 32:
                time.sleep(0.05)

    stranger.together(4, one)


@case("answers-unacknowledged")
def answers_unacknowledged(stranger: Stranger) -> None:
    """answers of a MiB each that are fetched and never acknowledged"""
    request = stranger.material.requests[f"{WIDE}/1"]

    def one(_: int) -> None:
        stream = stranger.stream(WIDE, acknowledge=False)
        stream.upload(request)
        for id in range(1, 1 << 30):
            stream.ask(id, request)
            while id - stream.answered > 8 and not stream.ended.is_set() and stranger.rest(0.002):
                pass

    stranger.together(2, one)


@case("acknowledgements")
def acknowledgements(stranger: Stranger) -> None:
    """acknowledgements of 4,096 ids that there are not, and cancels of others, as fast as they are taken"""

    def one(number: int) -> None:
        stream = stranger.stream()
        many = split_pb2.ClientFrame(acknowledge=split_pb2.Acknowledge(ids=range(1, 4097)))
        for k in range(1 << 30):
            stream.put(many if number % 2 else split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=k)))

    stranger.together(4, one)
