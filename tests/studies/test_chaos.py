"""Faults on real processes, in a short form; and that the study would see what it looks for."""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from studies.chaos import __main__ as chaos
from studies.chaos.__main__ import run
from studies.chaos.faults import OTHER_WEIGHTS
from studies.chaos.findings import Episode, computed_twice, refused_by_name, row, without_service
from studies.experiments.relay import Relay
from tests.starts import forked

PATIENCE = 30.0


@pytest.fixture(autouse=True, scope="module")
def processes_are_forked() -> Iterator[None]:
    with forked("studies.chaos.crowd.subprocess", "studies.chaos.served.subprocess"):
        yield


def test_nothing_is_lost_wrong_or_computed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = argparse.Namespace(
        seed=1,
        minutes=0.0,  # each fault once
        requests=0,
        faults=["half open"],
        clients=["large"],
        pause=0.05,
        patience=300.0,
        server_arguments="",  # one process: it starts sooner
    )
    monkeypatch.setattr(chaos, "CALM_SECONDS", 0.2)
    result = run(options, tmp_path)
    assert (result["lost"], result["wrong"], result["computed_twice"]) == (0, 0, [])
    assert [one["fault"] for one in result["faults"]] == ["half open"] and result["asked"] > 2


def one(asked: float, answered: float, came: str = "ok", **more: Any) -> dict[str, Any]:
    return {"asked": asked, "answered": answered, "came": came, "client": "c", "kind": "small", "sends": 1, **more}


def test_time_without_service_begins_when_the_fault_is_healed() -> None:
    known = [one(time, time + 0.1) for time in (0, 1, 2, 9, 9.5, 12)]
    assert without_service(known, Episode("f", 1.5, 5.0, 13.0)) == pytest.approx([4.1])  # until 9.1
    assert without_service([one(9, 9.1)], Episode("f", 1.5, 5.0, 13.0)) == []  # it came later
    found = row("f", [Episode("f", 1.5, 5.0, 13.0)], [*known, one(3, 8, "ServerUnavailable", why="gone")])
    assert (found["asked"], found["lost"], found["why"], found["fixed_max"]) == (5, 1, ["gone"], 4.1)


def test_a_server_with_other_weights_may_refuse_by_name_while_it_has_them() -> None:
    episodes = [Episode(OTHER_WEIGHTS, 1.5, 5.0, 13.0)]
    heard = [one(1, 2, "Disagreement", why="weights"), one(3, 4, "Disagreement", why="weights")]
    found = row(OTHER_WEIGHTS, episodes, [one(0, 1), *heard, one(12, 13)])
    assert (found["refused_by_name"], found["lost"]) == (2, 0)
    assert not refused_by_name(one(0.5, 1, "Disagreement", why="weights"), episodes)
    assert not refused_by_name(one(3, 4, "ServerUnavailable", why="gone"), episodes)
    assert not refused_by_name(heard[1], [Episode("f", 1.5, 5.0, 13.0)])


def test_unreported_double_computation_is_found(tmp_path: Path) -> None:
    file = tmp_path / "computed"
    file.write_text("1 c 1\n1 c 2\n1 c 2\n1 c 3\n2 c 3\n1 c 4\n2 c 4\n")
    known = [one(0, 1, id=3, sends=2), one(0, 1, id=4)]
    assert computed_twice(file, known) == ["c 2", "c 4"]


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_slices_and_a_slow_link_change_no_byte(echo: tuple[str, int]) -> None:
    data = bytes(range(256)) * 20
    for name, value in (("slices", 7), ("rate", 1e5)):
        with Relay(echo) as relay, socket.create_connection(relay.address, PATIENCE) as connection:
            setattr(relay, name, value)
            connection.sendall(data)
            back = b""
            while len(back) < len(data):
                back += connection.recv(1 << 16)
            assert back == data


@pytest.mark.parametrize("fault", ["vanish", "halve"])
def test_dead_connection_is_replaced_silently(echo: tuple[str, int], fault: str) -> None:
    with Relay(echo) as relay:
        with socket.create_connection(relay.address, PATIENCE) as dead:
            dead.sendall(b"x")
            assert dead.recv(1) == b"x"
            getattr(relay, fault)()
            dead.sendall(b"y")
            dead.settimeout(0.2)
            with pytest.raises(TimeoutError):
                dead.recv(1)
        with socket.create_connection(relay.address, PATIENCE) as alive:
            alive.sendall(b"z")
            assert alive.recv(1) == b"z"


def test_an_end_in_the_middle_is_an_end(echo: tuple[str, int]) -> None:
    with Relay(echo) as relay, socket.create_connection(relay.address, PATIENCE) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        relay.end()
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
