"""A model along a chain of servers: exact, reported part by part, refused by name; faults on the way lose nothing."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
import pytest
import torch
from torch import Tensor, nn

import edge_client
from cloud_server import CloudServer, Core, Limits, ModelEntry, ServedModel
from cloud_server.access import AUDIENCE, Register, Signer
from cloud_server.chain import Chain
from cloud_server.config import NextServer
from cloud_server.requests.request import Request
from cloud_server.requests.request_table import joined_answer
from edge_client import ConnectionOptions, EdgeClient, ModelChoice
from edge_client.__main__ import main
from edge_client.request import requests
from edge_client.tasks.verify import chains_of
from edge_client.transport.times import Report, Tables, tail_metrics
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    AccessRefused,
    BadFrame,
    Cancelled,
    CutRefused,
    DeadlineExceeded,
    IsthmusError,
    NotAuthenticated,
    ServerUnavailable,
    SpecError,
    TooLarge,
    UnknownLayer,
)
from shared_hooks.lifecycle import Event, Lifecycle
from shared_hooks.metrics import ForwardMetrics, LayerColumns, LayerTable
from shared_hooks.models import ModelSpec, load_spec
from studies.experiments.relay import Relay
from tests.edge_client.test_processes import CloudProcess
from tests.ports import free_port
from tests.waiting import PATIENCE, eventually

SECRET = b"0123456789abcdef0123456789abcdef"
SPEC = """
id = "deep"
factory = "tests.edge_client.test_chain:Deep"
[example]
args = [{shape = [1, 3, 8, 8]}]
"""


class Deep(nn.Module):
    """Skip connections over each cut, a value of the inputs that the end reads, and a write in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Conv2d(8, 8, 3, padding=1)
        self.two = nn.Conv2d(8, 8, 3, padding=1)
        self.three = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        stem = self.stem(image)
        one = self.one(stem)
        two = self.relu(self.two(one) + stem)
        three = self.three(two) + one
        return {"logits": self.head(three.mean((2, 3))), "mean": image.mean(), "stem": stem}


CUTS = ("input", "stem", "one", "two", "relu", "three")


@dataclass
class Station:
    """One server of a chain, and what it has done."""

    server: CloudServer
    core: Core
    counts: Counter[str] = field(default_factory=Counter)
    hold: threading.Event = field(default_factory=threading.Event)
    """Cleared: its tails wait."""
    deadlines: list[int] = field(default_factory=list)
    accounts: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def before_tail(self, event: Event) -> None:
        self.counts["tails"] += 1
        self.hold.wait(PATIENCE)

    def before_request(self, event: Event) -> None:
        assert event.request is not None
        self.accounts.append(event.request.account)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("deep") / "deep.toml"
    path.write_text(SPEC)
    return load_spec(path)


@contextmanager
def station(
    spec: ModelSpec,
    *following: NextServer,
    register: Register | None = None,
    limits: Limits | None = None,
    only: tuple[str, ...] = (),
) -> Iterator[Station]:
    lifecycle, limits = Lifecycle("cloud"), limits or Limits()
    engine = ServedModel(ModelEntry(spec, only=only), torch.device("cpu"), lifecycle)
    with Core([engine], limits, lifecycle=lifecycle, onward=Chain(following, limits) if following else None) as core:
        server = CloudServer(core, "127.0.0.1:0", register=register)
        made = Station(server, core)
        made.hold.set()
        lifecycle.register(made)
        server.start()
        try:
            yield made
        finally:
            made.hold.set()
            server.drain()
            server.stop()


@contextmanager
def chained(spec: ModelSpec, parts: int, **options: object) -> Iterator[list[Station]]:
    """So many servers, each of which knows the next as "next"."""
    with ExitStack() as stack:
        stations: list[Station] = []
        for _ in range(parts):
            following = [NextServer("next", (stations[0].address,))] if stations else []
            stations.insert(0, stack.enter_context(station(spec, *following, **options)))  # type: ignore[arg-type]
        yield stations


