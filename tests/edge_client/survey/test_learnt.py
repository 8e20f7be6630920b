"""The codec "basis" in profiles and plans: known to both sides where a calibration has books, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import edge_client
from edge_client import EdgeClient
from edge_client.adaptive.beginning import _connector
from edge_client.model_choice import ModelChoice
from edge_client.planning.codecs import Codecs, LossTable
from edge_client.survey import SurveySources, edge_profile, measured_by_servers, with_books
from edge_client.user_input import load
from shared_hooks.codecs import CODECS
from shared_hooks.errors import SpecError
from shared_hooks.profiling import profile as profiles
from tests.edge_client.served import SPEC, Served, Small, served

QUICK: dict[str, Any] = {"repetitions": 3, "seconds": 5.0, "progress": False}
ROWS = SPEC.replace("[1, 8]", "[64, 8]")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), text=ROWS) as found:
        yield found


@pytest.fixture(scope="module")
def table() -> LossTable:
    inputs = [torch.randn(64, 8, generator=torch.Generator().manual_seed(number)) for number in range(48)]
    words: dict[str, Any] = {
        "codecs": "basis",
        "cuts": "first",
        "max_loss": "30%",
        "kind": "tensors",
        "progress": False,
    }
    return edge_client.calibrate(Small().eval(), inputs, **words).table


def test_a_profile_of_both_sides_has_it_at_the_cuts_with_books_and_a_file_keeps_it(
    server: Served, table: LossTable
) -> None:
    found = edge_client.profile(server.address, ModelChoice(server.spec), codec="auto", calibration=table, **QUICK)
    assert found.edge is not None and found.cloud is not None and not found.warnings
    here, there = ({cut.name: cut.codecs for cut in one.cuts} for one in (found.edge, found.cloud))
    for known in (here, there):
        assert {name for name, codecs in known.items() if "basis" in codecs} == {"first"}
        assert known["first"]["basis"].ns.middle > 0
        assert all("int8" in codecs and "frames" not in codecs for codecs in known.values())
    with EdgeClient(server.address, server.spec, split="first", codec="basis", calibration=table) as client:
        answer = client.infer(*(server.spec.example() or ((),))[0])
    assert answer.codecs == ("basis",)
    assert {one["first"]["basis"].wire_bytes for one in (here, there)} == {answer.bytes_up}
    for one in (found.edge, found.cloud):
        assert profiles.from_json(profiles.to_json(one)).cuts == one.cuts


@pytest.mark.parametrize("words", [{"codec": "auto", "max_loss": "30%"}, {"codec": "basis"}])
def test_a_plan_predicts_its_bytes_and_both_sides_times(
    server: Served, table: LossTable, words: dict[str, Any]
) -> None:
    found = edge_client.plan(
        server.address, ModelChoice(server.spec), calibration=table, uplink="1mbit", rtt="10ms", **words, **QUICK
    )
    assert not [text for text in found.warnings if "basis" in text]
    auto = words["codec"] == "auto"
    one = next(each for each in found.candidates if each.key == ("first + basis" if auto else "first"))
    head, tail = found.edge.cut("first"), found.cloud.cut("first")
    assert head is not None and tail is not None
    encode = head.codecs["basis"].ns if auto else head.stages["encode"]
    assert one.stages_ns["encode"] == encode.middle
    decoded = sum(stage.middle for name, stage in tail.stages.items() if name != "decode")
    assert one.stages_ns["tail"] == pytest.approx(decoded + tail.codecs["basis"].ns.middle)
    assert one.bytes_up == tail.codecs["basis"].wire_bytes < head.frontier_bytes / 2


def test_a_cut_whose_pieces_the_books_do_not_suit_is_left_out_on_the_server(server: Served, table: LossTable) -> None:
    loaded = load(ModelChoice(server.spec))
    said: list[str] = []
    with loaded.wrapped:
        cloud = edge_client.profile(server.address, ModelChoice(server.spec), side="cloud", **QUICK).cloud
        assert cloud is not None
        (book,) = table.books["first"]
        assert book is not None
        none_fits = {"first": (replace(book, most=0.0, mean=book.mean + 100),), "second": (book, book)}
        found = with_books(cloud, loaded, none_fits, server.address, said.append)
        assert found.cuts == cloud.cuts and not said
        late = with_books(cloud, loaded, table.books, server.address, said.append, seconds=-1.0)
        assert late.cuts == cloud.cuts and len(said) == 1 and "for want of time" in said[0]


def test_a_server_that_comes_later_is_asked_too(server: Served, table: LossTable) -> None:
    loaded = load(ModelChoice(server.spec))
    wanted = SurveySources(server.address, seconds=2.0, codecs=Codecs.of("auto", table, "30%"), books=table.books)
    with loaded.wrapped:
        cloud, _, _ = _connector(loaded, wanted, edge_profile(loaded, wanted, lambda text: None))(lambda: None)
    assert [cut.name for cut in cloud.cuts if "basis" in cut.codecs] == ["first"]


def test_a_server_is_not_asked_to_measure_what_only_books_tell() -> None:
    assert set(CODECS) - set(measured_by_servers(CODECS)) == {"basis", "frames"}


def test_books_of_other_weights_and_for_other_codecs_are_refused(server: Served, table: LossTable) -> None:
    foreign = replace(table, model=replace(table.model, weights_hash="00"))
    choice = ModelChoice(server.spec)
    tasks: list[Any] = [edge_client.profile, partial(edge_client.profile, side="cloud"), edge_client.plan]
    for task in tasks:
        with pytest.raises(SpecError, match="other weights"):
            task(server.address, choice, codec="basis", calibration=foreign, **QUICK)
    with pytest.raises(SpecError, match="is for codec='auto', basis and frames"):
        edge_client.profile("none", choice, codec="int8", calibration=table)
