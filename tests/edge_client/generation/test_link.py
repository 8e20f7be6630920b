"""A real client and a real server in two processes: steps over a link that breaks, a server that is replaced."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edge_client import EdgeClient
from edge_client.generation import SessionLink
from edge_client.transport.options import ConnectionOptions
from shared_hooks.errors import (
    CutRefused,
    DeadlineExceeded,
    Disagreement,
    ModelFailed,
    ServerUnavailable,
    SessionLost,
    StepOutOfOrder,
    UnknownLayer,
)
from shared_hooks.lifecycle import Event, Lifecycle
from tests.cloud_server.decoding.tail import CUT
from tests.cloud_server.real import Process
from tests.edge_client.fake_server import FakeServer
from tests.edge_client.transport.connections import Relay
from tests.ports import free_port
from tests.waiting import eventually

SPEC = "small=tests.edge_client.served:Small"
CONFIG = """
[models.small]
factory = "tests.edge_client.served:Small"
decoding = "tests.cloud_server.decoding.tail:Adding"
[observers]
allow = ["activation"]
"""
ROOT = Path(__file__).parents[3]
ROW = torch.ones(1, 1, 4, dtype=torch.bfloat16)


def started(folder: Path, *words: str) -> Process:
    (folder / "server.toml").write_text(CONFIG)
    return Process(str(folder / "server.toml"), *words, cwd=ROOT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = started(tmp_path_factory.mktemp("server"))
    yield process
    process.close()


@pytest.fixture
def client(server: Process) -> Iterator[EdgeClient]:
    with EdgeClient(f"127.0.0.1:{server.port}", SPEC) as client:
        yield client


def test_steps_and_what_they_took(client: EdgeClient) -> None:
    link = SessionLink(client, CUT)
    wide = torch.ones(1, 1, 4096, dtype=torch.bfloat16)
    for number in range(3):
        reply = link.step(1, number, {"text": "x" * 180}, [wide])
        assert reply.header["rows"] == number + 1 and float(reply.tensors[0]) == 4096.0 * (number + 1)
        assert reply.bytes_up <= 8192 + 400 and 0 < reply.bytes_down < 400
        assert reply.durations["compute"] > 0 and set(reply.durations) == {"queue", "decode", "compute", "encode"}
    assert link.step(2, 0, {}, [ROW], (1, 3)).header["rows"] == 4
    assert link.step(1, 3, {}, []).header["rows"] == 3


def test_refusals_are_raised_by_name(client: EdgeClient) -> None:
    link = SessionLink(client, CUT)
    link.step(11, 0, {}, [ROW])
    with pytest.raises(StepOutOfOrder, match="next is 1"):
        link.step(11, 0, {}, [ROW])
    with pytest.raises(SessionLost, match="never opened"):
        link.step(12, 4, {}, [ROW])
    with pytest.raises(Disagreement, match="second"):
        SessionLink(client, "first").step(11, 1, {}, [ROW])
    with pytest.raises(UnknownLayer, match="nowhere"):
        SessionLink(client, "nowhere").step(12, 0, {}, [ROW])
    with pytest.raises(ModelFailed, match="as it was asked"):
        link.step(11, 1, {"fail": "raise"}, [ROW])
    assert link.step(11, 1, {}, [ROW]).header["rows"] == 2
    link.close(11)
    link.close(11)
    with pytest.raises(SessionLost, match="closed"):
        link.step(11, 2, {}, [ROW])


def test_a_deadline_is_the_callers_and_the_next_step_is_reported(client: EdgeClient) -> None:
    """What a step did that nobody waited for is not done again."""
    link = SessionLink(client, CUT, deadline=0.2)
    patient = SessionLink(client, CUT)
    patient.step(21, 0, {}, [ROW])
    with pytest.raises((DeadlineExceeded, ServerUnavailable)):
        link.step(21, 1, {"nap": 1.0}, [ROW])
    eventually(lambda: patient.step(22, 0, {}, [ROW]) is not None)
    with pytest.raises(StepOutOfOrder, match="next is 2"):
        patient.step(21, 1, {}, [ROW])


def test_this_sides_checks_run_while_the_server_computes(client: EdgeClient) -> None:
    link, at = SessionLink(client, CUT), []
    began = time.monotonic()
    link.step(31, 0, {"nap": 0.6}, [ROW], None, lambda: at.append(time.monotonic() - began))
    assert len(at) == 1 and at[0] < 0.5 < time.monotonic() - began


def test_error_of_a_check_replaces_the_answer(client: EdgeClient) -> None:
    """The step is cancelled: whether the server makes it or not, its place is free again."""
    link = SessionLink(client, CUT)

    def refuse() -> None:
        raise CutRefused("not like this")

    for session in range(41, 61):
        with pytest.raises(CutRefused, match="not like this"):
            link.step(session, 0, {"nap": 0.01}, [ROW], None, refuse)
    assert link.step(61, 0, {}, [ROW]).header["rows"] == 1


def test_a_model_that_changes_before_a_step_is_refused_and_works_when_changed_back(server: Process) -> None:
    with EdgeClient(f"127.0.0.1:{server.port}", SPEC) as client:
        link = SessionLink(client, CUT)
        link.step(51, 0, {}, [ROW])
        weight = next(client.wrapped.model.parameters())
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(1.0)
        with pytest.raises(Disagreement, match="weights"):
            link.step(51, 1, {}, [ROW])
        with torch.no_grad():
            weight.copy_(kept)
        try:
            assert link.step(51, 1, {}, [ROW]).header["rows"] == 2
        except StepOutOfOrder:  # the server made it before it was cancelled
            assert link.step(51, 2, {}, [ROW]).header["rows"] == 3


def test_observers_and_hooks_see_steps(server: Process) -> None:
    seen: list[tuple[str, str]] = []

    class Hook:
        def before_request(self, event: Event) -> None:
            seen.append(("begin", event.split))

        def after_request(self, event: Event) -> None:
            seen.append(("end", event.answer.split))

    lifecycle = Lifecycle("edge")
    lifecycle.register(Hook())
    with EdgeClient(f"127.0.0.1:{server.port}", SPEC, observers=["activation"], lifecycle=lifecycle) as client:
        reply = SessionLink(client, CUT).step(1, 0, {}, [ROW])
        assert reply.header["rows"] == 1
    assert seen == [("begin", CUT), ("end", CUT)]


def test_a_link_cut_between_a_step_and_its_answer(server: Process) -> None:
    """It is sent again on another stream, and is computed once."""
    options = ConnectionOptions(heartbeat=0.25)
    with Relay(server.port) as relay, EdgeClient(f"127.0.0.1:{relay.port}", SPEC, connection=options) as client:
        link = SessionLink(client, CUT)
        link.step(1, 0, {}, [ROW])
        threading.Timer(0.2, relay.freeze).start()
        threading.Timer(0.5, relay.thaw).start()
        assert link.step(1, 1, {"nap": 0.4}, [ROW]).header["rows"] == 2
        assert link.step(1, 2, {}, [ROW]).header["rows"] == 3
        assert client.counters.streams > 1


def test_a_server_that_is_replaced_has_no_sessions_and_says_so(tmp_path: Path) -> None:
    port = free_port()
    first = started(tmp_path, "--listen", f"127.0.0.1:{port}")
    try:
        with EdgeClient(f"127.0.0.1:{port}", SPEC) as client:
            link = SessionLink(client, CUT)
            link.step(1, 0, {}, [ROW])
            first.signal(signal.SIGKILL)
            first.wait()
            second = started(tmp_path, "--listen", f"127.0.0.1:{port}")
            try:
                with pytest.raises(SessionLost, match="started since"):
                    link.step(1, 1, {}, [ROW])
                assert link.step(1, 0, {}, [ROW, ROW]).header["rows"] == 2
            finally:
                second.close()
    finally:
        first.close()


def test_a_server_that_is_older_than_sessions() -> None:
    older = pytest.raises(Disagreement, match="older than decoding sessions")
    with FakeServer() as server, EdgeClient(server.address, SPEC) as client, older:
        SessionLink(client, CUT).step(1, 0, {}, [ROW])


def test_closing_never_waits_for_a_server_that_is_gone(tmp_path: Path) -> None:
    process = started(tmp_path)
    try:
        with EdgeClient(f"127.0.0.1:{process.port}", SPEC) as client:
            link = SessionLink(client, CUT)
            link.step(1, 0, {}, [ROW])
            process.signal(signal.SIGKILL)
            process.wait()
            link.close(1)
    finally:
        process.close()
