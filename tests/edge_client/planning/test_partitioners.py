"""Who decides, by name: the shipped ones, those of others, and regression with its error reported."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from edge_client.planning import partitioners as package
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Constraints, Decision, Objective, decide
from edge_client.planning.partitioners import LayerModel, Situation, find_partitioner, partitioners
from edge_client.planning.predict import GivenPower, predict
from shared_hooks.errors import SpecError
from shared_hooks.profiling import profile as profiles
from tests.edge_client.planning.made import MS, Layer, profile

LINK = Link(Curve.line(10 * MS, 1e6), Curve.line(0, 1e6))


def lawful(count: int = 8) -> list[Layer]:
    """Layers of two types whose time follows their multiplications."""
    return [
        Layer(0.5 + 0.001 * macs, 0.05 + 0.0001 * macs, 100_000 // (at + 1), kind, macs)
        for at in range(count)
        for kind, macs in (("Conv2d", 1000.0 * (at + 1)), ("Linear", 300.0 * (at + 2)))
    ]


def situation(option: str | None = None, constraints: Constraints | None = None) -> Situation:
    edge, cloud = profile("edge", lawful()), profile("cloud", lawful())
    candidates = predict(edge, cloud, LINK, power=GivenPower(5, 1))
    return Situation(candidates, Objective.parse("bytes"), constraints or Constraints(), edge, cloud, option)


def test_the_shipped_ones_are_listed_and_made() -> None:
    assert set(partitioners()) >= {"objective", "latency", "energy", "cycle", "fixed", "regression"}
    assert all(partitioners().values())
    with pytest.raises(SpecError, match="no such partitioner"):
        find_partitioner("latencyy")


@pytest.mark.parametrize("name", ["latency", "energy"])
def test_latency_and_energy_do_not_ask_for_the_objective(name: str) -> None:
    given = situation()
    expected = decide(given.candidates, Objective.parse(name)).winner
    assert find_partitioner(name).decide(given).winner == expected
    assert find_partitioner("objective").decide(given).winner.name == "edge-only"  # no byte


def test_cycle_takes_each_allowed_candidate_in_turn() -> None:
    given = situation(constraints=Constraints(max_bytes_per_second=60_000, rate=1))
    cycle, count = find_partitioner("cycle"), 0
    names = [one.name for one in given.candidates if one.bytes_up + one.bytes_down <= 60_000]
    for count in range(2 * len(names)):
        decision = cycle.decide(given)
        assert decision.winner.name == names[count % len(names)]
        assert decision.winner not in (decision.runner_up, *decision.ranking[1:])


def test_fixed_takes_what_is_named_or_says_why_not() -> None:
    fixed = find_partitioner("fixed")
    assert fixed.decide(situation("layer3")).winner.name == "layer3"
    assert fixed.decide(situation("3")).winner.name == "layer3"
    assert fixed.decide(situation("cloud-only")).winner.name == "cloud-only"
    for option, says in ((None, "with partitioner_option"), ("layer99", "no candidate")):
        with pytest.raises(SpecError, match=says):
            fixed.decide(situation(option))
    with pytest.raises(SpecError, match="not allowed: bytes per second"):
        fixed.decide(situation("layer0", Constraints(max_bytes_per_second=1000, rate=1)))


class Last:
    about = "the last candidate"

    def decide(self, situation: Situation) -> Decision:
        return find_partitioner("fixed").decide(Situation(situation.candidates, option=situation.candidates[-1].name))


def test_others_plug_in_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def plugged(name: str, value: str) -> EntryPoint:
        return EntryPoint(name, value, package.GROUP)

    points = [
        plugged("last", f"{__name__}:Last"),
        plugged("bad", f"{__name__}:Nowhere"),
        plugged("int", "builtins:int"),
    ]
    monkeypatch.setattr(package, "entry_points", lambda group: points if group == package.GROUP else [])
    monkeypatch.setattr(EntryPoint, "load", lambda self: {"last": Last, "int": int}[self.name])
    given = situation()
    assert "last" in partitioners()
    assert find_partitioner("last").decide(given).winner.name == given.candidates[-1].name
    with pytest.raises(SpecError, match="bad.*KeyError"):
        find_partitioner("bad")
    with pytest.raises(SpecError, match="no decide"):
        find_partitioner("int")


class Broken:
    about = "raises, or returns what is no decision"

    def decide(self, situation: Situation) -> object:
        if situation.option is None:
            return situation.candidates[0]
        return {}[situation.option]


def test_one_of_your_own_is_named_by_module_and_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_partitioning.py").write_text(
        "from edge_client.planning.objective import decide\n"
        "from edge_client.planning.partitioners import chosen\n"
        "import missing_here_and_there\n"
    )
    monkeypatch.chdir(tmp_path)
    given = situation()
    assert find_partitioner(f"{__name__}:Last").decide(given).winner.name == given.candidates[-1].name
    broken = find_partitioner(f"{__name__}:Broken")
    with pytest.raises(SpecError, match=r":Broken raised KeyError: 'x' \(.*test_partitioners.py:\d+\)"):
        broken.decide(situation("x"))
    with pytest.raises(SpecError, match=r":Broken returned a Candidate, and no Decision"):
        broken.decide(given)
    with pytest.raises(SpecError, match=r"ModuleNotFoundError: No module named 'missing_here_and_there' \(.*py:3\)"):
        find_partitioner("my_partitioning:Mine")
    with pytest.raises(SpecError, match=r"no such partitioner; there are objective, latency"):
        find_partitioner("mine")


def test_a_layer_model_finds_the_law_that_layers_follow() -> None:
    model = LayerModel.fit([profile("edge", lawful())])
    assert set(model.fits) == {"Conv2d", "Linear"}
    assert all(fit.error < 0.02 for fit in model.fits.values())
    unseen = {"macs": 20_000.0, "input_elements": 100.0, "output_elements": 100.0}
    assert model.ns("Conv2d", unseen) == pytest.approx(20.5 * MS, rel=0.05)


def test_a_type_without_a_model_gets_the_general_one_or_is_refused_by_name() -> None:
    model = LayerModel.fit([profile("edge", lawful())])
    figures = {"macs": 2000.0, "input_elements": 100.0, "output_elements": 100.0}
    assert model.ns("GRU", figures) == model.general.ns(figures) > 0
    with pytest.raises(SpecError, match="GRU.*Conv2d, Linear"):
        model.ns("GRU", figures, strict=True)
    with pytest.raises(SpecError, match="5 measured layers"):
        LayerModel.fit([profile("edge", lawful(1))])


def test_regression_predicts_a_model_it_was_not_fitted_on(tmp_path: Path) -> None:
    paths = []
    for side in ("edge", "cloud"):
        path = tmp_path / f"{side}.json"
        profiles.write(profile(side, lawful(12), weights_hash="dd"), path)  # type: ignore[arg-type]
        paths.append(str(path))
    given = situation(",".join(paths))
    decision = find_partitioner("regression").decide(given)
    measured = {one.name: one for one in given.candidates}
    for one in decision.ranking:
        assert one.latency_ns == pytest.approx(measured[one.name].latency_ns, rel=0.05)
        assert any("by regression, error" in note for note in one.notes)
        assert one.layer_id is None or one.stages_ns["tail"] >= 0.1 * MS, "decoding and encoding are no layers"
    with pytest.raises(SpecError, match="no profile|none of the files|of the edge|cloud"):
        find_partitioner("regression").decide(situation(paths[0]))


def test_unsteady_cut_is_unranked_but_selectable() -> None:
    given = situation("3")
    candidates = [replace(one, unsteady="varies") if one.name == "layer3" else one for one in given.candidates]
    given = replace(given, candidates=candidates)
    assert find_partitioner("latency").decide(given).rejected == {"layer3": "varies"}
    assert find_partitioner("fixed").decide(given).winner.name == "layer3"
    cycle = find_partitioner("cycle")
    assert [cycle.decide(given).winner.name for _ in candidates] == [one.name for one in candidates]


def test_unsteady_cut_is_ranked_if_fastest_at_its_slowest() -> None:
    given = situation("3")
    fastest = min(given.candidates, key=lambda one: one.latency_ns)
    second = min(one.latency_ns for one in given.candidates if one is not fastest)

    def decided(slow_ns: float, objective: str = "latency") -> Decision:
        unsteady = replace(fastest, unsteady="varies", slow_ns=slow_ns)
        candidates = [unsteady if one is fastest else one for one in given.candidates]
        return decide(candidates, Objective.parse(objective))

    assert decided(second - 1).winner.name == fastest.name and not decided(second - 1).rejected
    shown = decided(second + 1)
    assert shown.rejected == {fastest.name: "varies"}
    count = len(given.candidates)
    assert shown.rejection(given.candidates) == f"1 of {count} candidates not ranked: {fastest.name}: varies"
    assert (
        replace(shown, rejected={"another": "varies"}).rejection(given.candidates)
        == f"0 of {count} candidates not ranked"
    )
    assert fastest.name in decided(second - 1, "bytes").rejected, "what another objective would take is not known"
