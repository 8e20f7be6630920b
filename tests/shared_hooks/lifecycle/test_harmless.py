"""Hooks on every stage change no bit, whatever they raise, run, wait for or close; and none is called with a lock."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from edge_client import EdgeClient, Failure
from edge_client.transport.options import ConnectionOptions
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import Cancelled, HookRefused, IsthmusError
from shared_hooks.lifecycle import Event, Lifecycle, Stage
from tests.shared_hooks.lifecycle.service import (
    Residual,
    Service,
    Spy,
    everywhere,
    image,
    keys,
    service,
    too_much,
    whole,
)
from tests.waiting import PATIENCE, eventually

CUTS = ("input", "stem", "body", "relu", "edge-only")


def answers_are_exact(client: EdgeClient) -> None:
    for split in CUTS:
        for seed, answer in enumerate(client.infer_many([image(seed) for seed in range(3)], split=split)):
            assert torch.equal(answer.output, whole(image(seed))), split


class TestWhatHooksRaise:
    @pytest.mark.parametrize("kind", [ValueError, HookRefused, SystemExit, KeyboardInterrupt])
    def test_hooks_at_every_stage_change_nothing(self, kind: type[BaseException]) -> None:
        """But for what it says: refusals before a request, and Ctrl-C in the main thread."""
        main = threading.main_thread()

        def bad(event: Event) -> None:
            if kind is KeyboardInterrupt and threading.current_thread() is main:
                return
            if kind is HookRefused and event.stage is Stage.BEFORE_REQUEST:
                return
            raise kind("on purpose")

        spies = Spy("cloud"), Spy("edge")
        for spy in spies:
            everywhere(spy, bad, "bad")
        with service(*spies) as both:
            client = both.client().open()
            answers_are_exact(client)
            failed = list(client.infer_many([too_much(), image()], failures="return"))
            assert isinstance(failed[0], Failure) and not isinstance(failed[1], Failure)
            both.paired()
            both.server.drain()
        for spy in spies:
            came = {one.stage for one in list(spy.emitted)} - {Stage.BEFORE_REQUEST}
            assert all(one.failures <= one.calls for one in spy.listing())
            if kind is not KeyboardInterrupt:
                eventually(lambda spy=spy, came=came: came <= {one.stage for one in spy.listing() if one.failures})  # type: ignore[misc]


AROUND_LAYERS = [
    *("before_head", "before_bank", "after_bank", "after_head"),
    *("before_inject", "after_inject", "before_tail", "after_tail"),
]


class TestWhatHooksRun:
    @pytest.mark.parametrize("stage", AROUND_LAYERS)
    def test_the_model_at_any_place_in_a_forward(self, stage: str) -> None:
        """Heads, tails and the whole, of another input, and torch code; the outer forward stays the last one."""
        lifecycle = Lifecycle()
        ran: list[str] = []
        with WrappedModel(Residual().eval(), lifecycle=lifecycle) as wrapped:
            wrapped.plan(image())

            @lifecycle.on(stage)
            def run(event: Event) -> None:
                other = image(9)
                torch.nn.functional.conv2d(other, torch.ones(1, 3, 3, 3)).relu().sum().item()
                assert torch.equal(wrapped.model(other), whole(other))
                assert torch.equal(wrapped.forward(other), whole(other))
                for cut in ("stem", "relu"):
                    assert torch.equal(wrapped.forward(wrapped.forward(other, end=cut)), whole(other))
                ran.append(event.stage.value)

            for cut in ("input", "stem", "body", "relu"):
                early = wrapped.forward(image(), end=cut)
                names = [layer.name for layer in wrapped.get_layer_metrics()]
                assert names == ["stem", "body", "relu"][: early.layer_id + 1] and set(wrapped.durations()) == {"head"}
                assert torch.equal(wrapped.forward(early, start=cut), whole())
                assert len(wrapped.get_layer_metrics()) == 3 - early.layer_id
                assert set(wrapped.durations()) == {"inject", "compute"}
        assert not [one.last_failure for one in lifecycle.listing() if one.failures]
        assert len(ran) == 4

    def test_the_model_in_the_service(self) -> None:
        """Metrics are those of the request."""
        spies = Spy("cloud"), Spy("edge")
        with service(*spies) as both, both.client() as client:
            client.infer(image())
            models = {"edge": client.wrapped, "cloud": both.served._wrapped}

            def run(event: Event) -> None:
                assert torch.equal(models[event.side].forward(image(9)), whole(image(9)))

            stages = [
                Stage.of(name)
                for name in (*AROUND_LAYERS, "before_encode", "after_encode", "before_decode", "on_result")
            ]
            for spy in spies:
                spy.on(*stages, name="run")(lambda event: run(event))
            for split in CUTS:
                answer = client.infer(image(), split=split)
                assert torch.equal(answer.output, whole())
                names = [layer.name for layer in [*answer.layers_edge, *answer.layers_cloud]]
                assert names == ["stem", "body", "relu", "head.out"]
                assert answer.times.end_to_end == answer.measured_ns
            assert not [one.last_failure for spy in spies for one in spy.listing() if one.failures]

    def test_the_client_itself(self) -> None:
        """In the callers' threads; the hook is not called for what it does itself."""
        with service() as both, both.client(connection=ConnectionOptions(max_in_flight=2)) as client:
            outputs: list[Any] = []
            names = ("before_request", "after_head", "after_decode", "on_result", "after_request", "on_error")
            for name in names:

                @both.edge.on(name, name=name)
                def ask(event: Event) -> None:
                    outputs.append(client.infer(image(3), deadline=PATIENCE).output)

                assert torch.equal(client.infer(image()).output, whole())
                if name == "on_error":
                    with pytest.raises(IsthmusError):
                        client.infer(too_much())
                both.edge.remove(name)
            assert len(outputs) >= len(names) and all(torch.equal(one, whole(image(3))) for one in outputs)
            both.paired()

    def test_the_client_while_it_is_planned(self) -> None:
        """The first request waits for the plan, which the hook sees: an error, no wait for oneself."""
        with service() as both:
            client = both.client()
            both.edge.on("after_plan", name="ask")(lambda event: client.infer(image()))
            with client:
                assert torch.equal(client.infer(image()).output, whole())
            (one,) = both.edge.listing()
            assert one.failures == 1 and "SpecError: a hook at before_plan or after_plan asked" in one.last_failure

    @pytest.mark.parametrize("stage", [stage.value for stage in Stage if stage.edge])
    def test_close_at_any_stage(self, stage: str) -> None:
        """Nobody waits for ever, and the client is closed."""
        with service() as both:
            client = both.client()
            both.edge.on(stage, name="closing")(lambda event: client.close())

            def work() -> None:
                try:
                    client.split = "stem"
                    list(client.infer_many([image(), too_much()], failures="return"))
                except IsthmusError:
                    pass
                client.close()

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(PATIENCE)
            assert not thread.is_alive() and client.state.value == "closed"
            with pytest.raises(IsthmusError):
                client.infer(image())
            eventually(lambda: both.edge.count(Stage.AFTER_SHUTDOWN) == 1)  # in the hook's thread, maybe
            assert both.edge.count(Stage.BEFORE_SHUTDOWN) == 1
            both.paired()

    def test_a_request_in_the_connections_own_thread_ends_with_its_deadline(self) -> None:
        """It would wait for itself; it is the hook's failure and nobody else's."""
        with service() as both, both.client() as client:
            client.infer(image())
            for stage in ("before_send", "after_receive", "before_receive"):

                @both.edge.on(stage, name="ask")
                def ask(event: Event) -> None:
                    client.infer(image(), deadline=0.2)

                assert torch.equal(client.infer(image(), deadline=PATIENCE).output, whole())
                (one,) = both.edge.listing()
                assert one.failures >= 1 and "DeadlineExceeded" in one.last_failure
                both.edge.remove("ask")

    def test_a_recording_that_others_wait_for(self) -> None:
        """A hook at a plan may wait for a thread that uses the model."""
        lifecycle, outputs = Lifecycle(), []
        with WrappedModel(Residual().eval(), lifecycle=lifecycle) as wrapped:
            wrapped.plan(image())

            @lifecycle.on("before_plan", "after_plan")
            def wait(event: Event) -> None:
                thread = threading.Thread(target=lambda: outputs.append(wrapped.forward(image())), daemon=True)
                thread.start()
                thread.join(PATIENCE)

            value = torch.randn(2, 3, 8, 8)
            wrapped.forward(value, end="stem")
        assert len(outputs) == 2 and all(torch.equal(one, whole()) for one in outputs)

    def test_threads_that_meet_a_new_input_record_it_once(self) -> None:
        lifecycle, all_in = Lifecycle(), threading.Barrier(3)
        lifecycle.on("before_plan")(lambda event: all_in.wait(PATIENCE))
        with WrappedModel(Residual().eval(), lifecycle=lifecycle) as wrapped:
            outputs: list[Any] = []

            def run() -> None:
                outputs.append(wrapped.forward(wrapped.forward(image(), end="stem")))

            threads = [threading.Thread(target=run) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
            assert len(outputs) == 3 and all(torch.equal(one, whole()) for one in outputs)
            assert wrapped._planner.made == 1


def locks_of(both: Service, client: EdgeClient) -> dict[str, Any]:
    """Every lock that knows who holds it."""
    found = {
        "requests": both.server.core.requests.changed,
        "edge plans": client.wrapped._planner._lock,
        "cloud plans": both.served._wrapped._planner._lock,
    }
    connection = client._connection
    if connection is not None:
        found["connection"] = connection._waiting.changed
        if connection._outbox is not None:
            found["outbox"] = connection._outbox._changed
    for number, session in enumerate(list(both.server.core._sessions)):
        found[f"session {number}"] = session._ready
    return found


def test_no_hook_is_called_with_a_lock() -> None:
    spies = Spy("cloud"), Spy("edge")
    held: list[tuple[str, str]] = []
    with service(*spies) as both:
        client = both.client()

        def look(event: Event) -> None:
            held.extend((event.stage.value, name) for name, lock in locks_of(both, client).items() if lock._is_owned())

        for spy in spies:
            everywhere(spy, look)
        answers_are_exact(client)
        list(client.infer_many([too_much(), image()], failures="return"))
        for _ in client.infer_many([image()] * 5):
            break
        assert client._connection is not None and client._connection._stream is not None
        client._connection._stream.cancel()
        eventually(lambda: both.edge.count(Stage.ON_DISCONNECT) == 1)
        client.infer(image())
        client.infer(torch.randn(2, 3, 8, 8))  # planned again
        both.paired()
        both.server.drain()
        client.close()
    assert not held and not [one.last_failure for spy in spies for one in spy.listing() if one.failures]


def test_events_keep_nothing_alive() -> None:
    """What a request's hooks were given does not outlive it, not even where every hook fails."""
    spies = Lifecycle("cloud"), Lifecycle("edge")
    left: list[weakref.ref[Any]] = []

    def look(event: Event) -> None:
        for name in ("early", "value", "output"):
            if isinstance(fact := event.facts.get(name), (torch.Tensor, EarlyOutput)):
                left.append(weakref.ref(fact))
        raise ValueError("on purpose")

    with service(*spies) as both, both.client() as client:  # type: ignore[arg-type]
        for spy in spies:
            everywhere(spy, look)
        client.infer(image())  # what fails first is logged
        gc.collect()
        left.clear()
        gc.disable()
        try:
            client.infer(image())
            assert len(left) >= 4
            client.wrapped.forward(image(9))  # the last forward's metrics are this thread's
            eventually(lambda: not [one() for one in left if one() is not None])
        finally:
            gc.enable()


@pytest.mark.parametrize("stage", ["on_disconnect", "after_request", "on_error", "after_connect", "before_send"])
def test_a_hook_that_ends_its_thread_does_not_end_the_server(stage: str) -> None:
    with service() as both:

        @both.cloud.on(stage, name="bad")
        def bad(event: Event) -> None:
            raise SystemExit

        for _ in range(3):
            client = both.client().open()
            with pytest.raises(IsthmusError):
                client.infer(too_much())
            assert torch.equal(client.infer(image(), deadline=PATIENCE).output, whole())
            client.close()
        eventually(lambda: next(one for one in both.cloud.listing() if one.name == "bad").failures >= 3)


def test_slow_hooks_in_other_threads_delay_and_lose_nothing() -> None:
    """Sending, receiving and the worker each wait for the hook, one after the other, and all is answered."""
    turn = threading.Semaphore(0)
    with service() as both, both.client() as client:
        client.infer(image())
        for spy in (both.edge, both.cloud):

            @spy.on("before_send", "after_send", "before_receive", "after_receive", name="slow")
            def slow(event: Event) -> None:
                turn.acquire(timeout=0.002)

        many = list(client.infer_many([image(seed) for seed in range(12)], deadline=PATIENCE))
        assert all(torch.equal(one.output, whole(image(seed))) for seed, one in enumerate(many))
        both.paired()


def test_every_event_is_reported_to_its_own_request() -> None:
    """Many threads, two clients, failures among them: what a request's events carry is that request's."""
    with service() as both:
        wrong: list[object] = []
        clients = [both.client(connection=ConnectionOptions(max_in_flight=3)).open() for _ in range(2)]

        def run(client: EdgeClient, number: int) -> None:
            for seed in range(8):
                value = too_much() if seed == 3 else image(100 * number + seed)
                try:
                    answer = client.infer(value, split=CUTS[seed % len(CUTS)])
                except IsthmusError:
                    continue
                if not torch.equal(answer.output, whole(value)):
                    wrong.append(answer)

        threads = [threading.Thread(target=run, args=(clients[n % 2], n)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not wrong
        both.paired()
        own = (Stage.AFTER_BANK, Stage.BEFORE_SEND, Stage.AFTER_RECEIVE, Stage.AFTER_DECODE, Stage.ON_RESULT)
        for one in [*both.edge.emitted, *both.cloud.emitted]:
            assert one.request is not None or one.stage not in own
            if one.stage is Stage.ON_RESULT and "answer" in one.facts:
                assert one.request is not None and one.facts["answer"].request_id == one.request.id
        for spy in (both.edge, both.cloud):
            for client, id in keys(spy, Stage.BEFORE_REQUEST):
                mine = [
                    one.stage.value
                    for one in spy.emitted
                    if one.request and (one.request.client, one.request.id) == (client, id)
                ]
                assert len(mine) == len(set(mine)), "one request's event was reported as another's"


def test_a_closed_client_is_reported_to_nobody() -> None:
    with service() as both:
        client = both.client().open()
        client.close()
        emitted = len(both.edge.emitted)
        with pytest.raises(Cancelled):
            client.infer(image())
        assert [one.stage for one in both.edge.emitted[emitted:]] == [Stage.BEFORE_REQUEST, Stage.AFTER_REQUEST]
