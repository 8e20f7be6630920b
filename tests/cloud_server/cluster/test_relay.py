"""A front hands calls on: nothing is lost when replicas come and go, and nobody gets in another way."""

from __future__ import annotations

import dataclasses
import os
import queue
import time
import urllib.request
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cloud_server.access import Caller, Policy, entry, hash_of, new_token
from cloud_server.cluster import passport, relay
from cloud_server.cluster.census import ReplicaPlace
from cloud_server.cluster.passport import stamp
from cloud_server.cluster.relay import key
from cloud_server.config import ModelEntry
from cloud_server.limits import Limits
from edge_client.credentials import Credentials
from edge_client.transport.connection import Backoff, Connection
from edge_client.transport.exchange import Exchange, Outgoing
from edge_client.transport.options import ConnectionOptions
from edge_client.transport.times import Stamps
from protos.inference import inference_pb2 as pb
from protos.isthmus.v1 import split_pb2, split_pb2_grpc
from shared_hooks.errors import Disagreement, IsthmusError, NotAuthenticated, UnknownModel
from shared_hooks.models import load_spec
from shared_hooks.modules.manifest import encode
from tests.cloud_server.cluster.fake_cluster import Cluster, cluster, kill
from tests.cloud_server.fakes import FakeEngine, GrpcClient, hello, make_crossing
from tests.cloud_server.inference.served import asked, engine, outputs
from tests.cloud_server.real import Residual
from tests.waiting import PATIENCE, eventually

TOKEN = new_token()
BEARER = [("authorization", f"Bearer {TOKEN}")]


def edge(cluster: Cluster, token: str | None = None, **changes: object) -> Connection:
    """The edge's own connection, as it is."""
    options = ConnectionOptions(patience=PATIENCE, credentials=Credentials(token=token))
    return Connection(cluster.front.address, hello(**changes), options, Backoff(first=0.02, ceiling=0.2))  # type: ignore[arg-type]


def ask(connection: Connection, id: int, data: bytes) -> Exchange:
    crossing = make_crossing(len(data))
    outgoing = Outgoing(crossing.digest, crossing.to_bytes(), b"fake", (memoryview(data),), len(data))
    one = Exchange(
        id, outgoing, until=time.monotonic() + PATIENCE, stamps=Stamps(), check_header=lambda header, size: None
    )
    connection.submit(one)
    return one


def answer(connection: Connection, id: int, data: bytes) -> None:
    one = ask(connection, id, data)
    assert one.wait() and one.error is None, one.error
    assert bytes(one.payload) == data[::-1]


def refused(cluster: Cluster, **how: object) -> IsthmusError:
    connection = edge(cluster, **how)  # type: ignore[arg-type]
    with pytest.raises(IsthmusError) as error:
        connection.open(PATIENCE)
    connection.close()
    return error.value