def client_of(
    stations: Sequence[Station], spec: ModelSpec, split: Sequence[str | int], **options: object
) -> EdgeClient:
    names = [stations[0].address, *["next"] * (len(stations) - 1)]
    return EdgeClient(names, ModelChoice(spec, device="cpu"), split, **options)  # type: ignore[arg-type]


def image(seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def whole(value: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        answer: dict[str, Tensor] = Deep().eval()(value)
    return answer


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# Exact, and reported


def test_every_pair_of_cuts_gives_the_models_own_bits(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "two"]) as client:
        for first in range(len(CUTS)):
            for second in range(first + 1, len(CUTS)):
                for rows in (1, 3):
                    value = image(10 * first + second, rows)
                    answer = client.infer(value, split=[CUTS[first], CUTS[second]])
                    assert same(answer.output, whole(value)), (first, second)
                    assert (answer.split, [part.split for part in answer.parts]) == (CUTS[first], [CUTS[second]])
        assert [one.counts["tails"] for one in stations] == [30, 30]


def test_an_answer_says_what_each_machine_did(spec: ModelSpec) -> None:
    with chained(spec, 3) as stations, client_of(stations, spec, ["stem", "one", "relu"]) as client:
        answer = client.infer(image())
        assert same(answer.output, whole(image()))
        names = [layer.name for layer in (*answer.layers_edge, *answer.layers_cloud)]
        assert names == ["stem", "one", "two", "relu", "three", "head"]
        first, second = answer.parts
        assert (first.server, first.split, [layer.name for layer in first.layers]) == ("next", "one", ["two", "relu"])
        assert (second.split, [layer.name for layer in second.layers]) == ("relu", ["three", "head"])
        assert first.bytes_up > 0 and first.times.compute > 0 and second.times.compute > 0 and second.times.onward == 0
        assert 0 < second.times.total <= first.times.onward <= answer.times.onward
        assert answer.times.end_to_end == answer.measured_ns
        assert "'stem' > 'one' > 'relu'" in repr(answer)


def test_layers_are_described_once_for_each_form_of_inputs(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[bool] = []
    crossed: list[bool] = []

    def joined(request: Request, own: Any, rest: split_pb2.ReplyHeader, hop: Any) -> Any:
        crossed.append(bool(rest.layers.described))
        return joined_answer(request, own, rest, hop)

    def read(reply: Report, known: Tables, found: dict[int, LayerTable]) -> tuple[LayerColumns, ForwardMetrics | None]:
        described.append(bool(reply.layers.described))
        return tail_metrics(reply, known, found)

    monkeypatch.setattr(requests, "tail_metrics", read)
    monkeypatch.setattr("cloud_server.chain.joined_answer", joined)
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "one"]) as client:
        answers = [client.infer(image(rows=rows)) for rows in (1, 1, 2, 1, 2)]
    assert described == [True, True, False, False, True, True, False, False, False, False]
    assert crossed == [True, False, True, False, False], "nor between servers"
    for answer, rows in zip(answers, (1, 1, 2, 1, 2), strict=True):
        assert [layer.name for layer in answer.layers_cloud] == ["one", "two", "relu", "three", "head"]
        assert all(one.shape[0] == rows for layer in answer.layers_cloud for one in layer.outputs)
        assert all(layer.inference_ns > 0 and layer.cpu_ns is not None for layer in answer.layers_cloud)


def test_one_server_may_appear_for_several_parts(spec: ModelSpec) -> None:
    port = free_port()
    with (
        station(spec, NextServer("self", (f"127.0.0.1:{port}",))) as one,
        Relay(("127.0.0.1", one.server.port), ("127.0.0.1", port)),
        EdgeClient([one.address, "self", "self"], ModelChoice(spec, device="cpu"), ["stem", "one", "three"]) as client,
    ):
        assert same(client.infer(image(5)).output, whole(image(5)))
        assert one.counts["tails"] == 3


