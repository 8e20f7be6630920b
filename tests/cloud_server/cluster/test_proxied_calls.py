"""Calls that a front hands on: those whose answers nobody fetches hold nothing that others need, and a drain waits."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from cloud_server.access import Caller
from cloud_server.cluster import relay
from cloud_server.cluster.relay import ProxiedCall, ProxiedCalls
from cloud_server.limits import Limits
from cloud_server.transport import INFER
from protos.inference import inference_pb2 as pb
from shared_hooks.errors import ServerUnavailable
from studies.attacks.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame, headers, message
from studies.attacks.http2.frames import Connection as Raw
from tests.cloud_server.cluster.fake_cluster import Cluster, FakeRay, cluster
from tests.cloud_server.cluster.test_relay import answer, edge
from tests.cloud_server.fakes import FakeEngine, GrpcClient, hello
from tests.cloud_server.inference.served import asked, engine
from tests.cloud_server.transport.test_strangers import UNREAD
from tests.waiting import PATIENCE, eventually

ONE = asked(torch.zeros(2, 8)).SerializeToString()
FIRST = {INFER: ONE, "/isthmus.v1.Split/Session": hello("stranger").SerializeToString()}


def unread(there: Cluster, stack: ExitStack, method: str, count: int) -> None:
    """So many calls of a client to whom nothing may be sent."""
    raw = Raw(there.front.address, settings=UNREAD)
    stack.callback(raw.close)
    for number in range(count):
        stream = 2 * number + 1
        raw.send(
            frame(HEADERS, END_HEADERS, stream, headers(method))
            + frame(DATA, END_STREAM, stream, message(FIRST[method]))
        )


@pytest.mark.parametrize("method", FIRST)
def test_calls_with_unfetched_answers_are_evicted(method: str) -> None:
    """The replica is done with them, so it does not count them."""
    limits = Limits(max_clients=2, max_probes=1, max_profiles=1, idle_seconds=0.05)
    models = {"residual": [engine()], "fake": [FakeEngine()]}
    with cluster(models, limits=limits) as there, ExitStack() as stack:
        for _ in range(3):
            unread(there, stack, method, 3)
            eventually(lambda: there.front._calls)
            connection = edge(there)
            answer(connection, 1, b"x")
            assert len(there.front._calls) <= 4
            connection.close()


def test_unfetched_answers_are_bounded() -> None:
    with cluster({"residual": [engine()]}, limits=Limits(max_inference_bytes=200)) as there, ExitStack() as stack:
        unread(there, stack, INFER, 1)
        eventually(lambda: there.front._held.nbytes)
        channel = stack.enter_context(there.channel())
        with pytest.raises(grpc.RpcError, match="max_inference_bytes is 200"):
            channel.unary_unary(INFER)(ONE, timeout=PATIENCE)


def test_unfetched_answers_of_the_largest_account_are_evicted_first() -> None:
    known, ended = ProxiedCalls(FakeRay(), 4, idle_seconds=9.0), []

    def stay(name: str, number: int) -> ProxiedCall:
        made = ProxiedCall("", "", Caller("", name), 1.0, lambda: ended.append(f"{name} {number} cut off"))
        made.call = SimpleNamespace(cancel=lambda: ended.append(f"{name} {number} reported"))
        return made

    with ExitStack() as stack:
        of_many = [stay("many", number) for number in range(4)]
        for one in of_many:
            stack.enter_context(known.place(one))
        with pytest.raises(ServerUnavailable, match="4 calls are handed on"):
            stack.enter_context(known.place(stay("many", 4)))
        of_many[1].is_sending = True
        stack.enter_context(known.place(stay("few", 0)))
        assert ended == ["many 1 reported", "many 1 cut off"]
        stack.enter_context(known.place(stay("few", 1)))
        assert ended[2:] == ["many 0 reported"] and isinstance(of_many[0].refused, ServerUnavailable)
        with pytest.raises(ServerUnavailable):
            stack.enter_context(known.place(stay("few", 2)))
    assert len(known) == 0


class TestDraining:
    """``NOTIFY_BEATS``: a call that only needs notice has no time for it here."""

    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(relay, "NOTIFY_BEATS", 1e-9)

    @pytest.mark.parametrize("is_session", [True, False], ids=["a session without heartbeats", "one message"])
    def test_calls_in_progress_are_awaited(self, is_session: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, whole = threading.Event(), engine()

        def compute(*args: Any, known: Any = whole.compute) -> Any:
            gate.wait(PATIENCE)
            return known(*args)

        monkeypatch.setattr(whole, "compute", compute)

        def wait(payload: memoryview) -> None:
            gate.wait(PATIENCE)

        models: dict[str, Any] = {"fake": [FakeEngine(wait)]} if is_session else {"residual": [whole]}
        with cluster(models) as there, there.channel() as channel:

            def leave() -> None:
                there.front.drain()
                there.front.close()

            if is_session:
                client = GrpcClient(channel, hello())
                client.ask(1, b"slow")
            else:
                call = channel.unary_unary(INFER).future(ONE, timeout=PATIENCE)
            ((replica,),) = there.ray.replicas.values()
            eventually(lambda: replica.pending() == 1)
            leaving = threading.Thread(target=leave)
            leaving.start()
            leaving.join(0.2)
            gate.set()
            if is_session:
                assert bytes(client.answer(1).data) == b"wols"
                client.half_close()
            else:
                assert pb.ModelInferResponse.FromString(call.result()).model_name == "residual"
            leaving.join(PATIENCE)
            assert not leaving.is_alive()

    def test_calls_that_do_not_wait_are_not_proxied(self) -> None:
        with cluster({"fake": [FakeEngine()]}, limits=Limits(drain_seconds=1e5)) as there:
            connection = edge(there)
            answer(connection, 1, b"x")
            there.front.drain()
            assert len(there.front._calls) == 1
            connection.close()
