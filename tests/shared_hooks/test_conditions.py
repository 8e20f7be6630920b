"""Surroundings and changes: other shapes, memory formats, ambient modes, training mode, failing models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, IsthmusError
from tests.shared_hooks.cutting import case_of, cuts_of, through_bytes
from tests.zoo.case import Draw, seeded
from tests.zoo.compare import differences, same
from tests.zoo.skips import Residual

build = seeded(Residual)
X = Draw(7).randn(2, 3, 16, 16)


def reference(x: Tensor, model: nn.Module | None = None) -> Any:
    with torch.no_grad():
        return (model or build())(x)


def exact_at_every_cut(edge: WrappedModel, cloud: WrappedModel, x: Tensor, expected: Any) -> None:
    edge.plan(x)
    for cut in cuts_of(edge):
        early = through_bytes(edge.forward(x, end=cut))
        assert not list(differences(cloud.forward(early, start=cut), expected)), cut


SHAPES = [(1, 3, 16, 16), (5, 3, 16, 16), (2, 3, 20, 12), (2, 3, 16, 16), (0, 3, 16, 16)]


def test_other_shapes_are_planned_again() -> None:
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    digests = []
    for shape in SHAPES:
        x = Draw(1).randn(*shape)
        exact_at_every_cut(edge, cloud, x, reference(x))
        digests.append(edge.plan(x).digest)
    assert digests[3] == edge.plan(X).digest


def test_memory_formats_and_layouts() -> None:
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    wide = Draw(3).randn(2, 3, 32, 32)
    for x in (X, X.to(memory_format=torch.channels_last), wide[:, :, ::2, 1::2], X.transpose(2, 3), X.flip(0)):
        exact_at_every_cut(edge, cloud, x, reference(x))


def test_planned_dense_run_strided() -> None:
    """One signature or two: the answer must be that of the very input."""
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    edge.plan(X)
    strided = X.to(memory_format=torch.channels_last)
    for cut in cuts_of(edge):
        early = through_bytes(edge.forward(strided, end=cut))
        assert same(cloud.forward(early, start=cut), reference(strided)), cut


AMBIENT: list[tuple[str, Callable[[], AbstractContextManager[Any]]]] = [
    ("grad", torch.enable_grad),
    ("no_grad", torch.no_grad),
    ("inference", torch.inference_mode),
]


@pytest.mark.parametrize("heads", AMBIENT, ids=lambda a: a[0])
@pytest.mark.parametrize("tails", AMBIENT, ids=lambda a: a[0])
def test_ambient_gradient_modes(heads: Any, tails: Any) -> None:
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    with heads[1]():
        edge.plan(X)
        earlies = [(cut, edge.forward(X, end=cut)) for cut in cuts_of(edge)]
        assert same(edge.forward(X).detach(), reference(X))
    with tails[1]():
        for cut, early in earlies:
            assert same(cloud.forward(through_bytes(early), start=cut).detach(), reference(X))
        assert same(cloud.forward(X).detach(), reference(X))


def test_autocast_around_the_head_is_carried_to_the_tail() -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = build()(X)
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        edge.plan(X)
        earlies = [(cut, edge.forward(X, end=cut)) for cut in cuts_of(edge)]
    for cut, early in earlies:
        assert not list(differences(cloud.forward(through_bytes(early), start=cut), expected)), cut


def test_autocast_around_the_tail_only_changes_nothing_or_is_an_error() -> None:
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    edge.plan(X)
    for cut in cuts_of(edge):
        early = through_bytes(edge.forward(X, end=cut))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            try:
                out = cloud.forward(early, start=cut)
            except IsthmusError:
                continue
        assert not list(differences(out, reference(X))), cut


def test_a_plan_made_without_autocast_is_not_used_with_it() -> None:
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    edge.plan(X)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = build()(X)
        for cut in cuts_of(edge):
            assert same(cloud.forward(through_bytes(edge.forward(X, end=cut)), start=cut), expected), cut


def test_default_dtype_differs_between_the_sides() -> None:
    """Constants made in the tail would have another type: an error, or the right answer."""
    case = case_of("list_inputs")
    edge, cloud = WrappedModel(case.build()), WrappedModel(case.build())
    args, _ = case.inputs()
    expected = case.run(case.build())
    edge.plan(*args)
    for cut in cuts_of(edge):
        early = through_bytes(edge.forward(*args, end=cut))
        torch.set_default_dtype(torch.float64)
        try:
            assert not list(differences(cloud.forward(early, start=cut), expected)), cut
        except IsthmusError:
            pass
        finally:
            torch.set_default_dtype(torch.float32)


def test_training_mode_dropout_is_in_the_agreement() -> None:
    """In training mode a model draws at random: a cut is refused, or the draws before it are not drawn again."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)))().train()
    x = Draw(0).randn(4, 8)
    with WrappedModel(model) as wrapped:
        wrapped.plan(x)
        for cut in (1, 2):
            if wrapped.layers[cut].can_split:
                torch.manual_seed(1)
                with torch.no_grad():
                    expected = model(x)
                torch.manual_seed(1)
                early = through_bytes(wrapped.forward(x, end=cut))
                assert same(wrapped.forward(early, start=cut), expected)


