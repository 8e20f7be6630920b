"""A generation outlives its link and its server: the tokens are the same."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from edge_client import EdgeClient, local_server
from edge_client.generation import SplitGenerator
from edge_client.transport.options import ConnectionOptions
from tests.cloud_server.real import Process
from tests.edge_client.generation.speaking import CUT, SPEC, inputs, whole
from tests.edge_client.transport.connections import Relay
from tests.ports import free_port

TOKENS = 12
SOON = ConnectionOptions(heartbeat=0.25, patience=60)


class After:
    """A streamer that does something once after ``number`` tokens."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left = number + 1  # the prompt comes first
        self._act = act

    def put(self, value: torch.Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()

    def end(self) -> None:
        assert self._left <= 0, "it was never done"


def asked(client: EdgeClient) -> dict[str, Any]:
    return {**inputs(client), "max_new_tokens": TOKENS, "do_sample": False}


def test_a_link_cut_in_the_middle() -> None:
    with local_server(SPEC) as server, Relay(int(server.rpartition(":")[2])) as relay:

        def cut() -> None:
            relay.freeze()
            threading.Timer(0.5, relay.thaw).start()

        with EdgeClient(f"127.0.0.1:{relay.port}", SPEC, connection=SOON) as client:
            expected = whole(client, **asked(client))
            found = SplitGenerator(client, CUT).generate(**asked(client), streamer=After(4, cut))
            assert client.counters.streams > 1
    assert torch.equal(found, expected)


def test_a_server_killed_in_the_middle() -> None:
    """The session is made again, on the server that takes its place, from what the edge has sent."""
    listen = f"127.0.0.1:{free_port()}"
    with ExitStack() as servers:
        first = Process("--model", SPEC, "--listen", listen)
        servers.callback(first.close)

        def replace() -> None:
            first.signal(signal.SIGKILL)
            first.wait()
            servers.callback(Process("--model", SPEC, "--listen", listen).close)

        with EdgeClient(listen, SPEC, connection=SOON) as client:
            expected = whole(client, **asked(client))
            found = SplitGenerator(client, CUT).generate(**asked(client), streamer=After(4, replace))
    assert torch.equal(found, expected)