def test_layers_by_number_and_codecs_hold_for_every_crossing(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations:
        with client_of(stations, spec, [0, 2]) as client:
            answer = client.infer(image(1))
            assert same(answer.output, whole(image(1))) and answer.parts[0].split == "two"
            raw = answer.parts[0].bytes_up
        with client_of(stations, spec, ["stem", "two"], codec="int8") as client:
            answer = client.infer(image(1))
            assert answer.parts[0].bytes_up < raw / 2
            assert torch.allclose(answer.output["logits"], whole(image(1))["logits"], atol=0.1)


def test_many_inputs_keep_every_hop_busy(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "two"]) as client:
        stations[1].hold.clear()
        answers = client.infer_many(image(seed) for seed in range(12))
        waiting = threading.Thread(target=lambda: [found.append(one) for one in answers])
        found: list[object] = []
        waiting.start()
        # the first server computes on while the second one holds its first
        eventually(lambda: stations[0].counts["tails"] >= 4)
        assert not found
        stations[1].hold.set()
        waiting.join(PATIENCE)
        assert [same(one.output, whole(image(seed))) for seed, one in enumerate(found)] == [True] * 12  # type: ignore[attr-defined]


# Refused by name


def test_middle_parts_of_several_requests_are_one_batch_where_all_allow_it(spec: ModelSpec) -> None:
    class Seen:
        sizes: list[int] = []  # noqa: RUF012

        def on_result(self, event: Event) -> None:
            self.sizes.append(event.computed.reply.batch_size)

    inputs = [image(seed, rows=1 + seed % 2) for seed in range(3)]
    alone, wanted = whole(image()), [whole(one) for one in inputs]  # now: a server that learns draws random numbers
    with (
        chained(spec, 2, limits=Limits(max_batch_size=8)) as stations,
        client_of(stations, spec, ["stem", "two"], exact=False, metrics=False) as client,
    ):
        gateway = stations[0]
        for rows in (1, 2, 1):  # the first of a kind goes alone, and is looked at once it is answered
            client.infer(image(rows=rows))
        gateway.core.lifecycle.register(Seen())
        gateway.hold.clear()
        held = client.submit(image(), exact=True)
        waiting = [client.submit(one) for one in inputs]
        eventually(lambda: gateway.core.load().pending >= 4)
        gateway.hold.set()
        assert same(held.result().output, alone)
        for expected, pending in zip(wanted, waiting, strict=True):
            found = pending.result().output
            for key in expected:
                torch.testing.assert_close(found[key], expected[key])
        assert sorted(Seen.sizes)[1:] == [3, 3, 3]


@pytest.mark.parametrize(
    ("split", "error", "text"),
    [
        (["stem"], SpecError, "one for each"),
        ("stem", SpecError, "one cut for 2 servers"),
        (["stem", "edge-only"], SpecError, "is no cut of a chain"),
        (["two", "stem"], CutRefused, "comes before"),
        (["stem", "nowhere"], UnknownLayer, "nowhere"),
        (["nowhere", "stem"], UnknownLayer, "nowhere"),
        ([None, "stem"], SpecError, "a layer's name or id"),
    ],
)
def test_splits_that_are_none(spec: ModelSpec, split: Sequence[str], error: type[IsthmusError], text: str) -> None:
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "two"]) as client:
        with pytest.raises(error, match=text):
            client.infer(image(), split=split)
        assert same(client.infer(image()).output, whole(image()))


