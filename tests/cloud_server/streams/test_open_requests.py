"""Requests whose payload comes before their header: answered like others, and refused by name where they lie."""

from __future__ import annotations

import dataclasses

import pytest

from cloud_server.core import Core
from cloud_server.requests.request import OPEN_HEADER_BYTES
from protos.isthmus.v1 import split_pb2
from tests.cloud_server.fakes import CoreClient, FakeEngine, cancel, chunk, header, hello, make_crossing, upload
from tests.cloud_server.small import SMALL, failure
from tests.waiting import eventually

NBYTES = 1000
CROSSING = make_crossing(NBYTES)
DATA = bytes(range(250)) * 4


def announced(id: int, **changes: object) -> split_pb2.ClientFrame:
    return header(id, CROSSING, **{"header": b"", "payload_bytes": NBYTES + 128, "open": True, **changes})


def closing(id: int, nbytes: int = NBYTES, text: bytes = b"fake") -> split_pb2.ClientFrame:
    return split_pb2.ClientFrame(closing=split_pb2.Closing(id=id, header=text, payload_bytes=nbytes))


@pytest.fixture
def client(core: Core) -> CoreClient:
    client = CoreClient(core)
    assert client.other("welcome").welcome.open
    client.send(upload(CROSSING))
    return client


def begin(client: CoreClient, id: int, come: int = NBYTES) -> None:
    client.send(announced(id))
    for start in range(0, come, 400):
        client.send(chunk(id, start, DATA[start : min(come, start + 400)]))


def test_open_request_is_answered_once_closed(core: Core, client: CoreClient, engine: FakeEngine) -> None:
    begin(client, 1)
    client.ask(2, DATA)  # others go on meanwhile
    assert bytes(client.answer(2).data) == DATA[::-1]
    assert engine.computed == 1
    client.send(closing(1))
    assert bytes(client.answer(1).data) == DATA[::-1]
    eventually(lambda: core.requests.held_bytes == 0)


def test_a_client_that_comes_back_asks_for_it_whole(core: Core, client: CoreClient, engine: FakeEngine) -> None:
    begin(client, 1, 800)
    again = CoreClient(core)  # before the old stream was seen to be dead
    again.ask(1, DATA, CROSSING)
    assert bytes(again.answer(1).data) == DATA[::-1]
    assert engine.computed == 1
    # closed on one stream, and asked for on another: it is one request, computed once
    begin(again, 2)
    again.send(closing(2))
    again.answer(2)
    third = CoreClient(core)
    third.ask(2, DATA, CROSSING)
    assert bytes(third.answer(2).data) == DATA[::-1]
    assert engine.computed == 2


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"header": b"fake"}, "BadFrame", "has no header yet"),
        ({"payload_bytes": NBYTES + 129}, "TooLarge", "at a cut that takes 1128 at most"),
        ({"payload_bytes": 1 << 40}, "TooLarge", "max_request_bytes"),
        ({"payload_bytes": 0}, "TooLarge", "at a cut that takes"),
        ({"area_offset": 4}, "BadFrame", "area"),
        ({"file": split_pb2.FileInput(suffix=".png")}, "BadFrame", "may be open"),
        ({"session_id": 1, "decoding": split_pb2.Decoding(cut="layer")}, "BadFrame", "a step"),
        ({"cut_digest": "none"}, "Disagreement", "upload it"),
    ],
)
def test_announcements_that_are_refused(
    core: Core, client: CoreClient, changes: dict[str, object], error: str, says: str
) -> None:
    client.send(announced(1, **changes))
    kind, message = failure(client, 1)
    assert kind == error and says in message
    # what was on its way is skipped, and the stream continues
    client.send(chunk(1, 0, DATA), closing(1))
    client.ask(2, DATA)
    assert bytes(client.answer(2).data) == DATA[::-1]
    eventually(lambda: core.requests.held_bytes == 0)


@pytest.mark.parametrize(
    ("come", "nbytes", "text", "error", "says"),
    [
        (800, NBYTES, b"fake", "BadFrame", "800 have come"),
        (800, 800, b"fake", "BadFrame", "the cut has 1000"),
        (1000, 1 << 62, b"fake", "BadFrame", "1000 have come"),
        (1000, 1000, b"wrong", "BadFrame", "not one of a fake frontier"),
        (1000, 1000, b"fake" + bytes(OPEN_HEADER_BYTES), "TooLarge", "closes a request"),
    ],
)
def test_ends_that_are_refused(
    core: Core, client: CoreClient, come: int, nbytes: int, text: bytes, error: str, says: str
) -> None:
    begin(client, 1, come)
    client.send(closing(1, nbytes, text))
    kind, message = failure(client, 1)
    assert kind == error and says in message
    assert core.requests.held_bytes == 0
    client.ask(2, DATA)
    client.answer(2)


def test_excess_bytes_are_refused(core: Core, client: CoreClient) -> None:
    client.send(announced(1, payload_bytes=500), chunk(1, 0, DATA[:600]))
    assert "overruns a payload of 500 bytes" in failure(client, 1)[1]
    assert core.requests.held_bytes == 0


@pytest.mark.parametrize("what", ["never announced", "closed twice", "not open"])
def test_a_stream_that_closes_what_is_not_open_ends(client: CoreClient, what: str) -> None:
    if what == "closed twice":
        begin(client, 1)
        client.send(closing(1))
        client.answer(1)
        assert client.send(closing(1))  # its chunks, too, may still be on their way
        client.ask(2, DATA)
        client.answer(2)
    elif what == "not open":
        client.send(header(1, CROSSING), closing(1))
        assert "was not open" in failure(client, 1)[1]
    else:
        client.send(closing(1))
        assert "was not announced" in str(client.ended())


@pytest.mark.parametrize("how", ["cancelled", "left"])
def test_abandoned_announcement_frees_its_memory(core: Core, client: CoreClient, how: str) -> None:
    begin(client, 1, 400)
    assert core.requests.held_bytes >= NBYTES
    if how == "cancelled":
        client.send(cancel(1), closing(1))
        assert failure(client, 1)[0] == "Cancelled"
    else:
        client.leave()
    assert core.requests.held_bytes == 0


def test_deadline_counts_from_the_announcement(engine: FakeEngine) -> None:
    with Core([engine], dataclasses.replace(SMALL, deadline_seconds=0.05)) as core:
        client = CoreClient(core, greet=False)
        client.send(hello(), upload(CROSSING), announced(1))
        eventually(lambda: (core.requests.sweep(), core.requests.held_bytes == 0)[1])
        assert failure(client, 1)[0] == "DeadlineExceeded"
