"""What a wrapper does to a model (nothing), and what it tells: layers, metrics, banked outputs, errors."""

from __future__ import annotations

import copy
import functools
import pickle  # noqa: TID251  (a wrapped model is pickled by others, multiprocessing for one)
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import EarlyOutput, HookExitException, WrappedModel
from shared_hooks.errors import CutRefused, InputMismatch, IsthmusError, UnknownLayer
from tests.shared_hooks.cutting import case_of, through_bytes
from tests.zoo.case import seeded
from tests.zoo.compare import same
from tests.zoo.foreign import PatchedInstanceForward, UserHooksChangeOutputs
from tests.zoo.skips import Residual
from tests.zoo.vision import ResNetLike

build = seeded(Residual)
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(7))


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module, hooks included, by identity (contents for dictionaries)."""

    def facts(value: Any) -> Any:
        return {key: id(entry) for key, entry in value.items()} if isinstance(value, dict) else id(value)

    return {
        name: {key: facts(value) for key, value in vars(module).items()}
        for name, module in model.named_modules(remove_duplicate=False)
    }


@pytest.mark.parametrize("make", [Residual, UserHooksChangeOutputs, PatchedInstanceForward], ids=lambda c: c.__name__)
def test_detach_restores_exactly(make: type[nn.Module]) -> None:
    model = make().eval()
    x = X if make is Residual else X[:, 0, 0, :8]
    before, state = fingerprint(model), list(model.state_dict())
    wrapped = WrappedModel(model)
    early = wrapped.forward(x, end=1)
    wrapped.forward(early, start=1)
    wrapped.forward(x)
    wrapped.save_layers = {0}
    wrapped.forward(x)
    wrapped.detach()
    assert fingerprint(model) == before
    assert list(model.state_dict()) == state
    wrapped.detach()  # twice is once
    assert fingerprint(model) == before


def test_context_manager_detaches_also_after_an_error() -> None:
    model = build()
    before = fingerprint(model)
    with pytest.raises(ZeroDivisionError), WrappedModel(model) as wrapped:
        wrapped.forward(X)
        raise ZeroDivisionError
    assert fingerprint(model) == before


def test_wrapping_keeps_names_signature_mode_and_gradients() -> None:
    model = build().train()
    expected = [name for name, _ in model.named_modules()]
    grads = [parameter.requires_grad for parameter in model.parameters()]
    with WrappedModel(model) as wrapped:
        wrapped.forward(X)
        assert [name for name, _ in model.named_modules()] == expected
        assert [parameter.requires_grad for parameter in model.parameters()] == grads
        assert type(model) is Residual
        assert model.training


def test_a_wrapped_model_is_still_a_model() -> None:
    """Called directly, trained, copied, saved: as if nobody had wrapped it."""
    model = build()
    with torch.no_grad():
        expected = model(X)
    with WrappedModel(model) as wrapped:
        wrapped.forward(X)
        with torch.no_grad():
            assert same(model(X), expected)
        model(X).sum().backward()
        assert model.fc.weight.grad is not None  # type: ignore[union-attr]
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))  # noqa: S301  (our own bytes)
    for twin in (copied, loaded):
        with torch.no_grad():
            assert same(twin(X), expected)
        with WrappedModel(twin) as other, WrappedModel(build()) as edge:
            assert same(other.forward(through_bytes(edge.forward(X, end=3)), start=3), expected)


def test_copies_are_independent_of_the_wrapper() -> None:
    model = build()
    wrapped = WrappedModel(model)
    copied = copy.deepcopy(model)
    wrapped.save_layers = {0}
    wrapped.forward(X)
    banked = wrapped.banked_output[0].clone()
    with torch.no_grad():
        copied(X * 2)
    assert same(wrapped.banked_output[0], banked)


def test_two_wrappers_of_one_model() -> None:
    model = build()
    before = fingerprint(model)
    with torch.no_grad():
        expected = model(X)
    first, second = WrappedModel(model), WrappedModel(model, depth=1)
    assert same(second.forward(X), expected)
    assert same(first.forward(first.forward(X, end=4), start=4), expected)
    first.detach()
    assert same(second.forward(second.forward(X, end=0), start=0), expected)
    second.detach()
    assert fingerprint(model) == before


def test_users_hooks_added_and_removed_while_wrapped() -> None:
    model = build()
    wrapped = WrappedModel(model)
    wrapped.forward(X)
    handle = model.stem.register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[union-attr]
    with torch.no_grad():
        expected = model(X)
    assert same(wrapped.forward(X), expected)
    wrapped.detach()
    with torch.no_grad():
        assert same(model(X), expected), "the user's hook survives detach"
    handle.remove()
    assert not model.stem._forward_hooks  # type: ignore[union-attr]


def test_save_layers_by_id_and_name() -> None:
    features: dict[str, Tensor] = {}
    plain = build()
    for name in ("stem", "blocks.0.bn1", "fc"):

        def keep(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            features[name] = output.clone()

        plain.get_submodule(name).register_forward_hook(keep)
    with torch.no_grad():
        plain(X)
    wrapped = WrappedModel(build())
    wrapped.save_layers = {0, "blocks.0.bn1", "fc"}
    wrapped.forward(X)
    ids = {layer.name: layer.layer_id for layer in wrapped.layers}
    for name, feature in features.items():
        assert same(wrapped.banked_output[ids[name]], feature), f"{name}: an in-place ReLU follows"
    assert {key for key in wrapped.banked_output if isinstance(key, int)} == {ids[name] for name in features}
    early = wrapped.forward(X, end="blocks.0.bn1")
    assert same(wrapped.banked_output[ids["blocks.0.bn1"]], features["blocks.0.bn1"])
    wrapped.forward(early, start="blocks.0.bn1")
    assert same(wrapped.banked_output[ids["fc"]], features["fc"])


def test_saving_an_unknown_layer_is_an_error() -> None:
    wrapped = WrappedModel(build())
    wrapped.save_layers = {"blocks.0.bn7"}
    with pytest.raises(UnknownLayer, match="bn"):
        wrapped.forward(X)


def test_metrics_cover_what_ran() -> None:
    wrapped = WrappedModel(build())
    wrapped.forward(X)
    layers = wrapped.layers
    records = wrapped.get_layer_metrics()
    assert [(r.layer_id, r.name, r.layer_type, r.output_bytes) for r in records] == [
        (x.layer_id, x.name, x.layer_type, x.output_bytes) for x in layers
    ]
    assert all(r.inference_ns > 0 and r.inference_time == pytest.approx(r.inference_ns / 1e9) for r in records)
    assert set(wrapped.durations()) == {"whole"}
    assert sum(r.inference_ns for r in records) <= wrapped.durations()["whole"]
    early = wrapped.forward(X, end=4)
    assert [r.layer_id for r in wrapped.get_layer_metrics()] == [0, 1, 2, 3, 4]
    assert set(wrapped.durations()) == {"head"}
    wrapped.forward(early, start=4)
    assert [r.layer_id for r in wrapped.get_layer_metrics()] == list(range(5, len(layers)))
    assert set(wrapped.durations()) == {"inject", "compute"}
    assert records[0].as_dict()["name"] == "stem"


def test_metrics_can_be_off() -> None:
    wrapped = WrappedModel(build(), metrics=False)
    wrapped.forward(X)
    assert wrapped.get_layer_metrics() == []


@pytest.mark.parametrize("cut", [999, -5, "nowhere", "blocks.0.conv9", "", None.__class__, 1.5, True])
def test_unknown_cuts_are_errors(cut: Any) -> None:
    with WrappedModel(build()) as wrapped, pytest.raises(UnknownLayer):
        wrapped.forward(X, end=cut)


def test_unknown_names_get_near_ones() -> None:
    with WrappedModel(build()) as wrapped, pytest.raises(UnknownLayer, match=r"blocks\.0\.conv1"):
        wrapped.forward(X, end="block.0.conv1")


def test_a_layer_that_never_ran_is_said_so() -> None:
    case = case_of("module_list_chain")
    with WrappedModel(case.build()) as wrapped, pytest.raises(UnknownLayer, match="did not run|never|no layer"):
        wrapped.forward(*case.inputs()[0], end="layers.3")


@pytest.mark.parametrize("start", [2, 0, "input", "fc", 999, "nowhere"])
def test_wrong_start_is_an_error(start: Any) -> None:
    with WrappedModel(build()) as wrapped:
        early = wrapped.forward(X, end=3)
        with pytest.raises(IsthmusError):
            wrapped.forward(early, start=start)
        assert isinstance(wrapped.forward(early, start=3), Tensor), "and nothing is broken by it"


def test_start_without_an_early_output_is_an_error() -> None:
    with WrappedModel(build()) as wrapped, pytest.raises(InputMismatch):
        wrapped.forward(X, start=3)


def test_an_early_output_of_another_model_is_refused() -> None:
    from tests.zoo.vision import Basic

    early = WrappedModel(seeded(lambda: ResNetLike(Basic, 1))()).forward(torch.randn(1, 3, 32, 32), end=3)
    with WrappedModel(build()) as wrapped, pytest.raises(IsthmusError):
        wrapped.forward(early, start=3)


def test_early_outputs_can_be_used_again() -> None:
    """The tail works in place; what was sent must not change under it."""
    with WrappedModel(build()) as edge, WrappedModel(build()) as cloud:
        expected = edge.forward(X)
        for cut in range(len(edge.layers)):
            early = edge.forward(X, end=cut)
            data = early.to_bytes()
            received = EarlyOutput.from_bytes(data)
            for _ in range(2):
                assert same(cloud.forward(received, start=cut), expected)
                assert same(edge.forward(early, start=cut), expected)
            assert early.to_bytes() == data


def test_the_callers_tensor_is_not_touched() -> None:
    x = X.clone()
    with WrappedModel(build()) as wrapped:
        for cut in ("input", 0, 5):
            wrapped.forward(wrapped.forward(x, end=cut), start=cut)
    assert same(x, X)


def test_the_exit_signal_is_no_exception_a_model_catches() -> None:
    assert issubclass(HookExitException, BaseException)
    assert not issubclass(HookExitException, Exception)


def test_refused_cut_names_layer_and_reason() -> None:
    case = case_of("numpy_round_trip")
    wrapped = WrappedModel(case.build())
    args, _ = case.inputs()
    wrapped.plan(*args)
    for layer in wrapped.layers:
        if not layer.can_split:
            with pytest.raises(CutRefused, match=layer.name):
                wrapped.forward(*args, end=layer.name)


def test_output_aliases_stay_aliases() -> None:
    """Outputs that are views of one another are so behind a cut too."""
    case = case_of("aliased_outputs")
    edge, cloud = WrappedModel(case.build()), WrappedModel(case.build())
    args, _ = case.inputs()
    for cut in range(3):
        first, again, turned, thin, hidden = cloud.forward(through_bytes(edge.forward(*args, end=cut)), start=cut)
        assert first.data_ptr() == again.data_ptr() == turned.data_ptr() == thin.data_ptr() != hidden.data_ptr()
        assert turned.stride() == (1, 8)
        assert thin.stride() == (8, 2)


def test_digests_tell_models_apart() -> None:
    one, two = WrappedModel(build()), WrappedModel(build())
    assert one.weights_hash() == two.weights_hash()
    assert one.structure_digest() == two.structure_digest()
    assert one.plan(X).digest == two.plan(X).digest
    other = WrappedModel(seeded(Residual, seed=1)())
    assert other.weights_hash() != one.weights_hash()
    assert other.structure_digest() == one.structure_digest()
    assert WrappedModel(seeded(UserHooksChangeOutputs)()).structure_digest() != one.structure_digest()
    with torch.no_grad():
        two.model.fc.bias[0] += 1e-7  # type: ignore[union-attr,index,operator]
    assert one.weights_hash() != two.weights_hash()


class NoLength(tuple[Any, ...]):
    """As e3nn's irreps: a tuple that has no length."""

    def __len__(self) -> int:
        raise NotImplementedError


def scaled(by: float, width: int) -> float:
    return by * width


class OfALibrary(nn.Module):
    """Holds what libraries hold, and looks at its values as opt_einsum does: by the package of their class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.irreps = NoLength((1, 2, torch.ones(2)))
        self.scale = functools.lru_cache(functools.partial(scaled, 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale(4)
        if type(x).__module__.partition(".")[0] != "torch":
            x = torch.from_numpy(x.numpy())
        return self.second(x)


def test_models_of_libraries_are_wrapped_and_cut() -> None:
    edge, cloud = (WrappedModel(OfALibrary().eval()) for _ in range(2))
    x = torch.ones(1, 4)
    expected = OfALibrary().eval()(x)
    edge.plan(x)
    for cut in range(2):
        assert torch.equal(cloud.tail(edge.head(cut, x)), expected)
