"""The first promise: every cut of every model is exact, or refused with a reason.

Of models with many cuts `some_cuts_of` takes some.
"""

from __future__ import annotations

import pytest

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, IsthmusError
from tests.shared_hooks.cutting import case_of, cuts_of, head, planned, some_cuts_of, tail, whole
from tests.shared_hooks.shown import check
from tests.zoo import CASES, Case
from tests.zoo.compare import differences

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_without_a_cut_the_output_is_the_models_own(case: Case) -> None:
    expected, expected_other = case.run(case.build()), case.run(case.build(), case.other_inputs())
    wrapped = WrappedModel(case.build())
    found = list(differences(whole(wrapped, case, case.inputs()), expected))
    found += list(differences(whole(wrapped, case, case.other_inputs()), expected_other, "other"))
    wrapped.detach()
    found += list(differences(case.run(wrapped.model), expected, "after detach"))
    assert not found


@every_case
def test_every_cut_is_exact(case: Case) -> None:
    """Two requests are interleaved at each cut, so that what one leaves behind would show in the other.

    ``cloud`` never plans by itself: all it knows arrives in the bytes.
    """
    expected, expected_other = case.run(case.build()), case.run(case.build(), case.other_inputs())
    edge, cloud = planned(case), WrappedModel(case.build())
    failures: list[str] = []
    for cut in some_cuts_of(edge, case):
        try:
            early = head(edge, case, cut, case.inputs())
            try:
                other = head(edge, case, cut, case.other_inputs())
                got_other = tail(cloud, case, cut, other)
                failures += [f"cut {cut}: {text}" for text in differences(got_other, expected_other, "other")]
            except IsthmusError as error:
                if not (case.branches or case.loud):
                    failures.append(f"cut {cut}, other inputs: {type(error).__name__}: {error}")
            failures += [f"cut {cut}: {text}" for text in differences(tail(cloud, case, cut, early), expected)]
        except Exception as error:
            if case.loud and isinstance(error, IsthmusError):
                continue
            failures.append(f"cut {cut}: {type(error).__name__}: {error}")
        else:
            check(early, cloud.recipes.recipe(early, cloud.device), *cloud.get_layer_metrics()[-1:])
    assert not failures, "\n".join(failures)


@every_case
def test_few_cuts_are_refused_and_each_says_why(case: Case) -> None:
    wrapped = planned(case)
    args, kwargs = case.inputs()
    refused = [layer for layer in wrapped.layers if not layer.can_split]
    for layer in refused:
        assert layer.reason
        with pytest.raises(CutRefused, match=r"\w"), case.setting():
            wrapped.forward(*args, end=layer.layer_id, **kwargs)
    reasons = "\n".join(f"{layer.name}: {layer.reason}" for layer in refused)
    assert len(refused) <= case.max_refused * len(wrapped.layers), reasons
    with case.setting():
        check(wrapped, wrapped.layers, wrapped.plan(*args, **kwargs))  # nothing of it is shown at length


@pytest.mark.parametrize("case", [case for case in CASES if case.listed], ids=lambda case: case.name)
def test_verify_finds_every_cut_exact(case: Case) -> None:
    wrapped = WrappedModel(case.build())
    args, kwargs = case.inputs()
    with case.setting():
        report = wrapped.verify(*args, **kwargs)
    assert report.ok, report.as_dict()
    assert not report.differing
    assert len(report.exact) + len(report.refused) == len(wrapped.cuts)
    assert [one.name for one in report.refused] == [one.name for one in wrapped.cuts if not one.can_split]


@pytest.mark.parametrize("name", ["residual", "hf_bert", "one_module_several_times", "single_linear_root"])
def test_cuts_may_be_named(name: str) -> None:
    case = case_of(name)
    expected, edge, cloud = case.run(case.build()), planned(case), WrappedModel(case.build())
    names = [layer.name for layer in edge.layers]
    assert len(set(names)) == len(names)
    assert [layer.layer_id for layer in edge.layers] == list(range(len(names)))
    for layer in edge.layers:
        early = head(edge, case, layer.name, case.inputs())
        assert not list(differences(tail(cloud, case, layer.name, early), expected))
        assert not list(differences(tail(cloud, case, layer.layer_id, early), expected)), "by id, a second time"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", ["residual", "hf_bert", "nested_sequential", "transformer_encoder", "unet"])
def test_shallow_wraps_are_exact(name: str, depth: int) -> None:
    case = case_of(name)
    args, kwargs = case.inputs()
    expected = case.run(case.build())
    edge, cloud = WrappedModel(case.build(), depth=depth), WrappedModel(case.build(), depth=depth)
    edge.plan(*args, **kwargs)
    assert all(layer.name.count(".") < max(depth, 1) for layer in edge.layers)
    for cut in cuts_of(edge):
        assert not list(differences(tail(cloud, case, cut, head(edge, case, cut, case.inputs())), expected)), cut
