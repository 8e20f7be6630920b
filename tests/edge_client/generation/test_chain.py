"""generate() along a chain of servers says what it says without a cut, whatever happens to a server of the chain."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cloud_server import Limits
from cloud_server.config import NextServer
from edge_client import EdgeClient
from edge_client.__main__ import main
from edge_client.generation import SplitGenerator
from edge_client.generation.link import SessionLink
from shared_hooks.errors import (
    AccessRefused,
    CutRefused,
    DeadlineExceeded,
    Disagreement,
    IsthmusError,
    ServerUnavailable,
    SpecError,
    UnknownLayer,
)
from shared_hooks.generation import StepReply
from shared_hooks.models import ModelSpec, load_spec
from studies.experiments.relay import Relay
from tests.covering import crossed
from tests.edge_client.generation.speaking import SPEC
from tests.edge_client.test_chain import Station, chained, station
from tests.edge_client.test_processes import CloudProcess
from tests.ports import free_port
from tests.shared_hooks.generation.small import MODELS
from tests.shared_hooks.generation.test_middle import cuts_of, given
from tests.starts import workers_of
from tests.waiting import eventually

CUTS = ["model.layers.1", "model.layers.3"]
"""Two of the example's six blocks for each machine."""
THREE = [*CUTS, "model.layers.4"]


def spec_of(name: str, folder: Path) -> ModelSpec:
    path = folder / f"{name}.toml"
    path.write_text(f'id = "{name}"\nfactory = "tests.shared_hooks.generation.small:make"\n')
    with path.open("a") as file:
        file.write(f'[factory_kwargs]\nname = "{name}"\n')
    return load_spec(path)


@contextmanager
def speaking(spec: ModelSpec, parts: int, **options: Any) -> Iterator[tuple[list[Station], EdgeClient]]:
    with chained(spec, parts) as stations:
        servers = [stations[0].address, *["next"] * (parts - 1)]
        with EdgeClient(servers, spec, metrics=False, **options) as client:
            yield stations, client


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_spec(SPEC)


@pytest.fixture(scope="module")
def servers(spec: ModelSpec) -> Iterator[list[Station]]:
    """Three in a row; the last two are a chain, too."""
    with chained(spec, 3) as made:
        yield made


@contextmanager
def along(servers: list[Station], spec: ModelSpec, parts: int) -> Iterator[tuple[list[Station], EdgeClient]]:
    found = servers[-parts:]
    with EdgeClient([found[0].address, *["next"] * (parts - 1)], spec, metrics=False) as client:
        yield found, client


