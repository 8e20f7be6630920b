"""Comings and goings."""

from __future__ import annotations

import os
import socket
import struct

from studies.siege.cases.registry import case
from studies.siege.material import DIGITS
from studies.siege.stranger import Stranger, StreamEnded

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@case("gone-amid-frames", killed=True)
def gone_amid_frames(stranger: Stranger) -> None:
    """eight streams full of requests and halves of them, and the process is killed; then the server drains"""
    request = stranger.material.requests[f"{DIGITS}/48"]

    def one(number: int) -> None:
        stream = stranger.stream()
        stream.upload(request)
        for id in range(1, 1 << 30):
            stream.ask(id, request, share=1.0 if id % 3 else 0.5)

    stranger.together(8, one)


@case("aborted-streams")
def aborted_streams(stranger: Stranger) -> None:
    """streams that are cancelled right after their requests were sent, in eight loops"""
    request = stranger.material.requests[f"{DIGITS}/1"]

    def one(_: int) -> None:
        channel = stranger.channel()
        while not stranger.over:
            try:
                stream = stranger.stream(channel=channel)
                stream.upload(request)
                for id in range(1, 20):
                    stream.ask(id, request)
                stranger.rest(0.02)
                stream.close()
                stranger.sent["streams"] += 1
            except StreamEnded:
                stranger.rest(0.01)

    stranger.together(8, one)


@case("new-names")
def new_names(stranger: Stranger) -> None:
    """greets under ever new client ids, a request each, in four loops"""
    request = stranger.material.requests[f"{DIGITS}/1"]

    def one(_: int) -> None:
        channel = stranger.channel()
        while not stranger.over:
            try:
                stream = stranger.stream(channel=channel)
                stream.upload(request)
                stream.ask(1, request)
                stream.welcomed.wait(5)
                stranger.rest(0.005)
                stream.close()
                stranger.sent["streams"] += 1
            except StreamEnded:
                stranger.rest(0.01)

    stranger.together(4, one)


@case("connections")
def connections(stranger: Stranger) -> None:
    """TCP connections in four loops: half are reset at once, half say the preface of HTTP/2 and stay"""
    host, _, port = stranger.address.rpartition(":")

    def one(number: int) -> None:
        held: list[socket.socket] = []
        while not stranger.over:
            try:
                made = socket.create_connection((host, int(port)), timeout=5)
            except OSError as error:
                stranger.hear(f"connect: {os.strerror(error.errno or 0)}")
                stranger.rest(0.05)
                continue
            stranger.sent["connections"] += 1
            if number % 2:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                made.close()
            else:
                made.sendall(PREFACE)
                held.append(made)
                if len(held) > 200:
                    held.pop(0).close()
        for each in held:
            each.close()

    stranger.together(4, one)