def test_cuts_in_the_wrong_order_are_refused_before_a_server_is_asked(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations:
        with pytest.raises(CutRefused, match="stem is not behind two"), client_of(stations, spec, ["two", "stem"]):
            pass
        assert not stations[0].counts["tails"]
    with pytest.raises(SpecError, match="expected"):
        EdgeClient(["127.0.0.1:1", ""], ModelChoice(spec, device="cpu"), ["stem", "two"])


def test_a_server_hands_on_to_nobody_but_those_it_was_given(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations:
        for names, text in (
            ([stations[0].address, "other"], "it does to: next"),
            ([stations[1].address, stations[0].address], "started without --next"),
        ):
            with (
                EdgeClient(names, ModelChoice(spec, device="cpu"), ["stem", "two"]) as client,
                pytest.raises(AccessRefused, match=text),
            ):
                client.infer(image())


def test_a_route_without_end_is_refused(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "two"]) as client:
        for cuts, error, text in (
            ([f"cut{number}" for number in range(17)], TooLarge, "at most 16"),
            (["two", "three", "two"], BadFrame, "goes round: two of its parts begin after 'two'"),
        ):
            client._routes["stem", "two"] = tuple(split_pb2.Hop(server="next", cut=cut) for cut in cuts)
            with pytest.raises(error, match=text):
                client.infer(image())
        assert not stations[0].counts["tails"]


@pytest.mark.parametrize("hop", [{"codec": "nonsense"}, {"cut": "\0"}, {"cut": ""}, {"server": "x" * 5000}])
def test_a_hop_that_makes_no_sense(spec: ModelSpec, hop: dict[str, str]) -> None:
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "two"]) as client:
        route = (split_pb2.Hop(**{"server": "next", "cut": "two", **hop}),)  # type: ignore[arg-type]
        client._routes["stem", "two"] = route
        with pytest.raises((BadFrame, AccessRefused, UnknownLayer, CutRefused)):
            client.infer(image())
        client._routes.clear()
        assert same(client.infer(image()).output, whole(image()))


# Who asks


IDENTITIES = """
[identities.alice]
cuts = ["stem", "two"]
[identities.mallory]
disabled = true
"""


def forged(change: Callable[[dict[str, object]], object], secret: bytes = SECRET, how: str = "HS256") -> Signer:
    class Forger(Signer):
        def sign(self, caller: object) -> str:
            now = int(time.time())
            claims: dict[str, object] = {"iss": "gateway", "aud": AUDIENCE, "sub": "alice", "peer": "ipv4:1.2.3.4:5"}
            claims |= {"iat": now, "exp": now + 60}
            change(claims)
            return jwt.encode(claims, None if how == "none" else secret, how)  # type: ignore[arg-type]

    return Forger("gateway", secret)


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    path = tmp_path / "identities.toml"
    path.write_text(IDENTITIES)
    return path


def test_the_next_server_knows_who_asked(spec: ModelSpec, identities: Path) -> None:
    trusting = Register(identities, trusted={"gateway": SECRET})
    with station(spec, register=trusting) as last:
        following = NextServer("next", (last.address,), signer=forged(lambda claims: None))
        with station(spec, following) as first, client_of([first, last], spec, ["stem", "two"]) as client:
            assert same(client.infer(image()).output, whole(image()))
            assert last.accounts == ["identity alice"]
            with pytest.raises(AccessRefused, match='"alice" may not use the cut "three"'):
                client.infer(image(), split=["stem", "three"])


@pytest.mark.parametrize(
    ("signer", "text"),
    [
        (Signer("gateway", SECRET), "which it has not authenticated"),
        (Signer("gateway", b"x" * 32), "Signature verification failed"),
        (Signer("other", SECRET), 'the word of "other"'),
        (forged(lambda claims: claims.update(exp=int(time.time()) - 600)), "expired"),
        (forged(lambda claims: claims.update(aud="else")), "is invalid"),
        (forged(lambda claims: claims.pop("exp")), "is invalid"),
        (forged(lambda claims: claims.update(sub="nobody")), "not known here"),
        (forged(lambda claims: claims.update(sub="mallory")), "is disabled"),
        (forged(lambda claims: claims.update(sub="a b\n")), "sub or peer is missing"),
        (forged(lambda claims: None, how="none"), "is invalid"),
        (None, "no token came"),
    ],
)
def test_forged_frames_are_refused(spec: ModelSpec, identities: Path, signer: Signer | None, text: str) -> None:
    trusting = Register(identities, trusted={"gateway": SECRET})
    with station(spec, register=trusting) as last:
        following = NextServer("next", (last.address,), signer=signer)
        with (
            station(spec, following) as first,
            client_of([first, last], spec, ["stem", "two"]) as client,
            pytest.raises(AccessRefused, match=text),
        ):
            client.infer(image())
        assert not last.counts["tails"]