def ids(rows: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.randint(5, 60, (rows, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": made, "attention_mask": torch.ones_like(made)}


def whole(client: EdgeClient, **asked: Any) -> torch.Tensor:
    torch.manual_seed(0)
    found: torch.Tensor = copy.deepcopy(client.wrapped.model).generate(**asked)  # type: ignore[operator]
    return found


def closed(stations: list[Station]) -> None:
    eventually(lambda: not any(len(one.core.decoding) for one in stations), "a session is kept that nobody uses")


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 4, "max_new_tokens": 24},
}


@pytest.mark.parametrize(("way", "cuts"), crossed([*WAYS], [CUTS, THREE]))
def test_the_tokens_are_those_without_a_cut(servers: list[Station], spec: ModelSpec, cuts: list[str], way: str) -> None:
    asked: dict[str, Any] = {**ids(), "do_sample": False, "max_new_tokens": 12, **WAYS[way]}
    with along(servers, spec, len(cuts)) as (stations, client):
        before = [one.core.decoding.steps for one in stations]
        expected, generator = whole(client, **asked), SplitGenerator(client, cuts)
        for _ in range(2):
            torch.manual_seed(0)
            assert torch.equal(generator.generate(**asked), expected)
        assert generator.cuts == tuple(cuts)
        closed(stations)
        made = {one.core.decoding.steps - count for one, count in zip(stations, before, strict=True)}
        assert len(made) == 1, "each has its part of every step"


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    with speaking(spec_of(name, tmp_path), 2) as (_, client):
        asked: dict[str, Any] = {**given(name), "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(SplitGenerator(client, cuts_of(name, 2)).generate(**asked), whole(client, **asked))


def test_many_at_once_with_one_worker_on_each_server(servers: list[Station], spec: ModelSpec) -> None:
    """A worker does not wait for the next server: else two that hand on to each other would stand still."""
    with along(servers, spec, 3) as (_, client), ExitStack() as stack:
        prompts = [ids(seed=seed) for seed in range(6)]
        expected = [whole(client, **one, max_new_tokens=10, do_sample=False) for one in prompts]
        models = [copy.deepcopy(client.wrapped.model) for _ in prompts]
        found: dict[int, torch.Tensor] = {}

        def run(number: int) -> None:
            generator = SplitGenerator(client, THREE, model=models[number])
            found[number] = generator.generate(**prompts[number], max_new_tokens=10, do_sample=False)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
    assert all(torch.equal(found[number], one) for number, one in enumerate(expected))


class Troubled(SessionLink):
    """Calls ``trouble`` before some steps."""

    def __init__(self, client: EdgeClient, cuts: list[str], steps: set[int], trouble: Callable[[], object]) -> None:
        super().__init__(client, cuts)
        self.steps, self.trouble, self.count = steps, trouble, 0

    def step(self, *step: Any) -> StepReply:
        self.count += 1
        if self.count in self.steps:
            self.trouble()
        return super().step(*step)


def test_a_session_keeps_to_its_chain(servers: list[Station], spec: ModelSpec) -> None:
    """A step of another route is refused by name."""
    with along(servers, spec, 2) as (_, client):
        link = Troubled(client, CUTS, {3}, lambda: setattr(link, "_route", ()))
        with pytest.raises(Disagreement, match='and at "next" after "model.layers.3"; the request'):
            SplitGenerator(client, CUTS, link=link).generate(**ids(), max_new_tokens=6, do_sample=False)


def lose(station: Station) -> None:
    """It forgets its sessions, as after a restart."""
    station.core.decoding.close()


def drop(station: Station) -> None:
    """Its streams break."""
    for session in list(station.core._sessions):
        session.drop(ServerUnavailable("the link broke"))


@pytest.mark.parametrize(("number", "fault"), crossed([0, 1, 2], [lose, drop]))
def test_faults_between_two_steps(
    servers: list[Station], spec: ModelSpec, number: int, fault: Callable[[Station], None]
) -> None:
    asked: dict[str, Any] = {**ids(rows=2), "max_new_tokens": 12, "do_sample": False}
    with along(servers, spec, 3) as (stations, client):
        link = Troubled(client, THREE, {3, 7}, lambda: fault(stations[number]))
        found = SplitGenerator(client, THREE, link=link).generate(**asked)
        assert torch.equal(found, whole(client, **asked))
        assert link.count > 7


def test_another_address_of_the_next_server_takes_over(spec: ModelSpec) -> None:
    asked: dict[str, Any] = {**ids(), "max_new_tokens": 12, "do_sample": False}
    with station(spec) as first, station(spec) as second:
        following = NextServer("next", (first.address, second.address))
        with (
            station(spec, following) as gateway,
            EdgeClient([gateway.address, "next"], spec) as edge,
        ):

            def trouble() -> None:
                first.server.drain()
                first.server.stop()

            link = Troubled(edge, CUTS, {5}, trouble)
            assert torch.equal(SplitGenerator(edge, CUTS, link=link).generate(**asked), whole(edge, **asked))
            assert first.core.decoding.steps and second.core.decoding.steps


def test_a_next_server_that_does_not_answer_is_a_deadline_and_then_all_continues(spec: ModelSpec) -> None:
    asked: dict[str, Any] = {**ids(), "max_new_tokens": 6, "do_sample": False}
    with speaking(spec, 2, deadline=2.0) as (stations, client):
        expected, generator = whole(client, **asked), SplitGenerator(client, CUTS)
        generator.generate(**asked)
        stations[1].hold.clear()
        with pytest.raises(DeadlineExceeded):
            generator.generate(**asked)
        stations[1].hold.set()
        client.default_deadline = 30.0
        assert torch.equal(generator.generate(**asked), expected)
        closed(stations)


def test_a_broken_way_between_two_servers(spec: ModelSpec) -> None:
    asked: dict[str, Any] = {**ids(), "max_new_tokens": 16, "do_sample": False}
    with station(spec) as last, Relay(("127.0.0.1", last.server.port)) as relay:
        following = NextServer("next", (f"127.0.0.1:{relay.address[1]}",))
        with (
            station(spec, following) as gateway,
            EdgeClient([gateway.address, "next"], spec) as edge,
        ):
            link = Troubled(edge, CUTS, {4, 5, 9}, relay.reset)
            assert torch.equal(SplitGenerator(edge, CUTS, link=link).generate(**asked), whole(edge, **asked))


@pytest.mark.parametrize(
    ("cuts", "error", "says"),
    [
        (["model.layers.1"], SpecError, "1 for 2 servers"),
        ("model.layers.1", SpecError, "1 for 2 servers"),
        ("auto", SpecError, "is for one server"),
        (["model.layers.1", "model.layers.99"], UnknownLayer, "model.layers.99"),
        (["model.layers.1", "model.layers.1"], CutRefused, "two parts of a chain begin after model.layers.1"),
        (["model.layers.1", "lm_head"], CutRefused, "same list of blocks"),
        (["model.layers.3", "model.layers.1"], CutRefused, "model.layers.1 is not called behind model.layers.3"),
    ],
)
def test_invalid_chain_is_refused_by_name(
    servers: list[Station], spec: ModelSpec, cuts: Any, error: type[IsthmusError], says: str
) -> None:
    with along(servers, spec, 2) as (_, client), pytest.raises(error, match=says):
        SplitGenerator(client, cuts).generate(**ids(), max_new_tokens=3, do_sample=False)


def test_a_server_hands_steps_on_to_its_own_next_ones_alone(servers: list[Station], spec: ModelSpec) -> None:
    for first, second, says in ((servers[0], "elsewhere", "elsewhere"), (servers[2], "next", "--next")):
        with EdgeClient([first.address, second], spec) as client, pytest.raises(AccessRefused, match=says):
            SplitGenerator(client, CUTS).generate(**ids(), max_new_tokens=3, do_sample=False)


def test_memory_kept_for_the_next_server_is_counted(spec: ModelSpec) -> None:
    small = Limits(max_session_bytes=20_000)
    with (
        station(spec) as last,
        station(spec, NextServer("next", (last.address,)), limits=small) as gateway,
        EdgeClient([gateway.address, "next"], spec) as edge,
        pytest.raises(IsthmusError, match="max_session_bytes"),
    ):
        SplitGenerator(edge, CUTS).generate(**ids(), max_new_tokens=200, do_sample=False)


def test_worker_processes_of_which_one_is_killed(spec: ModelSpec) -> None:
    last = CloudProcess("--model", SPEC)
    many = ["--worker-processes", "--workers", "2", "--trials", "never"]
    gateway = CloudProcess("--model", SPEC, "--next", f"gpu={last.address}", *many)
    try:
        with EdgeClient([gateway.address, "gpu"], spec, metrics=False) as client:
            for way in WAYS.values():
                asked: dict[str, Any] = {**ids(), "do_sample": False, "max_new_tokens": 12, **way}
                expected = whole(client, **asked)
                torch.manual_seed(0)
                assert torch.equal(SplitGenerator(client, CUTS).generate(**asked), expected), way
            asked = {**ids(), "do_sample": False, "max_new_tokens": 12}
            expected, workers = whole(client, **asked), workers_of(gateway.process_id)
            assert len(workers) == 2

            def killing(worker: psutil.Process, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
                if input_ids.shape[1] == 12:
                    worker.kill()
                return torch.zeros(1, dtype=torch.bool)

            for worker in workers:  # one of them has the session
                asked["stopping_criteria"] = [partial(killing, worker)]
                assert torch.equal(SplitGenerator(client, CUTS).generate(**asked), expected)

            def at_once(seed: int) -> torch.Tensor:
                model = copy.deepcopy(client.wrapped.model)
                with SplitGenerator(client, CUTS, model=model) as own:
                    found: torch.Tensor = own.generate(**{**ids(seed=seed), "do_sample": False, "max_new_tokens": 12})
                return found

            wanted = [whole(client, **{**ids(seed=at), "do_sample": False, "max_new_tokens": 12}) for at in range(4)]
            with ThreadPoolExecutor(4) as pool:
                assert all(map(torch.equal, pool.map(at_once, range(4)), wanted))
    finally:
        gateway.end()
        last.end()


def test_one_worker_process_for_every_part(spec: ModelSpec) -> None:
    """It has other steps while the next server, which is the same, computes."""
    port = free_port()
    one = ["--worker-processes", "--workers", "1", "--trials", "never"]
    server = CloudProcess("--model", SPEC, "--next", f"self=127.0.0.1:{port}", *one, port=port)
    try:
        with EdgeClient([server.address, "self", "self"], spec, metrics=False, deadline=20) as client:
            for way in ("greedy", "beams"):
                asked: dict[str, Any] = {**ids(), "do_sample": False, "max_new_tokens": 8, **WAYS[way]}
                assert torch.equal(SplitGenerator(client, THREE).generate(**asked), whole(client, **asked)), way
    finally:
        server.end()


def test_on_the_command_line(servers: list[Station], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--model", SPEC, "--prompt", "the first layers", "--max-new-tokens", "8"]
    assert main([*asked, "--server", f"{servers[1].address},next", "--cut", ",".join(CUTS)]) == 0
    text = capsys.readouterr().out
    assert main([*asked, "--server", servers[2].address, "--cut", CUTS[0]]) == 0
    assert capsys.readouterr().out == text
