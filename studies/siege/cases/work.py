"""What takes a worker's time: profiles, probes, floods of requests."""

from __future__ import annotations

import time
from typing import Any

import grpc

from protos.isthmus.v1 import split_pb2
from studies.siege.cases.registry import case
from studies.siege.cases.silence import BOUND
from studies.siege.material import DIGITS
from studies.siege.stranger import SERVICE, Stranger

MIB = 1 << 20


@case("profile-loop", BOUND)
def profile_loop(stranger: Stranger) -> None:
    """profiles of a minute each, measured afresh, four at a time"""

    def one(_: int) -> None:
        channel = stranger.channel()
        ask = split_pb2.ProfileRequest(model_id=DIGITS, warmup=50, repetitions=1000, seconds=60, fresh=True)
        while not stranger.over:
            try:
                for _ in stranger.call(SERVICE + "Profile", ask.SerializeToString(), 120, stream=True, channel=channel):
                    stranger.sent["progress"] += 1
                    if stranger.over:
                        return
            except grpc.RpcError as error:
                stranger.hear_error(error)
                stranger.rest(0.1)

    stranger.together(4, one)


@case("probe-loop", BOUND)
def probe_loop(stranger: Stranger) -> None:
    """sixteen probes with answers of 16 MiB, fetched as fast as they come"""

    def rounds(_: int) -> Any:
        while not stranger.over:
            stranger.sent["rounds"] += 1
            yield split_pb2.ProbeFrame(padding=bytes(64), last=True, answer_bytes=16 * MIB).SerializeToString()
            stranger.rest(0.05)

    def one(number: int) -> None:
        channel = stranger.channel()
        while not stranger.over:
            try:
                for _ in channel.stream_stream(SERVICE + "Probe")(rounds(number), metadata=stranger._metadata):
                    if stranger.over:
                        return
            except grpc.RpcError as error:
                stranger.hear_error(error)
                stranger.rest(0.1)

    stranger.together(16, one)


@case("tiny-flood")
def tiny_flood(stranger: Stranger) -> None:
    """eight connections with 32 tiny requests each under way"""
    request = stranger.material.requests[f"{DIGITS}/1"]

    def one(_: int) -> None:
        stream = stranger.stream()
        stream.upload(request)
        for id in range(1, 1 << 30):
            stream.ask(id, request)
            while id - stream.answered >= 32 and not stream.ended.is_set() and stranger.rest(0.002):
                pass

    stranger.together(8, one)


@case("tiny-flood-unasked", BOUND)
def tiny_flood_unasked(stranger: Stranger) -> None:
    """eight connections that send tiny requests without waiting for any answer"""
    request = stranger.material.requests[f"{DIGITS}/1"]

    def one(_: int) -> None:
        stream = stranger.stream()
        stream.upload(request)
        for id in range(1, 1 << 30):
            stream.ask(id, request)

    stranger.together(8, one)


@case("heavy-requests")
def heavy_requests(stranger: Stranger) -> None:
    """four connections with 32 requests of 48 rows each under way"""
    request = stranger.material.requests[f"{DIGITS}/48"]

    def one(_: int) -> None:
        stream = stranger.stream()
        stream.upload(request)
        for id in range(1, 1 << 30):
            stream.ask(id, request)
            while id - stream.answered >= 32 and not stream.ended.is_set() and stranger.rest(0.002):
                pass

    stranger.together(4, one)


@case("paced-flood")
def paced_flood(stranger: Stranger) -> None:
    """requests of 16 rows at a steady rate, far beyond what the server can do, on four connections"""
    request = stranger.material.requests[f"{DIGITS}/16"]
    connections = 4

    def one(_: int) -> None:
        stream = stranger.stream()
        stream.upload(request)
        began = time.monotonic()
        for id in range(1, 1 << 30):
            stream.ask(id, request)
            stranger.rest(began + id * connections / stranger.rate - time.monotonic())

    stranger.together(connections, one)