class TestStreams:
    def test_megabytes_both_ways_for_an_edge_that_knows_nothing_of_it(self) -> None:
        with cluster({"fake": [FakeEngine()]}) as there:
            connection = edge(there)
            answer(connection, 1, bytes(range(256)) * 12_501)
            answer(connection, 2, b"")
            connection.close()

    def test_digests_that_differ_are_distinguished_through_a_front(self) -> None:
        environment = {**FakeEngine().identity.environment, "model_configuration": "another"}
        facts = encode({("set", "norm", "eps"): "1e-05", ("usual", "norm", "groups"): "1"})
        with cluster({"fake": [FakeEngine()]}) as there:
            connection = edge(there, environment=environment)
            connection._describe = lambda: facts
            assert list(connection.open(PATIENCE).notes) == ["norm: groups: client 1, server has none"]
            connection.close()

    def test_a_dead_replica_loses_nothing(self) -> None:
        first, second = FakeEngine(lambda payload: time.sleep(0.05)), FakeEngine()
        with cluster({"fake": [first, second]}) as there:
            connection = edge(there)
            waiting = {id: ask(connection, id, b"%d" % id) for id in range(1, 9)}
            eventually(lambda: first.computed > 0)
            kill(there.ray.replicas["fake"].pop(0))
            for id, one in waiting.items():
                assert one.wait() and one.error is None, one.error
                assert bytes(one.payload) == (b"%d" % id)[::-1]
            assert second.computed > 0
            connection.close()

    def test_a_dead_replica_that_is_still_named_is_waited_out(self) -> None:
        with cluster({"fake": [FakeEngine(), FakeEngine()]}) as there:
            connection = edge(there)
            answer(connection, 1, b"before")
            kill(there.ray.replicas["fake"][0])
            one = ask(connection, 2, b"after")
            asked = len(there.ray.asked)
            eventually(lambda: len(there.ray.asked) > asked)  # and the dead one was named
            there.ray.replicas["fake"].pop(0)
            assert one.wait() and one.error is None
            connection.close()

    def test_a_replica_that_says_nothing_is_passed_over(self) -> None:
        with cluster({"fake": [FakeEngine()]}) as there:
            there.ray.silent.add("fake")
            connection = edge(there)
            answer(connection, 1, b"x")
            assert connection.counters.attempts == 1
            connection.close()

    def test_moved_client_finds_its_requests_answered(self) -> None:
        first, second = FakeEngine(), FakeEngine()
        with cluster({"fake": [first]}) as there:
            connection = edge(there)
            answer(connection, 1, b"one")
            with cluster({"fake": [second]}) as other:
                there.ray.replicas["fake"].insert(0, other.ray.replicas["fake"][0])
                there.front._census.look()
                answer(connection, 2, b"two")  # and is asked to leave
                eventually(lambda: connection.state.name == "UNOPENED")
                answer(connection, 3, b"three")
                assert (first.computed, second.computed) == (2, 1)
                connection.close()

    def test_replica_without_an_owner_is_asked_again(self) -> None:
        with cluster({"a": [FakeEngine(model_id="a")], "fake": [FakeEngine()]}) as there:
            ray, groups = there.ray, ("a", "fake")
            edges = {group: edge(there, client_id=group, model_id=group) for group in groups}
            for group in groups:
                answer(edges[group], 1, b"one")
            with cluster({group: [FakeEngine(model_id=group)] for group in groups}) as other:
                ray.silent.update(groups)
                for group in groups:
                    ray.replicas[group].insert(0, other.ray.replicas[group][0])
                there.front._census.look()
                ray.silent.remove("fake")
                there.front._census.look()
                for group in groups:
                    answer(edges[group], 2, b"two")  # and one is asked to leave
                eventually(lambda: edges["fake"].state.name == "UNOPENED")
                assert edges["a"].state.name == "READY"
                ray.silent.clear()
                there.front._census.look()
                answer(edges["a"], 3, b"three")
                eventually(lambda: edges["a"].state.name == "UNOPENED")
                for connection in edges.values():
                    connection.close()

    def test_a_front_that_drains_ends_when_its_clients_have_their_answers(self) -> None:
        slow = FakeEngine(lambda payload: time.sleep(0.5))
        with cluster({"fake": [slow]}) as there:
            connection = edge(there)
            one = ask(connection, 1, b"slow")
            eventually(lambda: there.ray.replicas["fake"][0].pending() == 1)
            there.front.drain()
            assert one.wait() and one.error is None and bytes(one.payload) == b"wols"
            connection.close()

    def test_a_replica_drains_its_own_clients(self) -> None:
        with cluster({"fake": [FakeEngine(), FakeEngine()]}) as there:
            connection = edge(there)
            answer(connection, 1, b"one")
            leaving = there.ray.replicas["fake"].pop(0)
            assert leaving.drain()
            answer(connection, 2, b"two")
            connection.close()

    def test_without_a_replica_it_says_so_and_not_that_the_model_is_unknown(self) -> None:
        with cluster({"fake": []}) as there, there.channel() as channel:
            code, text = GrpcClient(channel, hello()).refusal()
            assert code == "UNAVAILABLE" and "no replica of fake is up yet" in text
            stub = health_pb2_grpc.HealthStub(channel)
            eventually(lambda: stub.Check(health_pb2.HealthCheckRequest()).status == 2)  # NOT_SERVING

    def test_stream_without_hello_is_ended(self) -> None:
        limits = Limits(hello_seconds=0.2)
        with cluster({"fake": [FakeEngine()]}, limits=limits) as there, there.channel() as channel:
            silent = GrpcClient(channel)
            assert silent.refusal()[0] == "CANCELLED"
            wrong = GrpcClient(channel)
            wrong.send_bytes(b"\xff")
            assert wrong.refusal()[0] == "INVALID_ARGUMENT"


