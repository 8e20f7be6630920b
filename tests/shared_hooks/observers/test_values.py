"""What observers report, compared with direct computation."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from shared_hooks.errors import InputMismatch
from shared_hooks.observers import (
    ActivationStats,
    Custom,
    GradientStats,
    MemoryUse,
    NonFiniteFound,
    NonFiniteGuard,
    TopTokens,
)
from shared_hooks.observers.kinds import activation
from shared_hooks.observers.kinds.activation import histogram, statistics
from tests.shared_hooks.observers.left import hooks_left
from tests.shared_hooks.observers.small import Residual, image


def outputs(model: nn.Module, *args: Any) -> dict[str, Tensor]:
    """By PyTorch's own hooks: copies, since a later layer may work in place."""
    found: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: found.__setitem__(name, output.clone()))
        for name, module in model.named_modules()
    ]
    with torch.no_grad():
        model(*args)
    for handle in handles:
        handle.remove()
    return found


def test_statistics_are_those_of_the_outputs() -> None:
    model = Residual()
    expected = outputs(model, image())
    with ActivationStats().attach(model) as stats, torch.no_grad():
        model(image())
    assert [record.name for record in stats.records] == ["stem", "body.0", "body.1", "body.2", "classifier"]
    for record in stats.records:
        tensor = expected[record.name]
        assert record.shape == tuple(tensor.shape) and record.dtype == "float32" and record.device == "cpu"
        assert record.part == "" and record.step == 0 and record.nonfinite == 0
        assert record.mean == pytest.approx(tensor.mean().item(), rel=1e-4, abs=1e-6)
        assert record.std == pytest.approx(tensor.std().item(), rel=1e-4)
        assert (record.min, record.max) == (tensor.min().item(), tensor.max().item())
        assert record.sparsity == pytest.approx((tensor == 0).double().mean().item())
        assert list(record.histogram) == torch.histc(tensor, 10).tolist()
    assert not hooks_left(model)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)
