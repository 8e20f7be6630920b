"""Probe and Profile over a real gRPC server, with an engine that computes nothing: bounds, load, refusals by name."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.limits import MIB, Limits
from cloud_server.models.engine import Progress
from cloud_server.scheduling.scheduler import QueueClock
from cloud_server.transport.server import CloudServer
from protos.isthmus.v1 import split_pb2, split_pb2_grpc
from protos.padding import Padding
from shared_hooks.errors import CutRefused, QuotaExceeded, ServerUnavailable
from tests.cloud_server.fakes import CoreClient, FakeEngine, GrpcClient, hello
from tests.waiting import PATIENCE, eventually

LIMITS = Limits(
    max_request_bytes=4 * MIB,
    max_message_bytes=2 * MIB,
    max_probes=2,
    max_probe_rounds=20,
    max_profiles=2,
    max_profile_repetitions=50,
)


class ProfiledEngine(FakeEngine):
    """Its profile is what it was asked for; ``hold`` makes it wait in the middle."""

    profile_yields = False

    def __init__(self, *, model_id: str = "fake", example: bool = True) -> None:
        super().__init__(model_id=model_id)
        self.example = example
        self.profiles = 0
        self.hold: threading.Event | None = None
        self.entered = threading.Event()
        self.ended = threading.Event()

    def profile(
        self, warmup: int, repetitions: int, seconds: float, on_progress: Progress, codecs: Sequence[str] = ()
    ) -> dict[str, Any]:
        if not self.example:
            raise CutRefused(f'model "{self.identity.model_id}" has no example input')
        self.entered.set()
        try:
            on_progress(1, 2, "half")
            while self.hold is not None and not self.hold.wait(0.01):
                on_progress(1, 2, "held")
            self.profiles += 1
            return {"warmup": warmup, "repetitions": repetitions, "seconds": seconds, "number": self.profiles}
        finally:
            self.ended.set()


@pytest.fixture
def engine() -> ProfiledEngine:
    return ProfiledEngine()


@pytest.fixture
def server(engine: ProfiledEngine) -> Iterator[CloudServer]:
    server = CloudServer(Core([engine, ProfiledEngine(model_id="bare", example=False)], LIMITS), "127.0.0.1:0")
    server.start()
    yield server
    server.stop(grace=1)


@pytest.fixture
def channel(server: CloudServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def probe(channel: grpc.Channel, *frames: split_pb2.ProbeFrame) -> list[split_pb2.ProbeReply]:
    return list(split_pb2_grpc.SplitStub(channel).Probe(iter(frames)))


def frame(nbytes: int = 0, answer_bytes: int = 0, last: bool = True) -> split_pb2.ProbeFrame:
    return split_pb2.ProbeFrame(padding=bytes(nbytes), last=last, answer_bytes=answer_bytes)


def status(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code().name, caught.value.details()


class TestProbe:
    def test_rounds_on_one_stream(self, channel: grpc.Channel) -> None:
        replies = probe(channel, frame(1000, last=False), frame(500, 1_200_000), frame())
        ends = [reply for reply in replies if reply.last]
        assert [end.received_bytes for end in ends] == [1500, 0]
        assert [len(reply.padding) for reply in replies if not reply.last] == [512 << 10, 512 << 10, 1_200_000 - MIB]
        assert ends[0].server_ns > 0 and ends[0].receive_ns > 0 and ends[0].load.workers == 1

    @pytest.mark.parametrize(
        "frames",
        [[frame(1 * MIB, last=False)] * 4 + [frame(1)], [frame(0, answer_bytes=4 * MIB + 1)]],
        ids=["up", "down"],
    )
    def test_a_round_is_bounded(self, channel: grpc.Channel, frames: list[split_pb2.ProbeFrame]) -> None:
        code, text = status(split_pb2_grpc.SplitStub(channel).Probe(iter(frames)))
        assert code == "RESOURCE_EXHAUSTED" and "TooLarge" in text
        assert probe(channel, frame(10))[0].received_bytes == 10

    def test_rounds_are_counted(self, channel: grpc.Channel) -> None:
        stream = GrowingStream(channel)
        for _ in range(20):
            assert stream.round().last
        code, text = status(stream.more())
        assert code == "UNAVAILABLE" and "20 rounds" in text

    def test_an_idle_stream_ends(self) -> None:
        limits = dataclasses.replace(LIMITS, probe_idle_seconds=0.2)
        server = CloudServer(Core([ProfiledEngine()], limits), "127.0.0.1:0")
        server.start()
        try:
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                code, text = status(GrowingStream(channel).call)
        finally:
            server.stop(grace=1)
        assert code == "DEADLINE_EXCEEDED" and "no round" in text

    def test_streams_are_counted_and_their_places_given_back(self, channel: grpc.Channel) -> None:
        streams = [GrowingStream(channel) for _ in range(2)]
        for stream in streams:
            stream.round()
        code, text = status(split_pb2_grpc.SplitStub(channel).Probe(iter([frame()])))
        assert code == "UNAVAILABLE" and "2 streams" in text
        for stream in streams:
            stream.end()
        assert len(probe(channel, frame())) == 1

    def test_probes_of_an_account_are_bounded(self) -> None:
        limits = dataclasses.replace(LIMITS, max_probes_per_account=1, probe_bytes_per_minute=3_000)
        hostile, honest = Caller("a", "hostile"), Caller("b", "honest")
        with Core([ProfiledEngine()], limits) as core, core.probing(hostile) as one, core.probing(honest):
            with pytest.raises(ServerUnavailable, match="identity hostile has 1 streams"), core.probing(hostile):
                pass
            for answer_bytes in (1_000, 2_000):
                assert one.receive(Padding(memoryview(bytes(500)), True, answer_bytes))
            replies = one.frames()
            assert isinstance(next(replies), Padding) and next(replies).last
            with pytest.raises(QuotaExceeded, match="hostile has used up its 3000 bytes of probes a minute"):
                list(replies)

    def test_a_message_that_is_no_frame_is_named(self, channel: grpc.Channel) -> None:
        call = channel.stream_stream("/isthmus.v1.Split/Probe")(iter([b"\xff\xff\xff"]))
        code, text = status(call)
        assert code == "INVALID_ARGUMENT" and "ProbeFrame" in text


class GrowingStream:
    """A probe that asks on command."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._wanted = threading.Semaphore(0)
        self._over = False
        self.call = split_pb2_grpc.SplitStub(channel).Probe(self._frames())

    def _frames(self) -> Iterator[split_pb2.ProbeFrame]:
        while self._wanted.acquire(timeout=PATIENCE) and not self._over:
            yield frame(10)

    def round(self) -> split_pb2.ProbeReply:
        self._wanted.release()
        reply: split_pb2.ProbeReply = next(self.call)
        return reply

    def more(self) -> Any:
        self._wanted.release()
        return self.call

    def end(self) -> None:
        self._over = True
        self._wanted.release()
        assert list(self.call) == []


