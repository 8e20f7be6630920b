"""Messages arrive whole, or the other side is lost; and a worker that lies is never believed."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from cloud_server.processes import worker_process
from cloud_server.processes.channel import MAX_BYTES, Lost, ProcessChannel, RequestTask, SharedMemory
from cloud_server.processes.pooled_model import Crashes
from cloud_server.processes.worker_process import WorkerProcess
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import QuotaExceeded
from shared_hooks.lifecycle import About
from tests.cloud_server.fakes import make_crossing

Pair = tuple[ProcessChannel, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    channel = ProcessChannel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_messages_arrive_whole() -> None:
    ours, theirs = map(ProcessChannel, socket.socketpair())
    big = bytes(range(256)) * 300
    for head, parts in (({"a": 1}, ()), ({"text": "\ud800 ü"}, (b"", big)), ({}, (b"x",) * 7)):
        ours.send(head, *parts)
        assert theirs.receive() == (head, list(parts))
    ours.close()
    with pytest.raises(Lost):
        theirs.receive()
    with pytest.raises(Lost):
        theirs.send({})
    theirs.close()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 9) + bytes(100),
        struct.pack("<II", 1, MAX_BYTES + 1),
        struct.pack("<II", 1, 2) + b"{]",
        struct.pack("<II", 1, 2) + b"[]",
        struct.pack("<II", 1, 1) + b"\xff",
        struct.pack("<II", 1, 100_000) + b"[" * 100_000,
        struct.pack("<II", 1, 10) + b"{}",
    ],
)
def test_invalid_messages(pair: Pair, data: bytes) -> None:
    channel, peer = pair
    peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(Lost):
        channel.receive()


def test_half_a_message_is_waited_for_and_no_longer(pair: Pair) -> None:
    channel, peer = pair
    peer.sendall(struct.pack("<II", 1, 2) + b"{")
    with pytest.raises(TimeoutError):
        channel.receive(0.05)
    peer.sendall(b"}")


def test_send_to_a_hanging_worker_times_out(pair: Pair) -> None:
    """A worker that hangs before it reads: a header larger than the socket's buffer would wait for good."""
    with pytest.raises(TimeoutError):
        pair[0].send({}, bytes(16 << 20), seconds=0.05)


LIAR = """
import json, socket, struct
end = socket.socket(fileno={channel})
end.recv(1 << 16)
for head, *parts in {says!r}:
    parts = [json.dumps(head).encode(), *parts]
    end.sendall(struct.pack(f"<{{len(parts) + 1}}I", len(parts), *map(len, parts)) + b"".join(parts))
end.recv(1 << 16)
"""
REPLY = split_pb2.ReplyHeader(payload_bytes=100).SerializeToString()


@pytest.mark.parametrize(
    "says",
    [
        [({},)],
        [({"is": "reply", "number": 2, "kept": [], "places": []}, REPLY, bytes(100))],
        [({"is": "reply", "number": 1, "kept": [], "places": []}, REPLY, bytes(99))],
        [({"is": "reply", "number": 1, "kept": [], "places": [[50, 100]]}, REPLY)],
        [({"is": "reply", "number": 1, "kept": [], "places": [[-5, 100]]}, REPLY)],
        [({"is": "reply", "number": 1, "kept": [], "places": [[0, 200], [0, -100]]}, REPLY)],
        [({"is": "reply", "number": 1, "kept": [], "places": [[8192, 100]]}, REPLY)],
        [({"is": "reply", "number": 1, "kept": [], "places": 7}, REPLY)],
        [({"is": "reply", "number": 1, "kept": []},)],
        [({"is": "reply", "number": 1, "kept": None, "places": []}, REPLY, bytes(100))],
        [({"is": "reply", "number": 1, "kept": [], "places": []}, b"\xff\xff", bytes(100))],
        [({"is": "failure", "number": 1, "kept": []}, b"", b"")],
        [({"is": "room?", "number": 1, "bytes": -5},)],
        [({"is": "room?", "number": 1, "bytes": "x"},)],
        [({"is": "sorry", "number": 1, "kept": []},)],
    ],
)
def test_a_worker_that_lies_is_lost(monkeypatch: pytest.MonkeyPatch, says: list[object]) -> None:
    monkeypatch.setattr(worker_process, "_boot", lambda _, channel, *__: LIAR.format(channel=channel, says=says))
    memory = SharedMemory(1 << 20)
    worker = WorkerProcess(1, [], memory)
    try:
        payload = memory.allocate(100)
        task = RequestTask("m", About(1, 0), "a", make_crossing(100), "", b"", payload, False, ())
        with pytest.raises(Lost):
            worker.run(task, 60)
    finally:
        worker.kill("")
        assert worker.buried(60)
        worker.close()
        memory.close()


def test_crashes_are_counted_for_a_minute_and_by_account() -> None:
    now = [0.0]
    crashes = Crashes(2, lambda: now[0])
    for now[0] in (0.0, 10.0):
        crashes.check("a")
        crashes.add("a")
    with pytest.raises(QuotaExceeded, match=r"ended 2 workers .* may go on in 50 s"):
        crashes.check("a")
    crashes.check("b")
    now[0] = 60.5
    crashes.check("a")
