"""An observer that raises, returns, writes, draws, blocks or grows is contained; its cost is known."""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import InputMismatch
from shared_hooks.observers import ActivationStats, Custom, Deferred, ObservedCall, Observer, Transform
from shared_hooks.observers.transforms import active
from shared_hooks.observers.watching import copy_of, parts
from tests.shared_hooks.observers.left import hooks_left
from tests.shared_hooks.observers.small import Functional, Residual, image


def test_failing_observer_is_reported_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = Residual()

    def broken(module: nn.Module, inputs: Any, output: Any, name: str) -> Any:
        if name.startswith("body"):
            raise ValueError("no")
        return name

    with Custom(broken).attach(model) as custom, caplog.at_level(logging.WARNING):
        assert torch.equal(model(image()), Residual()(image()))
        model(image())
    assert custom.failures == 6 and custom.last_failure == "body.2: ValueError: no"
    assert [record.value for record in custom.records] == ["stem", "classifier"] * 2
    assert len(caplog.records) == 1 and "body.0: ValueError: no" in caplog.text


class Late(Observer):
    """Fails where the forward ends."""

    def observe(self, call: ObservedCall, name: str, step: int) -> Deferred:
        return Deferred(torch.zeros(1), lambda values: 1 // 0)


def test_observer_failing_at_the_end_of_the_forward() -> None:
    model = Residual()
    with Late().attach(model) as late, ActivationStats().attach(model) as stats:
        model(image())
    assert late.failures == 1 and "the end of step 0" in late.last_failure and len(stats.records) == 5


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_misbehaving_observer_changes_nothing(timeout: float | None) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(3)

    model = nn.Sequential(nn.Linear(3, 3), Noisy(), nn.ReLU(inplace=True))

    def nosy(module: nn.Module, inputs: Any, output: Tensor, name: str) -> Tensor:
        output.zero_()
        inputs[0].fill_(7.0)
        torch.rand(5)
        return output

    x = torch.ones(2, 3)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    with Custom(nosy, timeout=timeout).attach(model) as custom:
        assert torch.equal(model(x), expected)
    assert torch.equal(x, torch.ones(2, 3)) and custom.failures == 0
    assert all(torch.equal(record.value, torch.zeros(2, 3)) for record in custom.records) and len(custom.records) == 3


def test_blocking_observer_is_given_up() -> None:
    entered, release = threading.Event(), threading.Event()
    called: list[str] = []

    def stuck(module: nn.Module, inputs: Any, output: Any, name: str) -> None:
        called.append(name)
        entered.set()
        release.wait(60)

    with WrappedModel(Residual()) as wrapped, Custom(stuck, timeout=0.05).attach(wrapped) as custom:
        try:
            assert torch.equal(wrapped.forward(image()), Residual()(image()))
        finally:
            release.set()
    assert entered.wait(60)  # on a busy machine its thread may begin after it was given up
    assert custom.switched_off and called == ["stem"] and custom.failures == 1
    assert custom.notes == ("switched off: the function took longer than 0.05 s",)


def test_observer_calling_the_model_is_not_reentered() -> None:
    model = Residual()
    for timeout in (None, 30.0):
        seen: list[str] = []

        def again(module: nn.Module, inputs: Any, output: Any, name: str, seen: list[str] = seen) -> None:
            seen.append(name)
            module(torch.zeros_like(inputs[0]))

        with Custom(again, timeout=timeout).attach(model):
            model(image())
        assert seen == ["stem", "body.0", "body.1", "body.2", "classifier"]


def test_records_of_an_observer_are_bounded() -> None:
    model = Residual()
    with ActivationStats("stem", max_records=3).attach(model) as few:
        for _ in range(5):
            model(image())
    assert [record.step for record in few.records] == [2, 3, 4] and few.dropped == 2
    size = model.stem(image()).nbytes
    with Custom(lambda *given: given[2], "stem", max_bytes=3 * size).attach(model) as big:
        for _ in range(5):
            model(image())
    # the records themselves take some bytes, too
    assert [record.step for record in big.records] == [3, 4] and big.dropped == 3
    few.clear()
    assert few.records == []


def test_arguments_of_the_other_side_are_none() -> None:
    with WrappedModel(Residual()) as wrapped:
        early = wrapped.forward(image(), end="body.1")
        with Custom(lambda module, inputs, output, name: (inputs, output), ["body", "(model)"]).attach(
            wrapped
        ) as custom:
            wrapped.forward(early, start="body.1")
    (body, whole) = custom.records
    # the input of the body crosses, because it is added later; the image does not
    assert body.name == "body" and body.value[0][0].shape == body.value[1].shape == (2, 4, 8, 8)
    assert whole.value[0] == (None,) and custom.failures == 0


class Pair(NamedTuple):
    first: Tensor
    rest: list[Any]


def test_copies_keep_their_holders() -> None:
    x = torch.arange(3.0)
    for value in (x, [x, 1], (x,), {"a": x}, Pair(x, [x, "b"]), torch.stack([x, x]).max(0), None, "text"):
        copied = copy_of(value)
        assert type(copied) is type(value)
        for (place, one), (other_place, other) in zip(parts(value), parts(copied), strict=True):
            assert place == other_place and torch.equal(one, other) and one.data_ptr() != other.data_ptr()
    assert [place for place, _ in parts(Pair(x, [x, {"c": x}]))] == ["first", "rest.0", "rest.1.c"]
    holder = type("Holder", (), {})()
    holder.inner = x
    holder.itself = holder
    assert list(copy_of(holder)) == ["inner"]


def test_keyword_arguments_come_last() -> None:
    class Keyword(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> Tensor:
            return x * scale

    model = Keyword()
    with Custom(lambda module, inputs, output, name: inputs, "").attach(model) as custom:
        model(torch.ones(1), scale=2.0)
    assert custom.records[0].value == (torch.ones(1), {"scale": 2.0})


def test_everything_is_taken_away_after_an_exception() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("the model's own")

    model = nn.Sequential(nn.Linear(2, 2), Bad())
    with pytest.raises(RuntimeError, match="own"), ActivationStats().attach(model) as stats:
        model(torch.ones(1, 2))
    assert not hooks_left(model) and [record.name for record in stats.records] == ["0"]


def test_hooks_of_others_are_kept() -> None:
    model = Residual()
    calls: list[int] = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    own = model.body.forward
    model.body.forward = lambda x: own(x)  # type: ignore[method-assign]
    before = hooks_left(model)
    with ActivationStats().attach(model):
        model(image())
    assert hooks_left(model) == before == ["stem", "body"] and calls == [1]


def test_only_this_thread_if_asked() -> None:
    model = Residual()
    with ActivationStats("stem").attach(model, this_thread=True) as stats:
        thread = threading.Thread(target=model, args=(image(),))
        thread.start()
        thread.join(30)
        assert stats.records == []
        model(image())
    assert len(stats.records) == 1


def test_threads_see_each_their_own_forward() -> None:
    with WrappedModel(Residual()) as wrapped, ActivationStats().attach(wrapped) as stats:
        wrapped.plan(image())
        threads = [threading.Thread(target=wrapped.forward, args=(image(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert stats.failures == 0 and len(stats.records) == 20
    assert sorted(record.step for record in stats.records) == sorted([0, 1, 2, 3] * 5)


def test_two_forwards_that_begin_at_once_are_two_steps() -> None:
    class Interrupted(int):
        """Another thread's forward begins between the look at this number and the next."""

        def __add__(self, other: int) -> int:
            second.start()
            second.join(0.2)  # with or without it: whoever waits for the lock gets the next number
            return int(self) + other

    model = Residual()
    with ActivationStats("stem").attach(model) as stats:
        (attached,) = model.forward.watching.watchers  # type: ignore[attr-defined]
        second = threading.Thread(target=model, args=(image(),))
        attached._next = Interrupted(0)
        model(image())
        second.join(30)
    assert sorted(record.step for record in stats.records) == [0, 1]


def test_observers_come_and_go_while_the_model_runs() -> None:
    model = Residual()
    expected = model(image())
    stop = threading.Event()
    wrong: list[Any] = []

    def run(forward: Any) -> None:
        while not stop.is_set():
            try:
                if not torch.equal(forward(image()), expected):
                    wrong.append("another value")
            except Exception as error:
                wrong.append(error)

    with WrappedModel(model) as wrapped:
        threads = [threading.Thread(target=run, args=(forward,)) for forward in (model, wrapped.forward)]
        for thread in threads:
            thread.start()
        try:
            for number in range(40):
                with ActivationStats().attach(model if number % 2 else wrapped) as stats:
                    model(image())
                assert stats.failures == 0 and len(stats.records) >= 5
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
    assert wrong == [] and not hooks_left(model)


def test_cost_is_known() -> None:
    model = Residual()
    with ActivationStats(every_n=2).attach(model) as stats:
        assert stats.cost_ns == 0 == stats.cost_per_call_ns
        model(image())
        once = stats.cost_ns
        model(image())
        assert stats.calls == 5 and stats.cost_ns == once > 0
        assert stats.cost_per_call_ns == stats.cost_ns / 5
        model(image())
    assert stats.calls == 10 and stats.cost_ns > once


def test_a_transform_changes_values_and_says_so() -> None:
    model = Residual()
    double = Transform(lambda module, inputs, output, name: output * 2, "classifier")
    with WrappedModel(model) as wrapped:
        expected = wrapped.forward(image())
        early = wrapped.forward(image(), end="body.1")
        assert active(wrapped) == ()
        with double.attach(wrapped), ActivationStats("classifier").attach(wrapped) as stats:
            assert active(wrapped) == ("classifier",)
            assert torch.equal(wrapped.forward(early, start="body.1"), expected * 2)
            assert torch.equal(model(image()), expected * 2)
        assert active(wrapped) == () and torch.equal(wrapped.forward(early, start="body.1"), expected)
    assert [record.name for record in double.records] == ["classifier"] * 2
    assert stats.records[0].max == (expected * 2).max()
    assert not hooks_left(model)


def test_a_transform_before_the_cut_is_sent_as_transformed() -> None:
    with WrappedModel(Residual()) as edge, WrappedModel(Residual()) as cloud, WrappedModel(Residual()) as whole:
        zero = Transform(lambda module, inputs, output, name: torch.zeros_like(output), "body.0")
        with zero.attach(edge), zero.attach(whole):
            expected = whole.forward(image())
            assert not torch.equal(expected, Residual()(image()))
            for cut in ("body.0", "body.1", "body.2"):
                assert torch.equal(cloud.forward(edge.forward(image(), end=cut), start=cut), expected), cut


def test_a_transform_keeps_gradients() -> None:
    model = Functional()
    with Transform(lambda module, inputs, output, name: output * 3, "proj").attach(model):
        tripled = model(torch.ones(1, 6, 8))
        assert tripled.requires_grad
        tripled.sum().backward()
    other = Functional()
    other.load_state_dict(model.state_dict())
    other(torch.ones(1, 6, 8)).sum().backward()
    torch.testing.assert_close(model.proj.weight.grad, other.proj.weight.grad * 3)  # type: ignore[operator]


def test_a_transform_that_fails_or_gives_something_else_changes_nothing() -> None:
    model = Residual()
    for function in (lambda *given: given[2][:1], lambda *given: 1 // 0):
        with Transform(function, "stem").attach(model) as transform:
            assert torch.equal(model(image()), Residual()(image()))
        assert transform.failures == 1 and transform.records == []


def test_gradients_are_for_models_of_this_process() -> None:
    from shared_hooks.observers import GradientStats

    with WrappedModel(Residual()) as wrapped, pytest.raises(InputMismatch, match="without gradients"):
        GradientStats().attach(wrapped)