def profile(channel: grpc.Channel, model_id: str = "fake", **settings: Any) -> dict[str, Any]:
    replies = list(split_pb2_grpc.SplitStub(channel).Profile(split_pb2.ProfileRequest(model_id=model_id, **settings)))
    assert all(reply.WhichOneof("reply") == "progress" for reply in replies[:-1])
    found: dict[str, Any] = json.loads(replies[-1].profile)
    return found


class TestProfile:
    def test_profile_is_measured_once_for_equal_settings(self, channel: grpc.Channel) -> None:
        first = profile(channel, repetitions=5, seconds=2.0)
        assert first == {"warmup": 3, "repetitions": 5, "seconds": 2.0, "number": 1}
        assert profile(channel, repetitions=5, seconds=2.0) == first
        assert profile(channel, repetitions=6, seconds=2.0)["number"] == 2
        assert profile(channel, repetitions=5, seconds=2.0, fresh=True)["number"] == 3

    def test_requests_follow_a_profile(self, engine: ProfiledEngine) -> None:
        with Core([engine], LIMITS) as core:
            asked = split_pb2.ProfileRequest(model_id="fake", fresh=True)
            list(core.profiles.stream(asked, Caller("test")))
            assert core.profiles._rests_until > 0
            core.profiles._rests_until = time.monotonic() + 1e6
            replies = core.profiles.stream(asked, Caller("test"))
            assert "have their turn" in next(replies).progress.what
            assert "have their turn" in next(replies).progress.what and engine.profiles == 1
            core.profiles._rests_until = 0.0
            assert json.loads(list(replies)[-1].profile)["number"] == 2

    @pytest.mark.parametrize(
        ("settings", "code", "words"),
        [
            ({"model_id": "nothing"}, "NOT_FOUND", "nothing"),
            ({"model_id": "bare"}, "FAILED_PRECONDITION", "bare"),
            ({"seconds": 1e9}, "INVALID_ARGUMENT", "seconds"),
            ({"seconds": float("nan")}, "INVALID_ARGUMENT", "seconds"),
            ({"repetitions": 51}, "INVALID_ARGUMENT", "repetitions"),
        ],
    )
    def test_is_refused_by_name(self, channel: grpc.Channel, settings: Any, code: str, words: str) -> None:
        request = split_pb2.ProfileRequest(**{"model_id": "fake", **settings})
        found, text = status(split_pb2_grpc.SplitStub(channel).Profile(request))
        assert found == code and words in text

    def test_disconnected_client_ends_its_profile(self, channel: grpc.Channel, engine: ProfiledEngine) -> None:
        engine.hold = threading.Event()
        call = split_pb2_grpc.SplitStub(channel).Profile(split_pb2.ProfileRequest(model_id="fake"))
        assert engine.entered.wait(PATIENCE)
        call.cancel()
        assert engine.ended.wait(PATIENCE)
        engine.hold = None
        assert profile(channel)["number"] == 1

    def test_next_profile_waits_for_an_abandoned_one(self, engine: ProfiledEngine) -> None:
        entered, go = threading.Event(), threading.Event()
        measure = engine.profile

        def deaf(warmup: int, repetitions: int, seconds: float, on_progress: Progress, codecs: Any) -> dict[str, Any]:
            entered.set()
            assert go.wait(PATIENCE)
            return measure(warmup, repetitions, seconds, on_progress)

        engine.profile = deaf  # type: ignore[method-assign]
        asked = split_pb2.ProfileRequest(model_id="fake", fresh=True)
        with Core([engine], LIMITS) as core:
            left = core.profiles.stream(asked, Caller("test"))
            assert next(left).progress.what == "starting" and entered.wait(PATIENCE)
            left.close()  # type: ignore[attr-defined]
            following = core.profiles.stream(asked, Caller("test"))
            assert next(following).progress.what == "waiting for another profile"
            go.set()
            assert json.loads(list(following)[-1].profile)["number"] == 1

    def test_profile_takes_a_workers_turn(self, channel: grpc.Channel, engine: ProfiledEngine) -> None:
        engine.hold = threading.Event()
        call = split_pb2_grpc.SplitStub(channel).Profile(split_pb2.ProfileRequest(model_id="fake"))
        assert engine.entered.wait(PATIENCE)
        client = GrpcClient(channel, hello())
        client.ask(1, b"good")
        assert client.other("welcome") and not client.results
        engine.hold.set()
        assert bytes(client.answer(1).data) == b"doog"
        assert [reply for reply in call if reply.WhichOneof("reply") == "profile"]

    @pytest.mark.parametrize("who", [Caller("test"), Caller("other", "honest")])
    def test_profile_yields_between_repetitions(self, engine: ProfiledEngine, who: Caller) -> None:
        engine.hold, engine.profile_yields = threading.Event(), True
        with Core([engine], LIMITS) as core:
            replies = core.profiles.stream(split_pb2.ProfileRequest(model_id="fake"), Caller("test"))
            assert next(replies) and engine.entered.wait(PATIENCE)
            client = CoreClient(core, caller=who)
            client.ask(1, b"good")
            assert bytes(client.answer(1).data) == b"doog"
            engine.hold.set()
            assert list(replies)[-1].profile

    def test_cached_profile_is_answered_during_a_measurement(self, engine: ProfiledEngine) -> None:
        with Core([engine], LIMITS) as core:
            kept = list(core.profiles.stream(split_pb2.ProfileRequest(model_id="fake"), Caller("test")))[-1].profile
            core.profiles._rests_until = 0.0
            engine.hold = threading.Event()
            measured = core.profiles.stream(split_pb2.ProfileRequest(model_id="fake", fresh=True), Caller("a"))
            assert next(measured).progress.what == "starting"
            (at_once,) = core.profiles.stream(split_pb2.ProfileRequest(model_id="fake"), Caller("b"))
            assert at_once.profile == kept
            engine.hold.set()
            list(measured)

    def test_profiles_of_an_account_are_bounded(self, engine: ProfiledEngine) -> None:
        engine.hold = threading.Event()
        limits = dataclasses.replace(LIMITS, max_profiles=4, max_profiles_per_account=1, profiles_per_minute=2)
        hostile, honest = Caller("a", "hostile"), Caller("b", "honest")
        asked = split_pb2.ProfileRequest(model_id="fake", fresh=True)
        with Core([engine], limits) as core:
            first = core.profiles.stream(asked, hostile)
            next(first)
            with pytest.raises(ServerUnavailable, match="identity hostile waits for 1 profiles"):
                next(core.profiles.stream(asked, hostile))
            other = core.profiles.stream(asked, honest)
            assert "waiting" in next(other).progress.what
            engine.hold.set()
            for stream in (first, other):
                core.profiles._rests_until = 0.0
                assert list(stream)[-1].profile
            core.profiles._rests_until = 0.0
            assert list(core.profiles.stream(asked, hostile))[-1].profile
            with pytest.raises(QuotaExceeded, match="identity hostile has used up its 2 measured profiles a minute"):
                next(core.profiles.stream(asked, hostile))

    def test_a_model_that_raises_is_quoted(self, channel: grpc.Channel, engine: ProfiledEngine) -> None:
        def broken(*_: Any) -> dict[str, Any]:
            raise ValueError("thirteen")

        engine.profile = broken  # type: ignore[method-assign]
        request = split_pb2.ProfileRequest(model_id="fake")
        code, text = status(split_pb2_grpc.SplitStub(channel).Profile(request))
        assert code == "INTERNAL" and "thirteen" in text


