"""What decides in the client and in planning, and whose absence nothing else would notice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from edge_client import doctor
from edge_client.benching import results
from edge_client.calibrating.inputs import LEAST_TO_STOP, LossTally
from edge_client.planning.link import Curve, Link, LinkEstimate, Tracker
from edge_client.request.requests import Receiver
from edge_client.transport import wire
from shared_hooks import Parcel, WrappedModel
from shared_hooks.errors import SpecError, TooLarge
from shared_hooks.metrics import measurement
from shared_hooks.metrics.records import Reading
from shared_hooks.metrics.sampler import SampleWindow
from shared_hooks.planning import planner
from shared_hooks.selection.capture import read_boxes


def rows(worse: int, of: int) -> list[Any]:
    return [SimpleNamespace(loss=float(number < worse), measures={}, right=None) for number in range(of)]


def test_a_codec_is_given_up_when_it_is_surely_worse_and_not_when_it_may_be() -> None:
    """By the lower bound of its loss."""
    tally = LossTally("int4", lossless=False, is_share=True, confidence=0.95)
    tally.sent(10, True)
    tally.take(rows(1, LEAST_TO_STOP))
    low, high = tally.bounds()
    assert low < high
    tally.stop_if_worse_than((low + high) / 2)
    assert not tally.stopped
    tally.stop_if_worse_than(low / 2)
    assert tally.stopped


@pytest.mark.parametrize(("sends", "retry", "taught"), [(1, 0.0, 1), (2, 0.0, 0), (1, 0.5, 0)])
def test_resent_request_teaches_no_codec_choice(sends: int, retry: float, taught: int) -> None:
    """Its time holds more than the way of these bytes."""
    reported: list[Any] = []
    receiver = Receiver.__new__(Receiver)
    receiver._edge_model = SimpleNamespace(chooser=SimpleNamespace(answered=lambda *args: reported.append(args)))  # type: ignore[assignment]
    running: Any = SimpleNamespace(
        exchange=SimpleNamespace(sends=sends, bytes_up=1, bytes_down=1),
        bytes_ahead=0,
        head=SimpleNamespace(decoding_ns=0.0),
    )
    receiver._learn(running, SimpleNamespace(retry=retry, send_wait=0.0, network=0.0, server_decode=0.0))  # type: ignore[arg-type]
    assert len(reported) == taught


def test_each_utilisation_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"cpu": 11.0, "gpu": 22.0, "memory": 33.0}
    none = Reading.unavailable("not here")
    sources = {name: Reading(value, "measured", name) for name, value in values.items()}
    window = SampleWindow(energy=none, resident=none, **sources)  # type: ignore[arg-type]
    monkeypatch.setattr(measurement.sampler, "window", lambda start, gpu: window)
    with WrappedModel(nn.Sequential(nn.ReLU())) as made:
        made.forward(torch.ones(2))
        (layer,) = made.get_layer_metrics()
    assert {name: getattr(layer, f"{name}_utilisation").value for name in values} == values


class Paths(nn.Module):
    """Takes a path for each number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: int(x[0, 0]) + 1]:
            x = layer(x)
        return x


def test_no_more_paths_are_kept_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_PATHS", 3)
    with WrappedModel(Paths().eval()) as wrapped:
        for number in range(6):
            plan = wrapped.plan(torch.full((1, 2), float(number)))
        assert wrapped.plans_made == 6
        assert len(plan.siblings) == 3
        assert sum(map(len, wrapped._planner._plans.values())) == 3


def test_json_that_is_nested_too_deep_is_refused_by_name(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    for read in (read_boxes, results.read):
        with pytest.raises(SpecError, match="deep.json"):
            read(deep)
    machine = SimpleNamespace(models=[SimpleNamespace(machine="[" * 200_000)])
    assert doctor._machine(machine) == {}  # type: ignore[arg-type]


def test_an_answer_is_no_larger_than_the_model_can_give() -> None:
    """A few bytes of Zstandard are 64 MiB decoded; of a longer input beside a large one the bound grows with it."""

    class Beside(nn.Module):
        def forward(self, picture: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return text.unsqueeze(-1).expand(-1, -1, 4096) * picture.mean()

    picture = torch.ones(1, 3, 64, 64)
    with WrappedModel(Beside().eval()) as wrapped:
        assert wrapped.most_output_bytes(picture, torch.ones(1, 10)) is None
        wrapped.plan(picture, torch.ones(1, 10))
        most = wrapped.most_output_bytes(picture, torch.ones(1, 10))
        assert most is not None and 10 * 4096 * 4 < most < 2 << 20
        longer = wrapped.most_output_bytes(picture, torch.ones(1, 400))
        assert longer is not None and longer > 400 * 4096 * 4
    zeros = Parcel.of_tensors(["t", 0], [torch.zeros(16 << 20)], "zstd")
    assert zeros.nbytes < 1 << 20
    with pytest.raises(TooLarge):
        wire.check_answer(zeros.header, zeros.nbytes, most)


def test_a_number_that_may_be_nothing_is_followed() -> None:
    followed = Tracker(0.0, offset=1e5)
    assert followed.value == pytest.approx(0.0, abs=1e-3)
    followed.reset(4e5)
    assert followed.value == pytest.approx(4e5)
    assert Tracker(0.5).value == pytest.approx(0.5)


def test_a_transfer_that_took_what_was_expected_changes_nothing_much() -> None:
    estimate = LinkEstimate(Link(Curve.line(20e6, 1e6), Curve.line(0.0, 1e6)), 1 << 20)
    before = estimate.rtt_ns, estimate.goodput()
    for nbytes in (0, 200_000, 1 << 20):
        assert not estimate.observe(nbytes, 0, estimate.ns(nbytes, 0))
    assert estimate.rtt_ns == pytest.approx(before[0], rel=0.05)
    assert estimate.goodput() == pytest.approx(before[1], rel=0.05)