def test_server_without_trusted_gateways_ignores_passports(spec: ModelSpec) -> None:
    with station(spec) as last:
        following = NextServer("next", (last.address,), signer=Signer("gateway", SECRET))
        with (
            station(spec, following) as first,
            client_of([first, last], spec, ["stem", "two"]) as client,
            pytest.raises(NotAuthenticated, match=r"\[trust\]"),
        ):
            client.infer(image())


# Faults


def test_a_link_that_breaks_is_mended_and_nothing_is_computed_twice(spec: ModelSpec) -> None:
    with station(spec) as last, Relay(("127.0.0.1", last.server.port)) as relay:
        following = NextServer("next", (f"127.0.0.1:{relay.address[1]}",))
        with station(spec, following) as first, client_of([first, last], spec, ["stem", "two"]) as client:
            client.infer(image())
            last.hold.clear()
            pending = client.submit(image(1))
            eventually(lambda: last.counts["tails"] == 2)
            relay.reset()
            last.hold.set()
            answer = pending.result()
            assert same(answer.output, whole(image(1))) and answer.sends == 1 and answer.parts[0].sends == 2
            assert [first.counts["tails"], last.counts["tails"]] == [2, 2]


def test_the_edges_own_link_may_break_while_a_part_is_handed_on(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations, Relay(("127.0.0.1", stations[0].server.port)) as relay:
        names = [f"127.0.0.1:{relay.address[1]}", "next"]
        with EdgeClient(names, ModelChoice(spec, device="cpu"), ["stem", "two"]) as client:
            client.infer(image())
            stations[1].hold.clear()
            pending = client.submit(image(1))
            eventually(lambda: stations[1].counts["tails"] == 2)
            relay.reset()
            stations[1].hold.set()
            assert same(pending.result().output, whole(image(1)))
            assert [one.counts["tails"] for one in stations] == [2, 2]


def test_where_a_hop_is_gone_another_address_serves(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud_server.chain.PATIENCE", 0.3)
    with station(spec) as last:
        following = NextServer("next", (f"127.0.0.1:{free_port()}", last.address))
        with station(spec, following) as first, client_of([first, last], spec, ["stem", "two"]) as client:
            assert same(client.infer(image()).output, whole(image()))
            assert [first.counts["tails"], last.counts["tails"]] == [1, 1]


def test_where_no_hop_serves_it_is_an_honest_failure_or_the_edge_computes(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_server.chain.PATIENCE", 0.3)
    with station(spec, NextServer("next", (f"127.0.0.1:{free_port()}",))) as first:
        with client_of([first, first], spec, ["stem", "two"]) as client:
            with pytest.raises(ServerUnavailable, match="next: no server at"):
                client.infer(image())
            assert first.counts["tails"] == 1
        with client_of([first, first], spec, ["stem", "two"], fallback="edge") as client:
            answer = client.infer(image())
            assert same(answer.output, whole(image())) and "next: no server at" in answer.fallback


def test_a_request_that_is_not_wanted_any_more_is_taken_back_everywhere(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "two"]) as client:
        client.infer(image())
        stations[1].hold.clear()
        kept = client.submit(image(2))
        eventually(lambda: stations[1].counts["tails"] == 2)
        pending = client.submit(image(1))
        eventually(lambda: stations[1].core.requests.pending() == 2)
        pending.cancel("not wanted")
        with pytest.raises(Cancelled):
            pending.result()
        eventually(lambda: stations[1].core.requests.pending() == 1)
        stations[1].hold.set()
        assert same(kept.result().output, whole(image(2)))
        eventually(lambda: all(one.core.requests.empty for one in stations))
        assert stations[1].counts["tails"] == 2


def test_a_deadline_holds_for_the_whole_chain(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "two"]) as client:
        client.infer(image())
        stations[1].hold.clear()
        with pytest.raises(DeadlineExceeded):
            client.infer(image(1), deadline=0.5)
        eventually(lambda: stations[0].core.requests.empty)
        stations[1].hold.set()
        assert same(client.infer(image(2)).output, whole(image(2)))


def test_a_server_drains_what_it_has_handed_on(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "two"]) as client:
        client.infer(image())
        stations[1].hold.clear()
        pending = client.submit(image(1))
        eventually(lambda: stations[1].counts["tails"] == 2)
        stations[0].server.drain()
        assert not stations[0].core.wait_idle(0.1)
        stations[1].hold.set()
        assert same(pending.result().output, whole(image(1)))
        assert stations[0].core.wait_idle(PATIENCE)


