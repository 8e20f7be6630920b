"""Calls in lock-step: what each gives, raises and leaves behind is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.errors import Cancelled, PlanMismatch
from shared_hooks.forward import bounded, interruptible
from shared_hooks.generation.together import Lockstep
from shared_hooks.observers import ObservedCall, Observer


class Counting(nn.Module):
    """A block of row-wise parts that counts the rows it is shown."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.last = nn.Linear(8, 4)

    def forward(self, rows: torch.Tensor, between: Callable[[], object] = lambda: None) -> Any:
        rows = self.first(rows)
        between()
        rows = rows + self.block(rows).mean(1, keepdim=True)  # not row-wise
        return self.last(rows)


@pytest.fixture
def model() -> Counting:
    return Counting().eval()


def inputs(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, 8, generator=generator) for shape in shapes]


def alone(model: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(rows) for rows in given]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shapes", [[(1, 1)] * 5, [(1, 1), (3, 1), (2, 1)], [(1, 4), (2, 1), (1, 1)]])
def test_lockstep_results_equal_single_ones(model: Counting, shapes: list[tuple[int, int]]) -> None:
    given = inputs(*shapes)
    with Lockstep(model) as together:
        outcomes = together.run([lambda rows=rows: model(rows) for rows in given])
    for outcome, wanted in zip(outcomes, alone(model, given), strict=True):
        close(outcome.result(), wanted)
        assert outcome.batch_size == len(shapes)
        assert outcome.meetings == 3  # first, block as a whole, last


def test_single_call_is_unchanged(model: Counting) -> None:
    given = inputs((1, 1))
    with Lockstep(model) as together:
        (outcome,) = together.run([lambda: model(given[0])])
        assert together.run([]) == []
    assert torch.equal(outcome.result(), alone(model, given)[0])
    assert (outcome.batch_size, outcome.meetings) == (1, 0)


def test_results_share_no_memory(model: Counting) -> None:
    """What one call writes to its own values does not reach another's."""
    given = inputs((1, 1), (1, 1))
    with Lockstep(model) as together:
        one, other = (outcome.result() for outcome in together.run([lambda r=r: model.first(r) for r in given]))
    before = other.clone()
    one.fill_(torch.nan)
    assert torch.equal(other, before)
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


@pytest.mark.parametrize("rows", [torch.zeros(1, 1, 7), torch.zeros(1, 1, 8, dtype=torch.float64), "no tensor"])
def test_error_of_one_call_stays_its_own(model: Counting, rows: Any) -> None:
    given = inputs((1, 1), (1, 1))
    with Lockstep(model) as together:
        first, wrong, last = together.run([lambda r=r: model(r) for r in (given[0], rows, given[1])])
    for outcome, wanted in zip((first, last), alone(model, given), strict=True):
        close(outcome.result(), wanted)
    with pytest.raises((RuntimeError, TypeError)):
        wrong.result()


def test_different_ways_come_together_again(model: Counting) -> None:
    """One call leaves a module out, another runs one twice: they share what is left."""
    a, b = inputs((1, 1), (1, 1))

    def short() -> torch.Tensor:
        return model.last(model.block(a))

    def long() -> torch.Tensor:
        return model.last(model.block(model.first(model.first(b))))

    with Lockstep(model) as together:
        outcomes = together.run([short, long])
    with torch.no_grad():
        close(outcomes[0].result(), short())
        close(outcomes[1].result(), long())
    assert [outcome.meetings for outcome in outcomes] == [2, 2]


@pytest.mark.parametrize("error", [Cancelled("it is not wanted any more"), KeyboardInterrupt()])
def test_call_is_ended_between_modules(model: Counting, error: BaseException) -> None:
    """The exception comes in the call, which puts back what it has to; others go on."""
    given = inputs((1, 1), (1, 1), (1, 1))
    put_back, asked = [], []

    def careful(rows: torch.Tensor) -> torch.Tensor:
        try:
            return model(rows)
        finally:
            put_back.append(rows)

    def ended(number: int) -> BaseException | None:
        asked.append(number)
        return error if number == 1 and asked.count(1) == 2 else None

    with Lockstep(model) as together:
        outcomes = together.run([lambda rows=rows: careful(rows) for rows in given], ended)
    assert outcomes[1].error is error
    assert outcomes[1].meetings == 1
    assert len(put_back) == 3
    for number in (0, 2):
        close(outcomes[number].result(), alone(model, given)[number])


