"""A client's memory on this machine is read if it is as announced, and never for clients on another machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.processes.channel import SharedMemory
from cloud_server.streams.session import ReceiveArea
from protos.frames import HeadedRequest
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame
from tests.cloud_server.fakes import CoreClient, header, hello, make_crossing, upload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
NONCE, HERE = b"0123456789abcdef", "ipv4:127.0.0.1:5"
NBYTES = 1 << 16


@pytest.fixture
def file() -> Iterator[int]:
    file = os.memfd_create("isthmus-area")
    os.pwrite(file, NONCE, 0)
    os.ftruncate(file, NBYTES)
    yield file
    os.close(file)


def reported(file: int, **changes: object) -> split_pb2.Area:
    values = {"pid": os.getpid(), "fd": file, "nbytes": NBYTES, "nonce": NONCE, **changes}
    return split_pb2.Area(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("peer", [HERE, "ipv6:[::1]:7", "unix:"])
def test_payload_in_shared_memory_is_read(file: int, peer: str) -> None:
    area = ReceiveArea.opened(reported(file), peer)
    assert area is not None
    os.pwrite(file, b"hello", 4096)
    into = bytearray(5)
    area.read(4096, memoryview(into))
    assert into == b"hello"
    area.close()


@pytest.mark.parametrize(
    "changes",
    [{"nonce": NONCE[::-1]}, {"nonce": b""}, {"nbytes": 0}, {"nbytes": 1 << 63}, {"fd": 1 << 30}, {"pid": 1 << 31}],
)
def test_area_unlike_its_announcement_is_not_used(file: int, changes: dict[str, object]) -> None:
    assert ReceiveArea.opened(reported(file, **changes), HERE) is None


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.1:5", "ipv6:[fe80::1]:7", "", "unknown"])
def test_shared_memory_is_refused_for_remote_clients(file: int, peer: str) -> None:
    assert ReceiveArea.opened(reported(file), peer) is None


def test_only_memory_is_opened(tmp_path: Path) -> None:
    plain = os.open(tmp_path / "isthmus", os.O_RDWR | os.O_CREAT)
    os.write(plain, NONCE + bytes(NBYTES))
    reader, writer = os.pipe()
    other = os.memfd_create("isthmus")
    os.write(other, NONCE + bytes(NBYTES))
    for one in (plain, reader, writer, other):
        assert ReceiveArea.opened(reported(one), HERE) is None
        os.close(one)


def test_the_servers_own_memory_is_no_clients() -> None:
    memory = SharedMemory(NBYTES)  # it begins with zeros, which anybody may say
    assert ReceiveArea.opened(reported(memory.fd, nonce=bytes(len(NONCE))), HERE) is None
    memory.close()


def test_area_may_be_smaller_than_announced(file: int) -> None:
    area = ReceiveArea.opened(reported(file), HERE)
    assert area is not None
    for offset, nbytes in ((NBYTES - 4, 5), (1 << 63, 1)):
        with pytest.raises(BadFrame, match="of an area of"):
            area.read(offset, memoryview(bytearray(nbytes)))
    os.ftruncate(file, 8192)
    with pytest.raises(BadFrame, match="ends after 8192 bytes"):
        area.read(8000, memoryview(bytearray(500)))
    area.close()
    with pytest.raises(BadFrame, match="cannot be read"):
        area.read(0, memoryview(bytearray(1)))


def test_a_request_is_answered_from_there(core: Core, file: int) -> None:
    os.pwrite(file, b"payload", 5000)
    client = CoreClient(core, greet=False, caller=Caller(HERE))
    client.send(hello(area=reported(file)))
    assert client.other("welcome").welcome.area
    crossing = make_crossing(7)
    client.send(upload(crossing), header(1, crossing, area_offset=5000))
    assert bytes(client.answer(1).data) == b"daolyap"
    # beyond its end, and said to be in two places: refused by name, and the stream continues
    client.send(header(2, crossing, area_offset=NBYTES))
    failed = client.answer(2).failed
    assert failed is not None
    assert failed.error == "BadFrame"
    twice = header(3, crossing, area_offset=5000).request
    client.send(HeadedRequest(twice, (memoryview(b"pay"),)))
    failed = client.answer(3).failed
    assert failed is not None
    assert failed.error == "BadFrame"
    client.ask(4, b"good")
    assert bytes(client.answer(4).data) == b"doog"


def test_no_area_unless_offered(core: Core, file: int) -> None:
    client = CoreClient(core, greet=False, caller=Caller("ipv4:10.0.0.1:5"))
    client.send(hello(area=reported(file)))
    assert not client.other("welcome").welcome.area
    crossing = make_crossing(7)
    client.send(upload(crossing), header(1, crossing, area_offset=5000))
    failed = client.answer(1).failed
    assert failed is not None
    assert "there is none" in failed.message