def test_model_error_behind_a_hop_is_raised(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "two"]) as client:
        with pytest.raises(IsthmusError) as caught:
            client.infer(torch.zeros(1, 3, 8))
        assert type(caught.value).__name__ in ("InputMismatch", "ModelFailed")


def test_inputs_far_beyond_the_example_are_not_planned_on(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations, client_of(stations, spec, ["stem", "two"]) as client:
        engine = stations[0].core.engines["deep"]
        engine._files = type(engine._files)(examples=4)  # type: ignore[attr-defined]
        assert same(client.infer(image(0, 4)).output, whole(image(0, 4)))
        with pytest.raises(TooLarge, match="max_file_examples"):
            client.infer(image(0, 5))


# Processes


def test_three_processes_of_which_one_is_killed_and_restarted(tmp_path: Path) -> None:
    port = free_port()
    last = CloudProcess("--model", "digits", port=port)
    first = CloudProcess(
        "--model", "digits", "--next", f"gpu=127.0.0.1:{port}", "--worker-processes", "--trials", "never"
    )
    try:
        with EdgeClient(
            [first.address, "gpu"],
            "digits",
            ["stem.2", "stage2.0.conv2"],
            connection=ConnectionOptions(patience=PATIENCE),
        ) as client:
            assert client.spec is not None
            (value,), _ = client.spec.example()  # type: ignore[misc]
            with torch.no_grad():
                expected = client.spec.load_model()(value)
            assert torch.equal(client.infer(value).output, expected)
            last.send(signal.SIGKILL)
            last.wait()
            pending = client.submit(value)
            last.end()
            last = CloudProcess("--model", "digits", port=port)
            assert torch.equal(pending.result().output, expected)
    finally:
        first.end()
        last.end()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--next", "nonsense"], "--next nonsense"),
        (["--next", "a=127.0.0.1:1", "--next", "a=127.0.0.1:2"], 'two servers are called "a"'),
    ],
)
def test_command_lines_that_make_no_chain(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from cloud_server.cli import main

    assert main(["--listen", f"127.0.0.1:{free_port()}", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[next.gpu]\naddress = 5", "next.gpu.address"),
        ('[next.gpu]\naddress = "gpu"', "next.gpu"),
        ('[next.gpu]\naddress = "gpu:1"\nsign_as = "a"', "needs secret_file"),
        ('[next.gpu]\naddress = "gpu:1"\nsign_as = "a"\nsecret_file = "short"', "32 or more"),
        ('next = "gpu:1"', "next"),
        ("[trust.a]\nsecret_file = 'missing'", "cannot be read"),
        ("[trust]\na = 5", "trust.a"),
    ],
)
def test_files_that_make_no_chain(tmp_path: Path, text: str, says: str) -> None:
    from cloud_server.config import read_config

    (tmp_path / "short").write_text("short\n")
    path = tmp_path / "server.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=says.replace(".", r"\.")):
        read_config(path)


def test_a_file_says_all_of_it(tmp_path: Path) -> None:
    from cloud_server.config import read_config

    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    path = tmp_path / "server.toml"
    path.write_text(
        '[next.gpu]\naddress = ["gpu:1", "gpu:2"]\nca = "ca.pem"\ntoken_file = "t"\n'
        'sign_as = "gateway"\nsecret_file = "secret"\n[trust.camera]\nsecret_file = "secret"\n'
    )
    config = read_config(path)
    (found,) = config.next
    assert found.name == "gpu" and found.addresses == ("gpu:1", "gpu:2") and found.signer == Signer("gateway", SECRET)
    assert found.credentials.ca == tmp_path / "ca.pem" and config.trusted == {"camera": SECRET}
    assert "0123" not in repr(found) and "0123" not in repr(config)


# verify and doctor


def test_verify_along_a_chain(spec: ModelSpec) -> None:
    with chained(spec, 2) as stations:
        found = edge_client.verify([stations[0].address, "next"], ModelChoice(spec, device="cpu"), progress=False)
        assert found.ok and {one.verdict for one in found.cuts} == {"exact"}
        firsts, lasts = zip(*(one.name.split(",") for one in found.cuts), strict=True)
        assert set(firsts) >= set(CUTS) and set(lasts) >= {*CUTS[1:], "head"}
        assert stations[1].counts["tails"] == len(found.cuts)


def test_verify_says_what_differs_and_what_fails(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = edge_client.EdgeClient.infer

    def infer(client: EdgeClient, *args: Tensor, split: object = None) -> object:
        answer = compare(client, *args, split=split)  # type: ignore[arg-type]
        if split == ("one", "two"):
            raise ServerUnavailable("gone")
        if isinstance(split, tuple) and split[0] == "two":
            answer.output["logits"] += 1
        return answer

    monkeypatch.setattr(edge_client.EdgeClient, "infer", infer)
    with chained(spec, 2) as stations:
        servers = [stations[0].address, "next"]
        found = edge_client.verify(servers, ModelChoice(spec, device="cpu"), progress=False)
        assert not found.ok and "differs" in {one.verdict for one in found.cuts if one.name.startswith("two,")}
        with pytest.raises(AccessRefused, match="started without --next"):
            edge_client.verify([*servers, "next"], ModelChoice(spec, device="cpu"), progress=False)
        with pytest.raises(SpecError, match="too few for a chain of 9"):
            edge_client.verify([servers[0], *["next"] * 8], ModelChoice(spec, device="cpu"), progress=False)


@pytest.mark.parametrize("servers", range(1, 6))
@pytest.mark.parametrize("count", range(1, 9))
def test_verified_cuts_include_first_and_last_layers(servers: int, count: int) -> None:
    layers = [(number - 1, f"layer{number}") for number in range(count)]
    found = chains_of(layers, servers)
    assert all(len(cuts) == servers == len({*cuts}) and list(cuts) == sorted(cuts) for _, cuts in found)
    assert all(layers[layer_id + 1][1] == cuts[0] for layer_id, cuts in found)
    room = count - servers + 1
    if servers == 1:
        assert [cuts for _, cuts in found] == [(name,) for _, name in layers]
    else:
        assert {cuts[0] for _, cuts in found} == {name for _, name in layers[: max(room, 0)]}
        assert {cuts[-1] for _, cuts in found} == {name for _, name in layers[servers - 1 :]}


def test_doctor_goes_along_the_chain(spec: ModelSpec, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(spec.origin), "--device", "cpu", "--threads", "1"]
    with chained(spec, 2) as stations:
        assert main(["doctor", f"{stations[0].address},next", *words]) == 0
        out = capsys.readouterr().out
        assert "bit for bit" in out.splitlines()[-2] and "ok       chain        next from " in out
        for names, text in (("nobody", "it does to: next"), ("next,next", "started without --next")):
            assert main(["doctor", f"{stations[0].address},{names}", *words]) == 1
            out = capsys.readouterr().out
            assert text in out and "--next NAME=HOST:PORT" in out