def test_a_calls_limit_holds_while_it_runs(model: Counting) -> None:
    """No exception can come from outside for a call while another one runs."""

    class Watched:
        """A `Limit` that says when an exception may come."""

        may_come = False

        def interruptible(self, seconds: float) -> AbstractContextManager[None]:
            return self._while(True)

        def uninterrupted(self) -> AbstractContextManager[None]:
            return self._while(False)

        @contextmanager
        def _while(self, may_come: bool) -> Iterator[None]:
            before, self.may_come = self.may_come, may_come
            yield
            self.may_come = before

    limits = [Watched(), Watched()]
    seen = []

    def call(number: int) -> None:
        with bounded(limits[number]), interruptible():
            model(torch.zeros(1, 1, 8), lambda: seen.append([limit.may_come for limit in limits]))

    def ended(number: int) -> None:
        assert not limits[0].may_come and not limits[1].may_come

    with Lockstep(model) as together:
        assert [o.error for o in together.run([lambda: call(0), lambda: call(1)], ended)] == [None, None]
    assert seen == [[True, False], [False, True]]


def test_endless_call_is_abandoned(model: Counting) -> None:
    def stubborn() -> object:
        while True:
            try:
                model(torch.zeros(1, 1, 8))
            except Exception:
                continue

    def ended(number: int) -> BaseException | None:
        return Cancelled("enough") if number == 0 else None

    (given,) = inputs((1, 1))
    with Lockstep(model) as together:
        outcomes: list[Any] = together.run([stubborn, lambda: model(given)], ended)
    assert isinstance(outcomes[0].error, Cancelled)
    close(outcomes[1].result(), alone(model, [given])[0])


def test_base_exception_ends_all_calls(model: Counting) -> None:
    """An exception that is no `Exception` is the thread's own business; the others are left in order."""
    put_back = []

    def raises() -> object:
        model.first(torch.zeros(1, 1, 8))
        raise KeyboardInterrupt

    def careful() -> object:
        try:
            return model(torch.zeros(1, 1, 8))
        finally:
            put_back.append(torch.is_grad_enabled())

    before = torch.is_grad_enabled()
    with Lockstep(model) as together, pytest.raises(KeyboardInterrupt):
        together.run([careful, raises])
    assert put_back == [False]
    assert torch.is_grad_enabled() == before


def test_thread_local_torch_state_is_not_shared(model: Counting) -> None:
    """A call under autocast, inference mode or a default device of its own runs alone there, and others see nothing."""
    given = inputs(*[(1, 1)] * 4)
    seen = []

    def under(manager: Callable[[], Any], rows: torch.Tensor) -> torch.Tensor:
        with manager():
            return model(rows)

    def plain() -> torch.Tensor:
        state = (torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.empty(0).device.type)
        return model(given[3], lambda: seen.append(state))

    modes = [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode, lambda: torch.device("cpu")]
    calls = [lambda m=m, r=r: under(m, r) for m, r in zip(modes, given[:3], strict=True)]
    with Lockstep(model) as together:
        outcomes = together.run([*calls, plain])
    with torch.no_grad():
        for outcome, call in zip(outcomes[:3], calls, strict=True):
            assert torch.equal(outcome.result(), call())
            assert outcome.batch_size == 1
    assert seen == [(False, False, "cpu")]
    close(outcomes[3].result(), alone(model, given)[3])


def test_context_variables_are_each_calls_own(model: Counting) -> None:
    who: ContextVar[str] = ContextVar("who", default="nobody")
    who.set("around")
    seen: list[tuple[str, str]] = []

    def call(name: str, rows: torch.Tensor) -> torch.Tensor:
        before = who.get()
        who.set(name)
        return model(rows, lambda: seen.append((before, who.get())))

    given = inputs((1, 1), (1, 1))
    with Lockstep(model) as together:
        together.run([lambda n=n, r=r: call(n, r) for n, r in zip("ab", given, strict=True)])
    assert seen == [("around", "a"), ("around", "b")]
    assert who.get() == "around"


def test_sessions_count_their_own_layers(model: Counting) -> None:
    """A session of a wrapped model measures the layers of its own call, inside of a block, too."""
    given = inputs((1, 1), (1, 1))
    with WrappedModel(model) as one, WrappedModel(model) as other, Lockstep(model) as together:
        for wrapped in (one, other):
            wrapped.forward(given[0])  # its first run puts shims on the modules
        outcomes = together.run([lambda w=w, r=r: w.forward(r) for w, r in zip((one, other), given, strict=True)])
        counted = [[(layer.name, layer.outputs) for layer in w.get_layer_metrics()] for w in (one, other)]
        one.forward(given[0])
        assert counted == [[(layer.name, layer.outputs) for layer in one.get_layer_metrics()]] * 2
    for outcome, wanted in zip(outcomes, alone(model, given), strict=True):
        close(outcome.result(), wanted)
        assert outcome.meetings == 4  # each Linear


