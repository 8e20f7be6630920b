"""An old and a new server at one port: clients move by draining, and nothing fails."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.models import ServedModel
from cloud_server.transport import CloudServer, check_free
from edge_client import ConnectionOptions, EdgeClient, ModelChoice
from shared_hooks import WrappedModel
from shared_hooks.errors import SpecError
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.models import load_spec
from tests.ports import free_port
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="this system shares no ports")
ROLLS = 5


def serve(port: int, reuse_port: bool = True) -> CloudServer:
    limits = Limits()
    engine = ServedModel(ModelEntry(load_spec("digits")), torch.device("cpu"), Lifecycle("cloud"), limits.rehearsals())
    core = Core([engine], limits)
    try:
        server = CloudServer(core, f"127.0.0.1:{port}", reuse_port=reuse_port)
    except BaseException:
        core.close()
        raise
    server.start()
    return server


def end(server: CloudServer) -> bool:
    """As SIGTERM does; whether all was answered."""
    server.drain()
    answered = server.core.wait_idle(PATIENCE)
    server.stop(PATIENCE)
    return answered


@contextlib.contextmanager
def asking(client: EdgeClient, x: torch.Tensor) -> Iterator[list[Any]]:
    """Two threads that ask all the time, and what they got."""
    got: list[Any] = []
    over = threading.Event()

    def ask(cut: int) -> None:
        while not over.is_set():
            try:
                got.append(client.infer(x, split=cut).output)
            except Exception as error:
                got.append(error)

    threads = [threading.Thread(target=ask, args=(cut,)) for cut in (0, 7)]
    for thread in threads:
        thread.start()
    try:
        yield got
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_rolls_under_load_lose_nothing() -> None:
    port = free_port()
    (x,), _ = load_spec("digits").example(torch.device("cpu")) or ((torch.zeros(1),), {})
    with WrappedModel(load_spec("digits").load_model()) as whole:
        wanted = whole.whole(x)
    server = serve(port)
    options = ConnectionOptions(patience=PATIENCE)
    choice = ModelChoice("digits", device="cpu", threads=1)
    with EdgeClient(f"127.0.0.1:{port}", choice, metrics=False, connection=options) as client:
        with asking(client, x) as got:
            for _ in range(ROLLS):
                before = len(got)
                eventually(lambda least=before + 5: len(got) > least)  # type: ignore[misc]
                new = serve(port)
                assert end(server)
                server = new
            before = len(got)
            eventually(lambda: len(got) > before + 5)
        assert client.counters.streams > ROLLS
    end(server)
    assert [one for one in got if isinstance(one, Exception)] == []
    assert all(torch.equal(one, wanted) for one in got)


def test_a_draining_server_listens_no_more() -> None:
    server = serve(free_port())
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE):
        pass
    server.drain()

    def refused() -> bool:
        try:
            socket.create_connection(("127.0.0.1", server.port), PATIENCE).close()
        except ConnectionError:
            return True
        return False

    eventually(refused)
    server.stop(0)


def test_a_port_is_shared_only_where_both_say_so() -> None:
    server = serve(free_port())
    address = f"127.0.0.1:{server.port}"
    with pytest.raises(SpecError, match="in use"):
        serve(server.port, reuse_port=False)
    with pytest.raises(SpecError, match="in use"):  # what the command asks before it loads anything
        check_free(address)
    check_free(address, reuse_port=True)
    end(server)