class TestVersions:
    def test_each_client_gets_the_version_it_holds(self) -> None:
        old, new = FakeEngine(), FakeEngine()
        new.identity = dataclasses.replace(new.identity, weights_hash="w2")
        with cluster({"fake": [old], "fake-2": [new]}) as there:
            for weights in ("w1", "w2"):
                connection = edge(there, client_id=weights, weights_hash=weights)
                answer(connection, 1, b"x")
                connection.close()
            assert (old.computed, new.computed) == (1, 1)
            error = refused(there, weights_hash="w3")
            assert isinstance(error, Disagreement) and "w2" in str(error)  # the newest says what differs

    def test_the_list_has_all_models(self) -> None:
        with cluster({"a": [FakeEngine(model_id="a")], "b": [FakeEngine(model_id="b")]}) as there:
            with there.channel() as channel:
                reply = split_pb2_grpc.SplitStub(channel).ListModels(split_pb2.ListModelsRequest())
            assert [one.model_id for one in reply.models] == ["a", "b"] and reply.unix_seconds
            error = refused(there, model_id="c")
            assert isinstance(error, UnknownModel) and "there is: a, b" in str(error)

    def test_a_group_that_is_silent_is_left_out_of_lists_and_not_waited_for(self) -> None:
        groups = {"a": [FakeEngine(model_id="a")], "b": [FakeEngine(model_id="b")]}
        with cluster(groups) as there, there.channel() as channel:
            ray = there.ray
            lists = split_pb2_grpc.SplitStub(channel).ListModels, index(channel)
            ray.mute.add("b")
            there.front._census.look()
            ray.asked.clear()
            assert [one.model_id for one in lists[0](split_pb2.ListModelsRequest()).models] == ["a"]
            assert [one.name for one in lists[1](pb.RepositoryIndexRequest()).models] == ["a"]
            assert {group for group, _ in ray.asked} == {"a"}
            ray.mute.add("a")
            there.front._census.look()
            for one, asked in zip(lists, (split_pb2.ListModelsRequest(), pb.RepositoryIndexRequest()), strict=True):
                with pytest.raises(grpc.RpcError, match="no replica answers"):
                    one(asked)


def index(channel: grpc.Channel) -> Any:
    return channel.unary_unary(
        "/inference.GRPCInferenceService/RepositoryIndex",
        pb.RepositoryIndexRequest.SerializeToString,
        pb.RepositoryIndexResponse.FromString,
    )


