"""Guards whose absence nothing else would notice: faults put in there went unseen once."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cloud_server import access as identities_file
from cloud_server.access import CallCredentials, Identities, Token, written_since
from cloud_server.config import read_config
from cloud_server.fleet import Fleet, ThisProcess
from cloud_server.inference.service import Hold
from cloud_server.limits import Limits
from cloud_server.requests.request_table import Room
from cloud_server.scheduling import scheduler as trim
from cloud_server.scheduling.fair_queue import FairQueue, Payer, Task
from cloud_server.transport.rest.application import read_body
from shared_hooks.errors import NotAuthenticated, ServerUnavailable, TooLarge
from shared_hooks.sharing import Owner
from tests.cloud_server.fleet.served import entry, write_weights


def test_tokens_are_compared_to_their_last_byte() -> None:
    """Hashes that share all but that."""
    known = bytes(31) + b"\x01"
    identities = Identities((Token("edge", known),))
    assert identities.prove(CallCredentials(known, None), 0.0) == "edge"
    for other in (bytes(31) + b"\x02", b"\x01" + bytes(30) + b"\x01", known[:4] + b"\xff" * 28):
        with pytest.raises(NotAuthenticated):
            identities.prove(CallCredentials(other, None), 0.0)


def test_answers_that_a_client_does_not_fetch_take_its_places() -> None:
    room, owner = Room(Limits(max_in_flight=3)), Owner("account", "client")
    room.check_client(owner, 2)
    with pytest.raises(ServerUnavailable, match="not fetched"):
        room.check_client(owner, 3)


def test_a_wait_is_shared_by_the_workers() -> None:
    waits = []
    for workers in (1, 2, 4):
        line = FairQueue(workers)
        payer = Payer("account", "client")
        for job in range(8):
            line.put(Task(job, payer))
        for _ in range(8):
            place = line.take()
            assert place is not None
            line.done(place, 1.0)
        for job in range(8):
            line.put(Task(job, payer))
        waits.append(line.wait(payer))
    assert waits[0] > 0 and waits == pytest.approx([waits[0], waits[0] / 2, waits[0] / 4])


class Freely(Hold):
    def __init__(self) -> None:
        self.held = 0

    def more(self, nbytes: int) -> None:
        self.held += nbytes


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_is_taken_up_to_its_limit_and_no_byte_further(announced: bool) -> None:
    def read(nbytes: int) -> Any:
        async def receive() -> Any:
            return {"type": "http.request", "body": bytes(nbytes)}

        headers = {b"content-length": str(nbytes).encode()} if announced else {}
        return asyncio.run(read_body(headers, receive, Freely(), 1000, lambda: None))

    assert len(read(1000)) == 1000
    with pytest.raises(TooLarge, match="max_request_bytes"):
        read(1001)


def test_weights_that_could_not_be_loaded_are_not_tried_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, weights = tmp_path / "server.toml", tmp_path / "two.safetensors"
    write_weights(weights, 1)
    file.write_text(entry("one") + entry("two", weights) + "[limits]\nmax_model_bytes = 700\n")
    config = read_config(file)
    fleet = Fleet(ThisProcess(config), config.models, limits=config.limits)
    version = next(one for one in fleet.values() if not one.is_resident)
    put: list[int] = []

    def enters() -> Any:
        put.append(1)
        return lambda: None

    version._failed, version._failed_at = ServerUnavailable("broken"), time.monotonic()
    with pytest.raises(ServerUnavailable, match="could not be loaded again: broken"):
        version.enter("account", enters)
    assert not put
    version._failed_at -= 1e6
    monkeypatch.setattr(version, "_wanted", lambda *_: None)
    version.enter("account", enters)
    assert version.waiting == 1
    fleet.close()


def test_a_model_that_writes_its_weights_fails_and_the_next_request_is_right(tmp_path: Path) -> None:
    """By a plain request, through the whole engine."""
    from tests.cloud_server.models.test_left_behind import FAR, WritesABuffer, X, a_file, expected, served, value

    server = served(WritesABuffer, tmp_path)
    header, payload = a_file(X * FAR)
    with pytest.raises(ServerUnavailable, match="had changed in memory and was loaded again"):
        server.compute_file(".npy", header, payload, False, 1 << 20)
    header, payload = a_file(X)
    found = value(server.compute_file(".npy", header, payload, False, 1 << 20), nn.Identity())
    assert torch.equal(found, expected(WritesABuffer, X))


def test_a_token_expires_after_as_many_days_as_were_asked_for() -> None:
    lines = identities_file.entry("edge-1", bytes(32), 2.5).splitlines()
    (said,) = (line.partition(" = ")[2] for line in lines if line.startswith("expires"))
    expires = datetime.fromisoformat(said.replace("Z", "+00:00")).timestamp()
    assert expires == pytest.approx(time.time() + 2.5 * 24 * 3600, abs=60)
    assert "expires" not in identities_file.entry("edge-1", bytes(32), None)


def test_a_file_written_since_and_one_of_another_clock(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    changed = file.stat().st_mtime
    assert written_since([file], changed - 1) and written_since([tmp_path / "none", file], changed - 59)
    assert not written_since([file], changed + 1) and not written_since([file], changed - 61)
    assert not written_since([tmp_path / "none"], 0.0)


def test_default_weights_are_equal() -> None:
    assert Payer("account").weight == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_the_number_of_heaps_of_glibc_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[int, int]] = []
    monkeypatch.setattr(trim.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda *one: reported.append(one)))
    for name in trim._OPTIONS:
        monkeypatch.delenv(name, raising=False)
    trim.few_heaps()
    assert reported == list(trim._OPTIONS.values())
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    reported.clear()
    trim.few_heaps()
    assert (-8, trim.HEAPS) not in reported and len(reported) == 2
