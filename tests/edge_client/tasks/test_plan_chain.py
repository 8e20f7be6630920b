"""Plans of chains: the best of all cuts, on links of all kinds; measured through the first server."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

import edge_client
from cloud_server.config import NextServer
from edge_client import AutoOptions, EdgeClient, ModelChoice
from edge_client.__main__ import main
from edge_client.adaptive import chain
from edge_client.adaptive.chain import Station, best_cuts, parts_of
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Constraints
from shared_hooks import WrappedModel
from shared_hooks.errors import AccessRefused, CutRefused, SpecError
from shared_hooks.lifecycle import Event, Lifecycle
from shared_hooks.models import ModelSpec
from shared_hooks.profiling.profiler import ProfileOptions, profile_cloud, profile_edge
from tests.edge_client.test_chain import Deep, image, same, spec, station, whole

__all__ = ["spec"]


@cache
def profiles() -> tuple[Any, Any]:
    options = ProfileOptions(warmup=1, repetitions=3, seconds=2.0)
    edge = profile_edge(WrappedModel(Deep().eval()), "deep", (image(),), {}, options)
    return edge, profile_cloud(WrappedModel(Deep().eval()), "deep", (image(),), {}, options)


def link(rate: float, round_trip: float = 1e6) -> Link:
    return Link(Curve.line(round_trip, rate), Curve.line(0.0, rate), "given")


def taken(stations: list[Station], cuts: tuple[str, ...]) -> float:
    return sum(part.network_ns + part.compute_ns for part in parts_of(stations, cuts))


@pytest.mark.parametrize("rates", [(1e6, 1e9), (1e9, 1e6), (1e5, 1e5), (1e9, 1e9), (3e4, 2e7)])
@pytest.mark.parametrize("servers", [2, 3])
def test_dynamic_programming_finds_what_a_search_of_all_cuts_does(rates: tuple[float, float], servers: int) -> None:
    edge, cloud = profiles()
    links = [link(rates[at % 2]) for at in range(servers)]
    stations = [Station("edge", edge), *(Station(f"s{at}", cloud, one) for at, one in enumerate(links))]
    names = [cut.name for cut in edge.cuts if cloud.cut(cut.name) is not None]
    best = min(itertools.combinations(names, servers), key=lambda cuts: taken(stations, cuts))
    assert taken(stations, best_cuts(stations)) == pytest.approx(taken(stations, best))


def test_a_chain_of_more_machines_than_cuts() -> None:
    edge, cloud = profiles()
    stations = [Station("edge", edge), *(Station(f"s{at}", cloud, link(1e6)) for at in range(12))]
    with pytest.raises(CutRefused, match="cuts for a chain of 13"):
        best_cuts(stations)


def test_it_is_measured_from_hop_to_hop_and_holds(spec: ModelSpec, capsys: pytest.CaptureFixture[str]) -> None:
    choice = ModelChoice(spec, device="cpu")
    with station(spec) as last, station(spec, NextServer("gpu", (last.address,))) as first:
        servers = [first.address, "gpu"]
        found = edge_client.plan_chain(servers, choice, seconds=0.5, progress=False)
        assert len(found.cuts) == 2 and found.latency_ns > 0 and found.as_dict()["cuts"] == list(found.cuts)
        assert [one.name for one in found.parts] == ["edge", first.address, "gpu"]
        assert found.stations[2].link is not None and "server before gpu" in found.stations[2].link.source
        with EdgeClient(servers, choice, found.cuts) as client:
            assert same(client.infer(image()).output, whole(image()))
        assert "--split" in found.text() and found.to_polars().height == 3
        words = ["plan", "--server", ",".join(servers), "--model", spec.origin, "--seconds", "0.5", "--no-progress"]
        assert main(words) == 0 and "is best" in capsys.readouterr().out
        assert main([*words, "--objective", "bytes"]) == 2
        with pytest.raises(AccessRefused, match="it does to: gpu"):
            edge_client.plan_chain([first.address, "other"], choice, seconds=0.5, progress=False)
    with pytest.raises(SpecError, match="two or more"):
        edge_client.plan_chain(["127.0.0.1:1"], choice)


class Seen:
    def __init__(self, changes: list[Any]) -> None:
        self._changes = changes

    def on_split_change(self, event: Event) -> None:
        self._changes.append(event)


def test_auto_moves_both_cuts_as_links_change(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is the model's own, wherever the cuts are; what moves them is what the plan says of the links."""
    changes: list[Any] = []
    lifecycle = Lifecycle("edge")
    lifecycle.register(Seen(changes))
    options = AutoOptions(profile_seconds=0.5, progress=False)
    with station(spec) as last, station(spec, NextServer("gpu", (last.address,))) as first:
        servers = [first.address, "gpu"]
        with EdgeClient(servers, ModelChoice(spec, device="cpu"), "auto", auto=options, lifecycle=lifecycle) as client:
            chooser = client._chained()
            assert chooser.cuts == best_cuts(chooser.stations) and len(client.decisions) == 1

            costs = {chooser.cuts: 100.0}
            others = [("stem", "two"), ("one", "three"), ("one", "relu"), ("input", "stem"), ("stem", "three")]
            first_move, slight, second_move, third_move = [cuts for cuts in others if cuts != chooser.cuts][:4]
            monkeypatch.setattr(chain, "latency_ns", lambda stations, cuts: costs[tuple(cuts)])
            answers = client.infer_many([image()] * 12)
            for cuts, cost, moves in (
                (first_move, 50.0, True),
                (slight, 48.0, False),  # 4 % are not worth it
                (second_move, 40.0, True),
                (third_move, 30.0, True),
            ):
                costs[cuts] = cost
                monkeypatch.setattr(chain, "best_cuts", lambda stations, cuts=cuts: cuts)
                before = chooser.cuts
                chooser.look()  # it measures the links, too
                assert chooser.cuts == (cuts if moves else before)
                answer = client.infer(image())
                assert same(answer.output, whole(image())) and same(next(answers).output, whole(image()))
                assert (answer.split, answer.parts[0].split) == chooser.cuts
            assert [one.new for one in changes] == [tuple(one["cuts"]) for one in client.decisions]
            assert len(changes) == 4 and all(one.link is not None for one in chooser.stations[1:])
            answers.close()
            monkeypatch.undo()
            chooser.look()  # the real links
            assert same(client.infer(image(), split=["stem", "two"]).output, whole(image())), "one may still be said"
        bounded = AutoOptions(constraints=Constraints(max_edge_memory=1e6))
        for wrong in (AutoOptions(objective="bytes"), AutoOptions(partitioner="regression"), bounded):
            with pytest.raises(SpecError, match="along a chain"), EdgeClient(servers, spec, "auto", auto=wrong):
                pass


@pytest.mark.parametrize(
    "data",
    [None, {}, {"up_points": [], "down_points": []}, {"up_points": [[0, -1]]}, {"up_points": [[1, 1], [0, 1]]}, "x"],
)
def test_a_server_that_reports_no_link(data: Any) -> None:
    known = link(1e6).as_dict()
    given = {**known, **data} if isinstance(data, dict) and data else data
    with pytest.raises(SpecError, match="reports"):
        Link.from_dict(given, "a server")
    back = Link.from_dict(known, "a server")
    assert back.up.ns(1 << 20) == pytest.approx(link(1e6).up.ns(1 << 20)) and torch.isfinite(torch.tensor(back.rtt_ns))
