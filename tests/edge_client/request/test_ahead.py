"""Sections that leave before their head has ended: the same answer, and whatever goes wrong, the request goes whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_client import EdgeClient
from edge_client.transport import ConnectionOptions, Opening
from edge_client.transport.outbox import Outbox
from shared_hooks.errors import HookRefused, ModelFailed
from shared_hooks.lifecycle import Stage
from shared_hooks.planning import plan as planning
from tests.edge_client.served import Served, served
from tests.edge_client.transport.connections import Relay
from tests.waiting import eventually

SPEC = """
id = "small"
factory = "tests.edge_client.request.test_ahead:Skips"
[example]
args = [{shape = [1, 3, 64, 64]}]
"""
CUT = "last"


class Moment(nn.Module):
    """Calls what `at_the_moment` was given, once, where a head is in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        then = getattr(sys, "isthmus_moment", None)
        at_the_moment(None)
        if then is not None:
            then()
        return x + 0


def at_the_moment(then: Callable[[], object] | None) -> None:
    """It lies where no look at the model's state goes, or it would be put back, to be called again."""
    vars(sys)["isthmus_moment"] = then


class Skips(nn.Module):
    """Two skip connections of 128 and 64 KiB, each final before the last layer. ``decides``: data has a say."""

    def __init__(self, decides: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.decides = decides
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.moment = Moment()
        self.other = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.Upsample(scale_factor=2)
        self.end = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.relu(self.norm(self.first(x)))
        down = self.moment(self.down(first))
        if self.decides and x[0, 0, 0, 0].item() > 0:
            down = self.other(down)
        last = self.last(down)
        out: Tensor = self.end(torch.cat([self.up(last + down), first], 1))
        return out


def deciding() -> Skips:
    return Skips(decides=True)


class Spy:
    """What became of the requests that were announced while their heads ran."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.announced = self.closed = self.given_up = self.early = 0
        begin, close, give_up, add = Outbox.begin, Outbox.close, Outbox.give_up, Outbox.add

        def begins(outbox: Outbox, opening: Opening) -> bool:
            self.announced += (found := begin(outbox, opening))
            return found

        def closes(outbox: Outbox, opening: Opening, exchange: Any) -> bool:
            self.closed += (found := close(outbox, opening, exchange))
            return found

        def gives_up(outbox: Outbox, opening: Opening) -> None:
            self.given_up += 1
            give_up(outbox, opening)

        def adds(outbox: Outbox, opening: Opening, buffers: tuple[memoryview, ...]) -> None:
            self.early += (
                sum(buffer.nbytes for buffer in buffers) if getattr(sys, "isthmus_moment", None) is not None else 0
            )
            add(outbox, opening, buffers)

        for name, made in (("begin", begins), ("close", closes), ("give_up", gives_up), ("add", adds)):
            patch.setattr(Outbox, name, made)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    yield Spy(monkeypatch)
    at_the_moment(None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), text=SPEC) as server:
        yield server


@contextmanager
def client(server: Served, split: str = CUT, address: str = "", area: int = 0, **more: Any) -> Iterator[EdgeClient]:
    options = {name: more.pop(name) for name in ("ahead",) if name in more}
    connection = ConnectionOptions(area_bytes=area, **options)
    with EdgeClient(address or server.address, server.spec, split, connection=connection, **more) as one:
        yield one


def image(seed: int = 1) -> Tensor:
    return torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed))


def answer(x: Tensor, decides: bool = False) -> Tensor:
    with torch.no_grad():
        found: Tensor = Skips(decides).eval()(x)
    return found


@pytest.mark.parametrize("codec", ["raw", "zstd", "shuffle-lz4", "auto"])
def test_every_cut_is_exact(server: Served, spy: Spy, codec: str) -> None:
    cuts = ["input", "first", "norm", "relu", "down", "moment", "last", "up", "end"]
    with client(server, codec=codec) as one:
        for cut in cuts:
            for seed in range(2):
                found = one.infer(image(seed), split=cut)
                assert torch.equal(found.output, answer(image(seed))), cut
                assert found.times.end_to_end == found.measured_ns and min(found.times.as_dict().values()) >= 0
                assert found.sends == 1
    assert spy.announced == spy.closed and not spy.given_up
    # behind the skip connections; what "auto" chooses hangs on how fast this machine and the link are now
    assert spy.closed >= (1 if codec == "auto" else 6)


@pytest.mark.parametrize("codec", ["int8", "int1"])
def test_losses_are_those_without_sections_ahead(server: Served, spy: Spy, codec: str) -> None:
    with client(server, codec=codec) as one, client(server, codec=codec, ahead=False) as whole:
        assert torch.equal(one.infer(image()).output, whole.infer(image()).output)
    assert spy.closed == 1


def test_sections_arrive_while_the_head_runs(server: Served, spy: Spy) -> None:
    seen: list[int] = []
    with client(server) as one:
        one.infer(image())
        begun: list[int] = []
        server.lifecycle.on(Stage.BEFORE_RECEIVE)(lambda event: begun.append(event.nbytes))

        def look() -> None:
            eventually(lambda: bool(begun))
            seen.extend(begun)

        at_the_moment(look)
        found = one.infer(image(2))
    assert seen and spy.closed == 2 and torch.equal(found.output, answer(image(2)))


def test_request_is_sent_whole_on_another_stream(server: Served, spy: Spy) -> None:
    with Relay(int(server.address.rpartition(":")[2])) as relay:
        with client(server, address=f"127.0.0.1:{relay.port}") as one:
            one.infer(image())

            def breaks() -> None:
                for end in relay._sockets:
                    end.shutdown(2)
                eventually(lambda: one.state.name != "READY")

            at_the_moment(breaks)
            found = one.infer(image(2))
        assert torch.equal(found.output, answer(image(2)))
        assert spy.early and (spy.announced, spy.closed) == (2, 1)


def test_tensor_written_after_sending_is_sent_again(server: Served, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    real = planning.finals

    def lies(trace: Any, cutting: Any) -> Any:
        """As if nothing in place came after what a slot is captured from."""
        reported: dict[Any, tuple[int, ...]] = {}
        for slot, capture in enumerate(cutting.captures):
            reported[capture.where] = (*reported.get(capture.where, ()), slot)
        assert reported.keys() != real(trace, cutting).keys()
        return reported

    monkeypatch.setattr(planning, "finals", lies)
    with client(server) as one:
        for seed in range(2):
            assert torch.equal(one.infer(image(seed)).output, answer(image(seed)))
    assert spy.announced == spy.given_up == 1 and not spy.closed  # and not tried again


def test_data_dependent_model_stops_trying(tmp_path: Path, spy: Spy) -> None:
    with served(tmp_path, text=SPEC.replace(":Skips", ":deciding")) as server, client(server) as one:
        for seed in range(12):
            x = image(seed)
            x[0, 0, 0, 0] = 1 if seed % 2 else -1
            assert torch.equal(one.infer(x).output, answer(x, decides=True))
    assert spy.given_up + spy.closed == spy.announced
    assert 0 < spy.given_up <= 4  # of the cut on each path, and of these once both are known


def test_a_head_that_raises(server: Served, spy: Spy) -> None:
    def fails() -> None:
        raise ValueError("in the middle")

    with client(server) as one:
        one.infer(image())
        at_the_moment(fails)
        with pytest.raises(ModelFailed, match="in the middle"):
            one.infer(image())
        assert spy.given_up == 1
        assert torch.equal(one.infer(image(2)).output, answer(image(2)))
    assert spy.closed == 2


def test_an_announcement_that_is_refused(tmp_path: Path, spy: Spy) -> None:
    refused: list[int] = []
    allowed: list[bool] = []
    with served(tmp_path, text=SPEC) as server, client(server) as one:
        one.infer(image())

        class Refuses:
            def before_request(self, event: Any) -> None:
                if not allowed:
                    refused.append(event.request.id)
                    raise HookRefused("not now")

        server.lifecycle.register(Refuses())
        at_the_moment(lambda: eventually(lambda: bool(refused)))
        with pytest.raises(HookRefused, match="not now"):
            one.infer(image())
        assert 1 <= len(refused) <= 2  # asked for whole once more, where the first word came before all had left
        allowed.append(True)
        assert torch.equal(one.infer(image(2)).output, answer(image(2)))


def test_sections_ahead_are_not_used_without_gain(server: Served, spy: Spy) -> None:
    with client(server, ahead=False) as one, client(server, area=1 << 20) as near, client(server, "first") as small:
        for each in (one, near, small):
            assert torch.equal(each.infer(image()).output, answer(image()))
    assert not spy.announced
    with client(server) as one:
        for _ in range(5):  # a busy machine may answer each before the next begins
            before = spy.closed
            for number, found in enumerate(one.infer_many([image(seed) for seed in range(6)])):
                assert torch.equal(found.output, answer(image(number)))
            assert spy.announced == spy.closed
            if spy.closed < before + 6:
                break
        else:
            pytest.fail("each of several requests was announced ahead")
