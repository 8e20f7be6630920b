"""`edge_client.aio`: equal answers, while the event loop continues; and what is cancelled here ends on the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import edge_client
from edge_client import ConnectionOptions, aio
from edge_client.answer import Failure
from shared_hooks.errors import Cancelled, DeadlineExceeded, InputMismatch, ServerUnavailable
from tests.edge_client.served import Served, Small, served
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as one:
        yield one


@pytest.fixture
def held(server: Served) -> Iterator[Served]:
    """Its worker is stuck."""
    server.gate.close()
    yield server
    server.gate.opened.set()


def value(seed: int) -> torch.Tensor:
    return torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))


def expected(*inputs: torch.Tensor) -> list[torch.Tensor]:
    model = Small().eval()
    with torch.no_grad():
        return [model(one) for one in inputs]


def client(server: Served, split: int | str = "first", **options: Any) -> aio.EdgeClient:
    return aio.EdgeClient(server.address, server.spec, split=split, **options)


async def until(claim: Callable[[], bool]) -> None:
    async def look() -> None:
        while not claim():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(look(), PATIENCE)


def test_answers_are_awaited_and_the_loop_continues(held: Served) -> None:
    async def main() -> None:
        async with client(held) as one:
            assert "ready" in repr(one)
            ticks = 0
            waiting = asyncio.create_task(one.infer(value(9)))
            while not held.gate.entered.is_set():
                ticks += 1
                await asyncio.sleep(0.005)
            held.gate.opened.set()
            answer = await waiting
            assert torch.equal(answer.output, expected(value(9))[0]) and ticks
            many = [value(seed) for seed in range(6)]
            both = await asyncio.gather(*(one.infer(item) for item in many))
            assert all(map(torch.equal, [each.output for each in both], expected(*many)))
            with pytest.raises(InputMismatch, match="is not taken"):
                await one.infer(object())
        with pytest.raises(Cancelled, match="closed"):
            await one.infer(value(1))

    asyncio.run(main())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_answers_keep_their_order_for_both_kinds_of_iterators(server: Served, asynchronous: bool) -> None:
    many: list[Any] = [value(seed) for seed in range(7)]
    many[3] = None  # no input

    async def coming() -> AsyncIterator[Any]:
        for item in many:
            await asyncio.sleep(0)
            yield item

    async def main() -> None:
        async with client(server) as one:
            answers = [answer async for answer in one.infer_many(coming() if asynchronous else many, failures="return")]
            assert [isinstance(answer, Failure) for answer in answers] == [number == 3 for number in range(7)]
            outputs = [answer.output for answer in answers if not isinstance(answer, Failure)]
            assert all(map(torch.equal, outputs, expected(*many[:3], *many[4:])))

    asyncio.run(main())


def cancelled(server: Served) -> float:
    return server.count("isthmus_request_failure_total", reason="Cancelled")


def test_a_cancelled_task_cancels_on_the_server(held: Served) -> None:
    before, came = cancelled(held), held.gate.received

    async def main() -> None:
        async with client(held) as one:
            running = asyncio.create_task(one.infer(value(9)))
            await until(held.gate.entered.is_set)
            waiting = asyncio.create_task(one.infer(value(1)))  # the one worker is at the first
            await until(lambda: held.gate.received == came + 2)
            for task in (running, waiting):
                task.cancel()
            for task in (running, waiting):
                with pytest.raises(asyncio.CancelledError):
                    await task
            # what waited is counted at once, and it was cancelled after what runs
            await until(lambda: cancelled(held) >= before + 1)
            held.gate.opened.set()
            assert torch.equal((await one.infer(value(2))).output, expected(value(2))[0])  # its place is free again
            await until(lambda: cancelled(held) == before + 2)

    asyncio.run(main())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_iteration_that_is_left_cancels_on_the_server(server: Served, asynchronous: bool) -> None:
    server.gate.close(free=1)
    before = cancelled(server)
    items = [value(1), value(9), value(2)]

    async def coming() -> AsyncIterator[Any]:
        for item in items:
            yield item
        await asyncio.Event().wait()  # nothing more, and no end

    async def main() -> None:
        async with client(server, connection=ConnectionOptions(max_in_flight=3)) as one:
            answers = one.infer_many(coming() if asynchronous else items)
            assert (await anext(answers)).result is not None
            waiting = asyncio.ensure_future(anext(answers))
            await until(server.gate.entered.is_set)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            came = server.gate.received
            after = asyncio.ensure_future(one.infer(value(3)))  # its place is free again
            await until(lambda: server.gate.received > came)  # and what came before on the stream has come, too
            server.gate.opened.set()
            await until(lambda: cancelled(server) >= before + 1)
            assert (await after).split == "first"

    asyncio.run(main())


def test_an_iteration_may_be_left_between_two_answers(server: Served) -> None:
    async def main() -> None:
        async with client(server) as one:
            async with aclosing(one.infer_many([value(seed) for seed in range(50)])) as answers:  # type: ignore[type-var]
                async for answer in answers:
                    assert answer.split == "first"
                    break
            assert (await one.infer(value(3))).split == "first"

    asyncio.run(main())


def test_a_deadline_counts_from_the_call_and_no_server_hears_of_it(held: Served) -> None:
    async def main() -> None:
        async with client(held) as one:
            with pytest.raises(DeadlineExceeded):
                await one.infer(value(9), deadline=0.2)
            held.gate.opened.set()
        lost = aio.EdgeClient("127.0.0.1:9", held.spec, "first", connection=ConnectionOptions(patience=0.2))
        with pytest.raises(Cancelled, match="async with"):
            await lost.infer(value(1))
        with pytest.raises(ServerUnavailable):
            await lost.open()
        await lost.close()

    asyncio.run(main())


def test_a_client_that_chooses(server: Served, tmp_path: Path) -> None:
    async def main() -> None:
        async with client(server, "auto") as one:
            answer = await one.infer(value(1))
            assert torch.equal(answer.output, expected(value(1))[0])
            assert [entry["kind"] for entry in one.client.decisions if entry["kind"] == "choice"] == ["choice"]

    asyncio.run(main())


def test_client_cancelled_while_loading_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that loads continues, and nobody else knows what it made."""
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Loads:
        max_in_flight = 1

        def __init__(self, *args: Any) -> None:
            begun.set()
            assert go_on.wait(PATIENCE)

        def close(self) -> None:
            closed.set()

    monkeypatch.setattr("edge_client.client.EdgeClient", Loads)

    async def main() -> None:
        opening = asyncio.ensure_future(aio.EdgeClient("127.0.0.1:9", "digits").__aenter__())
        await until(begun.is_set)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not closed.is_set()
        go_on.set()
        await until(closed.is_set)

    asyncio.run(main())


def test_a_client_closed_while_it_measures_leaves_nobody_watching(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def begin(client: edge_client.EdgeClient, *args: Any, **more: Any) -> Any:
        client.close()  # as another thread does, meanwhile
        return SimpleNamespace(close=lambda: ended.append("closed"))

    monkeypatch.setattr("edge_client.adaptive.beginning.begin", begin)
    one = edge_client.EdgeClient(server.address, server.spec, split="auto")
    with pytest.raises(Cancelled):
        one.infer(value(1))
    assert ended
