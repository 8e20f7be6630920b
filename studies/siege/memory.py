"""Memory follows the limits: the resident size of a server that is full of all that strangers may leave there.

python -m studies.siege.memory
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import grpc
import psutil

from cloud_server.limits import MIB
from protos.isthmus.v1 import split_pb2
from shared_hooks.crossing import digest_of
from studies.siege.filled import LIMITS
from tests.cloud_server.fakes import GrpcClient, acknowledge, chunk, header, hello, make_crossing, upload

SIZE = 8 * MIB - 1000
BIG = make_crossing(SIZE, "big")
KEPT = LIMITS.max_cuts_bytes + LIMITS.max_pending_bytes + LIMITS.max_answer_bytes
UNDER_WAY = LIMITS.max_clients * 2 * LIMITS.max_message_bytes  # one frame is received and one is sent on a stream


class Mute(GrpcClient):
    """Reads nothing."""

    def _read(self) -> None:
        threading.Event().wait()


def cuts(client: GrpcClient) -> None:
    empty = json.loads(make_crossing(0).to_bytes())
    for number in range(30):
        numbers = [10**9 + 100_000 * number + at for at in range(60_000)]
        data = json.dumps({**empty, "inputs": [numbers, []]}).encode()
        client.send(split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=digest_of(data), data=data)))


def uploads(client: GrpcClient, ids: range, short: int) -> None:
    """Payloads but for their last ``short`` bytes."""
    client.send(upload(BIG))
    for id in ids:
        client.send(header(id, BIG))
        for at in range(0, SIZE - short, MIB // 2):
            client.send(chunk(id, at, bytes(min(MIB // 2, SIZE - short - at))))


def settled(reading: Callable[[], int]) -> int:
    """What it is when it has stopped to change."""
    last = -1
    for _ in range(40):
        now = reading()
        if abs(now - last) < MIB:
            break
        last = now
        time.sleep(1.2)
    return now


def main() -> int:
    """Prints what is resident beside the limits; status 1 where it is more than 1.2 times as much."""
    command = [sys.executable, "-m", "studies.siege.filled"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        address = f"127.0.0.1:{int(process.stdout.readline())}"
        channels = [grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(7)]
        first = GrpcClient(channels[0], hello("first"))
        first.ask(1, bytes(MIB))
        first.answer(1)
        first.send(acknowledge(1))
        memory = psutil.Process(process.pid)
        before = settled(lambda: memory.memory_info().rss)
        cuts(first)
        for number in (1, 2, 3):
            uploads(Mute(channels[number], hello(f"reads nothing {number}")), range(8), short=0)
            settled(lambda: memory.memory_info().rss)
        for number in (4, 5):
            uploads(GrpcClient(channels[number], hello(f"sends half {number}")), range(6), short=1)
        full = settled(lambda: memory.memory_info().rss) - before
        honest = GrpcClient(channels[6], hello("honest"))
        honest.ask(1, b"abc")
        assert honest.answer(1).reply
        for channel in channels:
            channel.close()
        process.stdin.close()
    ratio = full / (KEPT + UNDER_WAY)
    print(
        f"{full / MIB:.0f} MiB resident; the limits are {KEPT / MIB:.0f} + {UNDER_WAY / MIB:.0f} MiB: {ratio:.2f} times"
    )
    return int(ratio > 1.2)


if __name__ == "__main__":
    sys.stdout.flush()
    sys.exit(main())