ANY = st.one_of(FINITE, st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@given(st.lists(ANY, min_size=2, max_size=40), DTYPES, st.booleans())
@example([0.0, 2.596951490599332e-31], torch.float32, False)
@example([1e-22, 3e-22], torch.float32, False)
def test_statistics_of_anything(values: list[float], dtype: torch.dtype, as_on_a_gpu: bool) -> None:
    tensor = torch.tensor(values).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if as_on_a_gpu:
            patch.setattr(activation, "_finite_on_cpu", lambda x, bins: None)
        mean, std, least, most, zeros, nonfinite, low, high, *counts = statistics(tensor, 5).tolist()
    wide = tensor.double()
    finite = wide[torch.isfinite(wide)]
    assert zeros == (tensor == 0).sum() and nonfinite == len(values) - len(finite) and sum(counts) == len(finite)
    assert least == pytest.approx(wide.min().item(), nan_ok=True)
    assert most == pytest.approx(wide.max().item(), nan_ok=True)
    if len(finite) == len(values):
        scale = wide.abs().max().item() + 1e-30
        assert mean == pytest.approx(wide.mean().item(), rel=1e-4, abs=1e-5 * scale)
        assert std == pytest.approx(wide.std().item(), rel=1e-3, abs=1e-3 * scale)
    if len(finite):
        assert (low, high) == (finite.min().item(), finite.max().item())


@given(st.lists(FINITE, min_size=2, max_size=200))
def test_the_histogram_that_waits_for_no_device_is_torchs(values: list[float]) -> None:
    x = torch.tensor(values)
    counts = histogram(x, x.min(), x.max(), 4)
    assert counts.sum() == len(values)
    if x.max() > x.min():
        ends = torch.histc(x.double(), 4, x.min().item(), x.max().item()).long()
        # an element on an edge between two bins may fall to either side
        assert (counts - ends).abs().sum() <= 2 * (len(values) // 2 + 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.tensor([True, False]),
        torch.zeros(0),
        torch.tensor(3.0),
        torch.ones(3, 3).t(),
        torch.tensor([3 + 4j, 0j]),
        torch.full((4,), 2.5),
    ],
)
def test_statistics_of_unusual_tensors(tensor: Tensor) -> None:
    mean, std, least, most, _, nonfinite, _, _, *counts = statistics(tensor, 3).tolist()
    if tensor.numel() == 0:
        assert math.isnan(mean) and math.isnan(std) and math.isnan(least) and counts == [0, 0, 0]
        return
    x = tensor.abs() if tensor.is_complex() else tensor
    assert nonfinite == 0 and sum(counts) == x.numel()
    assert (mean, least, most) == (x.double().mean().item(), float(x.min()), float(x.max()))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: torch.fft.fft(x).conj().contiguous().imag,
        lambda x: x[:0],
        lambda x: "no tensor",
    ],
    ids=["sparse", "rows", "eight bits", "negated", "nothing", "text"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_unusual_outputs_fail_no_observer(make: Any) -> None:
    class Giving(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return make(x)

    model, observers = Giving(), [ActivationStats(), NonFiniteGuard(), MemoryUse(), Custom(lambda *seen: seen[2])]
    with ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.attach(model))
        model(torch.ones(2, 3))
    assert [(observer.failures, observer.last_failure) for observer in observers] == [(0, "")] * 4


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": (x, [x + 1]), "flag": True, "ids": x.long()}


def test_nested_outputs_give_a_record_for_each_tensor() -> None:
    with ActivationStats().attach(Nested()) as stats:
        stats_model = Nested()
    assert stats.records == []
    with ActivationStats("(model)").attach(stats_model) as stats:
        stats_model(torch.ones(2))
    assert [(record.name, record.part, record.mean) for record in stats.records] == [
        ("(model)", "hidden.0", 1.0), ("(model)", "hidden.1.0", 2.0), ("(model)", "ids", 1.0),
    ]  # fmt: skip


class Planted(nn.Module):
    """NaN and Inf appear in ``bad``."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[1, 2] = math.nan
        x[1, 3] = -math.inf
        return x


@pytest.fixture
def sick() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Planted(), nn.ReLU(), nn.Linear(4, 2))


def test_planted_nan_is_found_where_it_was_planted(sick: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    with NonFiniteGuard().attach(sick) as guard, torch.no_grad():
        sick(torch.ones(2, 4))
    assert guard.first is not None
    assert (guard.first.name, guard.first.nan, guard.first.inf, guard.first.where) == ("1", 1, 1, (1, 2))
    assert [record.name for record in guard.records] == ["1", "2", "3"] and guard.total == 5
    assert "1 gave 1 NaN and 1 Inf, the first at (1, 2) of (2, 4) (and 2 more after it)" in caplog.text


def test_a_guard_raises_or_calls_if_asked(sick: nn.Module) -> None:
    with NonFiniteGuard(action="raise").attach(sick), pytest.raises(NonFiniteFound, match="1 gave 1 NaN") as raised:
        sick(torch.ones(2, 4))
    assert [record.name for record in raised.value.records] == ["1", "2", "3"] and not hooks_left(sick)
    reported: list[Any] = []
    with NonFiniteGuard(action=reported.extend).attach(sick):
        sick(torch.ones(2, 4))
    assert [record.name for record in reported] == ["1", "2", "3"]
    with pytest.raises(InputMismatch, match="action"):
        NonFiniteGuard(action="shout")


def test_a_guard_has_nothing_to_say_of_a_sound_model() -> None:
    model = Residual()
    with NonFiniteGuard(action="raise").attach(model) as guard:
        model(image())
    assert guard.records == [] and guard.first is None and guard.calls == 5


def test_memory_of_each_module() -> None:
    model = Residual()
    with MemoryUse(["stem", "body", "(model)"]).attach(model) as memory, torch.no_grad():
        model(image())
    stem, body, whole = memory.records
    assert (stem.name, body.name, whole.name) == ("stem", "body", "(model)")
    assert stem.output_bytes == 2 * 4 * 8 * 8 * 4 and stem.own_bytes == (4 * 3 * 9 + 4) * 4
    assert whole.own_bytes == sum(tensor.nbytes for tensor in model.parameters()) and whole.device == "cpu"
    for record in memory.records:
        assert record.allocated.status == "measured" and record.growth.status == "measured"
        assert record.peak.value is not None and record.peak.value >= record.allocated.value
    assert [record.name for record in memory.top(2, by="own_bytes")] == ["(model)", "body"]
    with pytest.raises(InputMismatch, match="by is one of"):
        memory.top(by="colour")  # type: ignore[arg-type]


class Letters:
    """A tokenizer as far as it is needed."""

    def decode(self, ids: list[int]) -> str:
        return chr(97 + ids[0])


def test_tokens_are_the_likeliest_of_the_last_position() -> None:
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(1))
    model = nn.Identity()
    with TopTokens(k=3, tokenizer=Letters()).attach(model) as tokens:
        model(logits)
    for row, record in enumerate(tokens.records):
        expected = logits[row, -1].topk(3)
        assert record.row == row and list(record.ids) == expected.indices.tolist()
        assert list(record.logits) == expected.values.tolist()
        assert record.probabilities == pytest.approx(logits[row, -1].softmax(-1)[expected.indices].tolist())
        assert record.text == tuple(chr(97 + one) for one in record.ids)


def test_gradients_are_those_of_the_outputs() -> None:
    model = Residual()
    x = image()
    with GradientStats(["body", "classifier"]).attach(model) as stats:
        model(x).square().sum().backward()
    by_name = {record.name: record for record in stats.records}
    body_output = (out := model.body(stem := model.stem(x)))
    grad_body, answer = None, model.classifier((body_output + stem).mean((2, 3)))
    grad_body, grad_answer = torch.autograd.grad(answer.square().sum(), [out, answer])
    for name, grad in (("body", grad_body), ("classifier", grad_answer)):
        assert by_name[name].shape == tuple(grad.shape)
        assert by_name[name].mean == pytest.approx(grad.mean().item(), rel=1e-3, abs=1e-7)
        assert by_name[name].norm == pytest.approx(grad.norm().item(), rel=1e-3)
    model(x).sum().backward()
    assert len(stats.records) == 2 and not hooks_left(model)


def test_gradients_are_the_same_with_and_without_an_observer() -> None:
    plain, watched = Residual(), Residual()
    with GradientStats().attach(watched), ActivationStats().attach(watched):
        watched(image()).sum().backward()
    plain(image()).sum().backward()
    pairs = zip(plain.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)  # type: ignore[arg-type]
