"""Announces and waits: places and bytes that nobody uses."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos.isthmus.v1 import split_pb2
from studies.siege.cases.registry import case
from studies.siege.material import DIGITS
from studies.siege.stranger import SERVICE, Stranger, StreamEnded, chunks

MIB = 1 << 20
BOUND = "QuotaExceeded|TooLarge|ServerUnavailable|RESOURCE_EXHAUSTED|UNAVAILABLE|DeadlineExceeded|DEADLINE"


@case("silent-announcements", BOUND)
def silent_announcements(stranger: Stranger) -> None:
    """headers that announce 16 MiB each, then less, of which nothing comes; again when they are refused"""

    def one(_: int) -> None:
        stream = stranger.stream()
        id = 0
        while not stranger.over:
            for nbytes in (16 * MIB, 4 * MIB, MIB, 256 << 10, 64 << 10, 16 << 10, 4 << 10, 1 << 10):
                for _ in range(4):
                    id += 1
                    stream.announce_file(id, nbytes - 64)
            stranger.rest(0.1)

    stranger.together(4, one)


@case("half-uploads", BOUND)
def half_uploads(stranger: Stranger) -> None:
    """17 streams, 32 requests each, of which half comes"""
    request = stranger.material.requests[f"{DIGITS}/48"]
    channel = stranger.channel()

    def one(_: int) -> None:
        id = 0
        while not stranger.over:
            try:
                stream = stranger.stream(channel=channel)
                stream.upload(request)
                while not stranger.over:
                    for _ in range(32):
                        id += 1
                        stream.ask(id, request, share=0.5)
                    stranger.rest(1.0)
            except StreamEnded:
                stranger.rest(0.2)

    stranger.together(17, one)


@case("silent-streams", BOUND)
def silent_streams(stranger: Stranger) -> None:
    """130 greeted streams that say nothing more, on four connections; opened again when they end"""
    channels = [stranger.channel() for _ in range(4)]

    def one(number: int) -> None:
        while not stranger.over:
            stream = stranger.stream(channel=channels[number % 4])
            while not stranger.over and not stream.ended.wait(0.5):
                pass
            stranger.rest(0.2)

    stranger.together(130, one)


@case("ungreeted-streams", BOUND)
def ungreeted_streams(stranger: Stranger) -> None:
    """130 streams on which not even a greeting comes, opened again when they end"""
    channels = [stranger.channel() for _ in range(4)]

    def one(number: int) -> None:
        while not stranger.over:
            stream = stranger.stream(channel=channels[number % 4], greet=False)
            while not stranger.over and not stream.ended.wait(0.5):
                pass
            stranger.rest(0.2)

    stranger.together(130, one)


def _hold(stranger: Stranger, channel: grpc.Channel, method: str, first: bytes | None, unary: bool) -> None:
    """A call of another service, held open without reading; again when it ends."""
    while not stranger.over:
        try:
            if unary:
                call: Any = channel.unary_stream(method)(first, timeout=120)
            else:
                call = channel.stream_stream(method)(_slowly(stranger, first), timeout=120)
            for _ in call:
                pass
        except grpc.RpcError as error:
            if not stranger.over:
                stranger.hear_error(error)
        stranger.rest(0.2)


def _slowly(stranger: Stranger, first: bytes | None) -> Any:
    if first is not None:
        yield first
    stranger.wait()


@case("reflection-streams")
def reflection_streams(stranger: Stranger) -> None:
    """92 streams of the reflection service on one connection, held open"""
    channel = stranger.channel()
    ask = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    stranger.together(92, lambda _: _hold(stranger, channel, method, ask, unary=False))


@case("health-watches")
def health_watches(stranger: Stranger) -> None:
    """200 watches of the health service on two connections, held open"""
    channels = [stranger.channel() for _ in range(2)]
    ask = health_pb2.HealthCheckRequest().SerializeToString()
    method = "/grpc.health.v1.Health/Watch"
    stranger.together(200, lambda k: _hold(stranger, channels[k % 2], method, ask, unary=True))


@case("unknown-methods")
def unknown_methods(stranger: Stranger) -> None:
    """200 streams of methods that there are not, and unary methods called as streams without a message"""
    channels = [stranger.channel() for _ in range(2)]
    methods = ["/nobody.Knows/This", SERVICE + "ListModels", "/grpc.health.v1.Health/Check", SERVICE + "Profile"]
    stranger.together(200, lambda k: _hold(stranger, channels[k % 2], methods[k % 4], None, unary=False))


@case("list-loop")
def list_loop(stranger: Stranger) -> None:
    """the list of models, asked for in eight loops"""
    ask = split_pb2.ListModelsRequest().SerializeToString()

    def one(_: int) -> None:
        channel = stranger.channel()
        while not stranger.over:
            try:
                stranger.call(SERVICE + "ListModels", ask, 20, channel=channel)
                stranger.sent["lists"] += 1
            except grpc.RpcError as error:
                stranger.hear_error(error)
                stranger.rest(0.01)

    stranger.together(8, one)


@case("slow-uploads", BOUND, limits={"deadline_seconds": 3.0})
def slow_uploads(stranger: Stranger) -> None:
    """four streams with 32 requests each whose payload comes 64 bytes a second"""
    request = stranger.material.requests[f"{DIGITS}/48"]
    channel = stranger.channel()

    def one(_: int) -> None:
        stream = stranger.stream(channel=channel)
        stream.upload(request)
        for id in range(1, 33):
            stream.ask(id, request, share=0)
        pieces = {id: list(chunks(id, request.payload, 64)) for id in range(1, 33)}
        at = 0
        while stranger.rest(1.0):
            for id in pieces:
                stream.put(pieces[id][at])
            at += 1

    stranger.together(4, one)