def test_train_and_eval_are_distinguished() -> None:
    """The head in eval, the tail in training mode: an error, never an answer with batch statistics."""
    edge, cloud = WrappedModel(build()), WrappedModel(build().train())
    early = through_bytes(edge.forward(X, end=1))
    with pytest.raises(IsthmusError):
        cloud.forward(early, start=1)
    cloud.model.eval()
    assert same(cloud.forward(early, start=1), reference(X))


def test_training_flags_of_submodules_are_compared() -> None:
    """One BatchNorm left in training mode on the cloud would use batch statistics and move its running ones."""
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    early = through_bytes(edge.forward(X, end=1))
    norm = cloud.model.get_submodule("blocks.1.bn2").train()
    try:
        got = cloud.forward(early, start=1)
    except IsthmusError:
        got = None
    assert got is None or same(got, reference(X))
    norm.eval()
    assert same(cloud.forward(early, start=1), reference(X))


def test_submodule_switched_to_training_after_planning() -> None:
    edge = WrappedModel(build())
    edge.plan(X)
    edge.model.get_submodule("blocks.1.bn2").train()
    expected_model = build()
    expected_model.get_submodule("blocks.1.bn2").train()
    with torch.no_grad():
        expected = expected_model(X)
    assert same(edge.forward(X), expected)
    with pytest.raises(CutRefused, match=r"blocks\.1\.bn2\.num_batches_tracked"):
        edge.forward(X, end=1)  # a tail would move the cloud's running statistics


def test_a_wrapped_forward_makes_no_gradients() -> None:
    """Inference only, whatever the caller's gradient mode: the bits are those under no_grad."""
    with WrappedModel(build()) as wrapped, torch.enable_grad():
        out = wrapped.forward(X)
        assert not out.requires_grad
        assert same(out, reference(X))
        assert same(wrapped.forward(wrapped.forward(X, end=3), start=3), reference(X))


def test_switching_to_training_after_planning() -> None:
    edge = WrappedModel(build())
    edge.plan(X)
    edge.model.train()
    expected_model = build().train()
    with torch.no_grad():
        expected = expected_model(X)
    assert same(edge.forward(X), expected)


def test_nan_goes_through() -> None:
    x = X.clone()
    x[0, 0, 3, 3] = float("nan")
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    exact_at_every_cut(edge, cloud, x, reference(x))


def test_tensors_that_require_grad_and_parameters_as_inputs() -> None:
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    for x in (X.clone().requires_grad_(), nn.Parameter(X.clone())):
        exact_at_every_cut(edge, cloud, x, reference(X))


def test_weights_changed_after_planning_are_used() -> None:
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    edge.plan(X)
    cloud.plan(X)
    other = seeded(Residual, seed=3)()
    for wrapped in (edge, cloud):
        wrapped.model.load_state_dict(other.state_dict())
    exact_at_every_cut(edge, cloud, X, reference(X, other))