def test_observers_see_their_own_call(model: Counting) -> None:
    seen: list[tuple[int, ...]] = []

    class Shapes(Observer):
        def observe(self, call: ObservedCall, name: str, step: int) -> Any:
            seen.append(tuple(call.output.shape))

    given = inputs((1, 1), (2, 1))
    observer = Shapes(["first", "block.0"])
    with observer.attach(model), Lockstep(model) as together:
        outcomes = together.run([lambda rows=rows: model(rows) for rows in given])
    assert sorted(seen) == [(1, 1, 8), (1, 1, 16), (2, 1, 8), (2, 1, 16)]
    for outcome, wanted in zip(outcomes, alone(model, given), strict=True):
        close(outcome.result(), wanted)


def test_hooks_inside_a_block_see_one_call_at_a_time(model: Counting, capsys: pytest.CaptureFixture[str]) -> None:
    """Who looks at a part of a block is not shown the rows of several calls at once."""
    given = inputs((1, 1), (1, 1), (1, 1))
    with Lockstep(model) as together:
        model.block[0].register_forward_hook(lambda module, args, output: print(len(args[0])))
        outcomes = together.run([lambda rows=rows: model(rows) for rows in given])
    assert capsys.readouterr().out == "1\n1\n1\n"
    for outcome, wanted in zip(outcomes, alone(model, given), strict=True):
        close(outcome.result(), wanted)


class Keeping(Counting):
    """Keeps its input on itself from one line to the next, where it is asked to."""

    kept: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor, keeps: bool = True) -> Any:  # type: ignore[override]
        if keeps:
            self.kept = rows
        hidden = self.last(self.first(rows))
        if keeps:
            assert self.kept is not None
            hidden = hidden + self.kept[..., :4]
        return hidden


def test_model_attributes_are_not_shared_between_calls() -> None:
    """Calls are not put aside while their model holds something of theirs."""
    model = Keeping().eval()
    given = inputs((1, 1), (1, 1), (1, 1))
    wanted = alone(model, given)
    with Lockstep(model) as together:
        for _ in range(2):
            for outcome, output in zip(together.run([lambda r=r: model(r) for r in given]), wanted, strict=True):
                close(outcome.result(), output)


def test_a_new_way_that_keeps_something_is_an_error() -> None:
    """Never a wrong answer: the first steps that may have read each other's values fail, the next are right."""
    model = Keeping().eval()
    given = inputs((1, 1), (1, 1))
    wanted = alone(model, given)
    model.kept = None
    with Lockstep(model) as together:
        quiet = together.run([lambda r=r: model(r, keeps=False) for r in given])
        assert [outcome.batch_size for outcome in quiet] == [2, 2]
        calls = [lambda r=r: model(r) for r in given]
        for outcome in together.run(calls):
            with pytest.raises(PlanMismatch, match="kept"):
                outcome.result()
        for outcome, output in zip(together.run(calls), wanted, strict=True):
            close(outcome.result(), output)


def test_tails_run_together() -> None:
    """Several tails of a wrapped model: their prefixes are answered one by one, what follows the cut is shared."""
    model = Counting().eval()
    given = inputs((1, 1), (3, 1), (1, 2), (1, 1))
    with WrappedModel(model, metrics=False) as wrapped, Lockstep(model) as together:
        heads = [wrapped.head("first", rows) for rows in given]
        outcomes = together.run([lambda head=head: wrapped.tail(head) for head in heads])
    for outcome, wanted in zip(outcomes, alone(model, given), strict=True):
        close(outcome.result(), wanted)
        assert outcome.batch_size == len(given)


def test_gates_are_removed(model: Counting) -> None:
    before = [dict(vars(module)) for module in model.modules()]
    one = Lockstep(model)
    with Lockstep(model):
        pass
    (given,) = inputs((1, 1))
    first, second = one.run([lambda: model(given), lambda: model(given)])
    assert first.batch_size == second.batch_size == 2
    one.close()
    one.close()
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_model_in_training_has_no_gates() -> None:
    model = Counting().train()
    (given,) = inputs((1, 1))
    with Lockstep(model) as together:
        assert [o.batch_size for o in together.run([lambda: model(given), lambda: model(given)])] == [1, 1]