class TestLoad:
    def test_answers_say_how_busy_the_server_is(self, channel: grpc.Channel, engine: ProfiledEngine) -> None:
        opened, entered = threading.Event(), threading.Event()

        def wait(payload: memoryview) -> None:
            entered.set()
            assert opened.wait(PATIENCE)

        engine.before = wait
        client = GrpcClient(channel, hello())
        for id in (1, 2, 3):
            client.ask(id, b"abc")
        assert entered.wait(PATIENCE)
        eventually(lambda: probe(channel, frame())[-1].load.pending == 3)
        assert probe(channel, frame())[-1].load.workers == 1
        opened.set()
        replies = [client.answer(id).reply for id in (1, 2, 3)]
        assert all(reply is not None for reply in replies)
        assert [reply.load.pending for reply in replies if reply] == [2, 1, 0]
        assert probe(channel, frame())[-1].load.queue_ns > 0

    def test_a_wait_is_forgotten_when_nobody_waits_any_more(self) -> None:
        now = [0.0]
        clock = QueueClock(lambda: now[0])
        assert clock.mean_ns == 0
        for _ in range(50):
            clock.add(1000)
        assert clock.mean_ns == pytest.approx(1000, rel=0.01)
        now[0] = 5.0
        assert clock.mean_ns == pytest.approx(500, rel=0.01)
        now[0] = 500.0
        assert clock.mean_ns == 0
        clock.add(0)
        assert clock.mean_ns == 0, "what is forgotten does not come back with the next request"

    def test_waits_that_are_all_alike_are_their_mean_however_far_apart(self) -> None:
        now = [0.0]
        clock = QueueClock(lambda: now[0])
        for _ in range(50):
            now[0] += 3.0
            clock.add(1000)
        assert clock.mean_ns == pytest.approx(1000, rel=0.01)