class TestWhoMay:
    def test_the_front_asks_and_the_replica_knows_whom_it_serves(self, tmp_path: Path) -> None:
        file = tmp_path / "identities.toml"
        file.write_text(entry("alice", hash_of(TOKEN), None) + '\n[identities.alice]\nmodels = ["fake"]\n')
        engines = {"fake": [FakeEngine()], "other": [FakeEngine(model_id="other")]}
        with cluster(engines, identities=file) as there:
            assert isinstance(refused(there), NotAuthenticated)
            assert isinstance(refused(there, token=TOKEN, model_id="other"), UnknownModel)
            connection = edge(there, token=TOKEN)
            connection.open(PATIENCE)
            (session,) = there.ray.replicas["fake"][0].core._sessions
            assert session.caller.identity == "alice" and session.caller.policy.models == ("fake",)
            connection.close()

    def test_of_a_model_that_one_may_not_use_nothing_is_reported_or_asked(self, tmp_path: Path) -> None:
        file = tmp_path / "identities.toml"
        file.write_text(entry("alice", hash_of(TOKEN), None) + '\n[identities.alice]\nmodels = ["fake"]\n')
        with cluster({"fake": [FakeEngine()], "covert": []}, identities=file) as there, there.channel() as channel:
            error = refused(there, token=TOKEN, model_id="other")
            assert isinstance(error, UnknownModel) and "covert" not in str(error)
            there.ray.replicas["covert"].append(there.ray.replicas["fake"][0])
            ask_list = split_pb2_grpc.SplitStub(channel).ListModels
            # It is known now, by another model's name.
            place = there.ray.replicas["fake"][0].place()
            there.front._census._places["covert"] = [ReplicaPlace.of({**place, "models": [("covert", "w1")]})]
            there.ray.asked.clear()
            assert len(ask_list(split_pb2.ListModelsRequest(), metadata=BEARER).models) == 1
            assert {group for group, _ in there.ray.asked} == {"fake"}

    @pytest.mark.parametrize("metadata", [[], [("authorization", "bearer wrong")]], ids=["nothing", "a wrong secret"])
    def test_a_replica_takes_calls_of_fronts_alone(self, metadata: list[tuple[str, str]]) -> None:
        with cluster({"fake": [FakeEngine()]}) as there:
            place = ReplicaPlace.of(there.ray.replicas["fake"][0].place())
            passport = stamp(Caller("ipv4:1.2.3.4:5", "admin"), "guessed")[1]
            with grpc.insecure_channel(place.address) as channel, pytest.raises(grpc.RpcError) as error:
                split_pb2_grpc.SplitStub(channel).ListModels(
                    split_pb2.ListModelsRequest(), metadata=[*metadata, passport]
                )
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED

    def test_a_client_cannot_bring_a_passport_of_its_own(self) -> None:
        with cluster({"fake": [FakeEngine()]}) as there, there.channel() as channel:
            forged = stamp(Caller("ipv4:1.2.3.4:5", "admin"), "guessed")[1]
            method = channel.stream_stream("/isthmus.v1.Split/Session")
            frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            frames.put(hello().SerializeToString())
            call = method(iter(frames.get, None), metadata=[forged])
            with pytest.raises(grpc.RpcError, match="takes no other server's word") as error:
                next(call)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not there.ray.replicas["fake"][0].core._sessions
            frames.put(None)

    def test_the_uses_of_an_identity_that_has_a_quota_are_counted_in_one_place(self) -> None:
        free, counted = Caller("ipv4:1.2.3.4:5", "a"), Caller("ipv4:1.2.3.4:5", "a", Policy(requests_per_minute=9))
        assert key(free, "x") != key(free, "y") and key(counted, "x") == key(counted, "y")

    def test_and_in_no_other_place_when_that_one_is_slow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(relay, "AGAIN_SECONDS", 0.0)
        file = tmp_path / "identities.toml"
        file.write_text(entry("alice", hash_of(TOKEN), None) + "\n[identities.alice]\nrequests_per_minute = 60\n")
        with cluster({"fake": [FakeEngine()]}, identities=file) as there, there.channel() as channel:
            ask_list = split_pb2_grpc.SplitStub(channel).ListModels
            there.ray.silent.add("fake")
            with pytest.raises(grpc.RpcError, match="no replica of fake answers"):
                ask_list(split_pb2.ListModelsRequest(), metadata=BEARER)
            assert {session for _, session in there.ray.asked} == {"identity alice"}
            there.ray.silent.clear()
            assert ask_list(split_pb2.ListModelsRequest(), metadata=BEARER).models

    def test_uncountable_quota_refuses_its_caller(self, tmp_path: Path) -> None:
        file = tmp_path / "identities.toml"
        file.write_text(entry("alice", hash_of(TOKEN), None))
        models = (ModelEntry(load_spec("digits")),) * 2
        with cluster({"fake": [FakeEngine()]}, identities=file, models=models) as there, there.channel() as channel:

            def refusal() -> str:
                try:
                    split_pb2_grpc.SplitStub(channel).ListModels(split_pb2.ListModelsRequest(), metadata=BEARER)
                except grpc.RpcError as error:
                    return str(error)
                return ""

            assert not refusal()
            file.write_text(entry("alice", hash_of(TOKEN), None) + "\n[identities.alice]\nmax_in_flight = 2\n")
            os.utime(file, (1, 1))  # nobody is in the middle of writing it
            there.front._auth._register.refresh()  # as it does every second
            assert "alice" in refusal() and "max_in_flight, and 2 models are served" in refusal()

    def test_between_machines_the_way_is_encrypted_and_the_replica_known(self, tmp_path: Path) -> None:
        tls = passport.make(tmp_path)
        assert tls.key.stat().st_mode & 0o077 == 0
        found = tls.read()
        server = grpc.server(futures.ThreadPoolExecutor(1))
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(found.key, found.chain)]))
        server.start()
        (tmp_path / "other").mkdir()
        another = passport.make(tmp_path / "other").certificate.read_text()
        for certificate, known in ((found.chain.decode(), True), (another, False)):
            with passport.channel(ReplicaPlace("r", f"127.0.0.1:{port}", "s", certificate, ())) as way:
                ready = grpc.channel_ready_future(way)
                if known:
                    ready.result(PATIENCE)
                else:
                    with pytest.raises(grpc.FutureTimeoutError):
                        ready.result(0.5)
        server.stop(0).wait(PATIENCE)


