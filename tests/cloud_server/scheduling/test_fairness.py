"""Fairness between accounts and clients in a server without a transport."""

from __future__ import annotations

from cloud_server.access import Caller
from cloud_server.core import Core
from tests.cloud_server.fakes import CoreClient, FakeEngine
from tests.cloud_server.small import SMALL, Gate


def order(*asked: tuple[Caller, str, int]) -> str:
    """In which order (caller, client id, how many) requests that wait are computed, each named by its client id."""
    gate, computed = Gate(), []

    def before(payload: memoryview) -> None:
        gate(payload)
        computed.append(bytes(payload).decode())

    with Core([FakeEngine(before)], SMALL) as core:
        first = CoreClient(core, client_id="0", caller=Caller("first"))
        first.ask(0, b"0")
        gate.wait_entered()
        first.leave()
        clients = []
        for caller, client_id, count in asked:
            client = CoreClient(core, client_id=client_id, caller=caller)
            clients.append((client, count))
            for id in range(count):
                client.ask(id, client_id.encode())
        gate.opened.set()
        for client, count in clients:
            for id in range(count):
                client.answer(id)
    return "".join(computed[1:])


def test_a_client_that_asks_once_does_not_wait_for_one_that_asked_much_before() -> None:
    flood, honest = Caller("a", identity="flood"), Caller("b", identity="honest")
    assert order((flood, "f", 4), (honest, "h", 1)).index("h") <= 1


def test_two_streams_of_one_account_are_one_account() -> None:
    flood, honest = Caller("a", identity="flood"), Caller("b", identity="honest")
    assert order((flood, "f", 2), (flood, "g", 2), (honest, "h", 2)).rindex("h") <= 4


def test_the_same_account_serves_its_clients_in_turn() -> None:
    assert order((Caller("a:1"), "f", 4), (Caller("a:2"), "h", 1)).index("h") <= 1


def test_reported_waits_are_the_accounts_own() -> None:
    gate = Gate()
    with Core([FakeEngine(gate)], SMALL) as core:
        flood, honest = Caller("a", identity="flood"), Caller("b", identity="honest")
        client = CoreClient(core, caller=flood)
        for id in range(3):
            client.ask(id, b"f")
        gate.wait_entered()
        gate.opened.set()
        for id in range(3):
            client.answer(id)
        assert core.load(flood).queue_ns > 0 and core.load(honest).queue_ns == 0
