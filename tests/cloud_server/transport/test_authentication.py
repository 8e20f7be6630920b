"""One door for every RPC of every service: who is refused there is refused everywhere, with the error's own status."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cloud_server.core import Core
from cloud_server.transport import CloudServer
from cloud_server.transport.authentication import AuthInterceptor, Caller
from protos.isthmus.v1 import split_pb2, split_pb2_grpc
from shared_hooks.errors import HookRefused
from shared_hooks.lifecycle import Stage
from shared_hooks.lifecycle.log import LogBounds
from shared_hooks.lifecycle.registry import default
from tests.cloud_server.fakes import FakeEngine

PASS = (("authorization", "Bearer pass"),)


def check(auth: AuthInterceptor, caller: Caller) -> None:
    if PASS[0] not in caller.metadata:
        raise HookRefused("no pass")


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[grpc.Channel]:
    monkeypatch.setattr(AuthInterceptor, "check", check)
    server = CloudServer(Core([FakeEngine()]), "127.0.0.1:0", reflection=True)
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel
    server.stop(grace=1)


Call = Callable[[grpc.Channel, Any], object]


def _first(answers: Any) -> object:
    return next(iter(answers))


CALLS: dict[str, Call] = {
    "Session": lambda c, m: _first(split_pb2_grpc.SplitStub(c).Session(iter([split_pb2.ClientFrame()]), metadata=m)),
    "Probe": lambda c, m: _first(
        split_pb2_grpc.SplitStub(c).Probe(iter([split_pb2.ProbeFrame(last=True)]), metadata=m)
    ),
    "Profile": lambda c, m: _first(split_pb2_grpc.SplitStub(c).Profile(split_pb2.ProfileRequest(), metadata=m)),
    "ListModels": lambda c, m: split_pb2_grpc.SplitStub(c).ListModels(split_pb2.ListModelsRequest(), metadata=m),
    "Check": lambda c, m: health_pb2_grpc.HealthStub(c).Check(health_pb2.HealthCheckRequest(), metadata=m),
    "Watch": lambda c, m: _first(health_pb2_grpc.HealthStub(c).Watch(health_pb2.HealthCheckRequest(), metadata=m)),
    "reflection": lambda c, m: _first(
        reflection_pb2_grpc.ServerReflectionStub(c).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=m
        )
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_unauthenticated_caller_is_refused_by_every_rpc(channel: grpc.Channel, call: Call) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call(channel, ())
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert refused.value.details() == "HookRefused: no pass"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_with_a_pass_the_call_is_answered_or_refused_for_what_it_says(channel: grpc.Channel, call: Call) -> None:
    try:
        call(channel, PASS)
    except grpc.RpcError as error:
        assert error.code() is not grpc.StatusCode.PERMISSION_DENIED, error


def test_refused_calls_are_heard_by_hooks_and_bounded_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AuthInterceptor, "check", check)
    written, heard, lifecycle = io.StringIO(), [], default("cloud")
    handler = logging.StreamHandler(written)
    handler.addFilter(LogBounds(handler, each=3))
    logger = logging.getLogger("cloud_server")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    lifecycle.on(Stage.ON_ERROR)(lambda event: heard.append((event.where.partition(" ")[0], type(event.error))))
    server = CloudServer(Core([FakeEngine()], lifecycle=lifecycle), "127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        for _ in range(10):
            with pytest.raises(grpc.RpcError):
                CALLS["ListModels"](channel, ())
    server.stop(grace=1)
    assert heard == [("/isthmus.v1.Split/ListModels", HookRefused)] * 10
    assert sum("HookRefused: no pass" in line for line in written.getvalue().splitlines()) == 3