def test_one_page_has_the_metrics_of_all_replicas() -> None:
    with cluster({"fake": [FakeEngine(), FakeEngine()]}, metrics="127.0.0.1:0") as there:
        connection = edge(there)
        answer(connection, 1, b"x")
        connection.close()
        with urllib.request.urlopen(f"http://{there.front.metrics}/metrics", timeout=PATIENCE) as page:
            text = page.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("isthmus_request_success_total{")]
    assert sorted(line.rpartition(" ")[2] for line in lines) == ["0.0", "1.0"]
    assert all('model="fake",replica="fake#' in line for line in lines)
    assert text.count("# TYPE isthmus_request_success_total") == 1 and 'replica="front-' in text


def test_the_open_inference_protocol_is_handed_on_too() -> None:
    model, x = Residual().eval(), torch.arange(16.0).reshape(2, 8)
    with torch.no_grad():
        wanted = model(x)
    with cluster({"residual": [engine()], "fake": [FakeEngine()]}) as there, there.channel() as channel:

        def call(name: str, message: Any = None) -> bytes:
            data = (message or getattr(pb, f"{name}Request")()).SerializeToString()
            found: bytes = channel.unary_unary(f"/inference.GRPCInferenceService/{name}")(data, timeout=PATIENCE)
            return found

        found = outputs(pb.ModelInferResponse.FromString(call("ModelInfer", asked(x))))
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        index = pb.RepositoryIndexResponse.FromString(call("RepositoryIndex"))
        assert sorted(one.name for one in index.models) == ["fake", "residual"]
        metadata = pb.ModelMetadataResponse.FromString(call("ModelMetadata", pb.ModelMetadataRequest(name="residual")))
        assert metadata.name == "residual" and len(metadata.outputs) == 2
        assert pb.ServerReadyResponse.FromString(call("ServerReady")).ready
        with pytest.raises(grpc.RpcError) as error:
            call("ModelReady", pb.ModelReadyRequest(name="nobody"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
