"""Witnesses: answers computed whole here, too; a wrong one is found, reported, and its cut used no more."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_client import Answer, EdgeClient, Failure
from edge_client.call import Call
from edge_client.model_choice import ModelChoice
from edge_client.transport.options import ConnectionOptions
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY
from edge_client.witness import EvenShare, InitialState, compare, tolerance
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.lifecycle import Event, Lifecycle, Stage
from shared_hooks.observers import ActivationStats
from shared_hooks.profiling.machine import kind, unlike
from shared_hooks.tensors.trees import no_class
from tests.edge_client import fake_server as fake
from tests.edge_client import small_models
from tests.edge_client.fake_server import FakeServer
from tests.edge_client.test_client import held, image
from tests.edge_client.witness.made import CPU, pair, whole, wrong


class TestShare:
    @pytest.mark.parametrize("share", [0.0, 0.1, 0.29, 1 / 3, 0.5, 0.9, 1.0])
    def test_witness_is_kept_with_its_request(self, share: float) -> None:
        taken = EvenShare(share)
        found = [taken.take() for _ in range(300)]
        assert found[0] is (share > 0)
        for count in range(1, 301):
            assert sum(found[:count]) == math.ceil(round(count * share, 9))

    def test_a_tenth_is_every_tenth(self) -> None:
        taken = EvenShare(0.1)
        assert [number for number in range(1000) if taken.take()] == list(range(0, 1000, 10))

    @pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), float("inf"), "1", True, None])
    def test_invalid_share_is_refused(self, share: Any) -> None:
        with pytest.raises(SpecError, match="witness=.*from 0 to 1"):
            EdgeClient(None, ModelChoice(small_models.Residual().eval(), model_id="m"), "edge-only", witness=share)


class TestAnAnswerThatIsRight:
    def test_every_other_answer_is_compared_and_its_time_is_distinguished(self) -> None:
        with pair(small_models.Residual, "body", witness=0.5) as client:
            assert client.witness == 0.5
            answers = list(client.infer_many(image(seed) for seed in range(7)))
        assert [answer.witness is not None for answer in answers] == [True, False] * 3 + [True]
        for seed, answer in enumerate(answers):
            assert torch.equal(answer.output, whole(seed))
            assert answer.times.end_to_end == answer.measured_ns and all(ns >= 0 for _, ns in answer.times.rows())
            if answer.witness is not None:
                reported = answer.witness
                assert (
                    reported.same
                    and reported.exact
                    and reported.bits
                    and (reported.largest, reported.tolerance, reported.top1) == (0.0, 0.0, 1.0)
                )
                assert reported.compared == "1 tensor, 10 values" and reported.ns > 0
                assert reported.finding == "" and reported.received is None
        assert client.refused == {}

    def test_witness_time_is_in_no_row_of_any_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import edge_client.witness as module

        plain = module.run_plain

        def slow(*args: Any) -> Any:
            threading.Event().wait(2)  # longer than a machine with other work stands still
            return plain(*args)

        monkeypatch.setattr(module, "run_plain", slow)
        with pair(small_models.Residual, "body", witness=1.0) as client:
            client.infer(image())
            for answer in client.infer_many(image(seed) for seed in range(2)):
                assert answer.witness is not None and answer.witness.ns > 2e9
                assert answer.times.end_to_end == answer.measured_ns < 2e9
                assert all(ns >= 0 for _, ns in answer.times.rows())

    @pytest.mark.parametrize("split", ["input", "cloud-only", "stem", "relu", "head"])
    def test_at_every_cut(self, split: str) -> None:
        with pair(small_models.Residual, split, witness=1.0) as client:
            answer = client.infer(image())
            assert answer.witness is not None and answer.witness.same

    def test_unsplit_request_has_no_witness(self) -> None:
        with pair(small_models.Residual, "body", witness=0.5) as client:
            splits = ["edge-only", "body", "edge-only", "body", "edge-only", "body"]
            answers = [client.infer(image(), split=split) for split in splits]
        assert [answer.witness is not None for answer in answers] == [False, True, False, False, False, True]

    def test_keywords_dataclasses_and_other_paths(self) -> None:
        ids, mask = torch.arange(6).reshape(2, 3), torch.ones(2, 3)
        with pair(small_models.Keywords, "mix", witness=1.0) as client:
            reported = client.infer(ids=ids, mask=mask).witness
            assert reported is not None and reported.same and reported.compared == "2 tensors, 72 values"
        with pair(small_models.Branching, "first", witness=1.0) as client:
            for answer in [client.infer(torch.full((1, 4), value)) for value in (3.0, -3.0, 3.0)]:
                assert answer.witness is not None and answer.witness.same
                assert answer.times.end_to_end == answer.measured_ns

    def test_threads_share_the_count(self) -> None:
        reported: list[bool | None] = []
        expected = [whole(seed) for seed in range(10)]

        def work(client: EdgeClient) -> None:
            for seed in range(10):
                answer = client.infer(image(seed))
                assert torch.equal(answer.output, expected[seed])
                reported.append(answer.witness.same if answer.witness else None)

        with pair(small_models.Residual, "body", witness=0.25) as client:
            threads = [threading.Thread(target=work, args=(client,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert reported.count(True) == 10 and reported.count(None) == 30

    def test_witness_is_invisible_to_hooks_and_metrics(self) -> None:
        """Observers, stages, layer metrics and banked outputs are those of a run without."""

        def seen(share: float) -> tuple[Any, ...]:
            stages: list[str] = []
            lifecycle = Lifecycle("edge")
            ours = [stage for stage in Stage if stage.edge]

            @lifecycle.on(*ours)
            def note(event: Event) -> None:
                stages.append(event.stage.value)

            observer = ActivationStats(["*"])
            with pair(small_models.Residual, "body", witness=share, lifecycle=lifecycle) as client:
                client.wrapped.save_layers = ["stem"]
                stages.clear()
                with observer.attach(client.wrapped):
                    answer = client.infer(image())
                banked = client.wrapped.banked_output["stem"]
                layers = [layer.name for layer in client.wrapped.get_layer_metrics()]
                reported = [layer.name for layer in answer.layers_edge], [layer.name for layer in answer.layers_cloud]
                during = sorted(stage for stage in stages if "shutdown" not in stage)
            return during, len(observer.records), layers, reported, banked.sum().item(), answer.witness is None

        assert seen(0.0)[:-1] == seen(1.0)[:-1] and not seen(1.0)[-1]


class Noisy(nn.Module):
    """Draws in its first layer, from torch, `random` and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = _Noise()
        self.out = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.out(self.noise(values))
        return out


class _Noise(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values + torch.randn_like(values) + random.random() + np.random.random()  # noqa: NPY002


class Stateful(nn.Module):
    """Counts in attributes, lists and buffers, and answers with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.log: list[Any] = []
        self.known: dict[str, list[int]] = {"inner": []}
        self.kept = torch.zeros(2)
        self.register_buffer("total", torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        self.seen += 1
        self.log.append(self.seen)
        self.known["inner"].append(self.seen)
        self.kept.add_(1)
        self.total += 1
        self.late = self.seen
        return values + self.total + self.seen + len(self.known["inner"]) + self.kept.sum()


class InPlace(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ReLU(inplace=True)
        self.out = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.out(self.first(values.add_(1)))
        return out


class TestItBeginsWhereTheHeadBegan:
    def test_the_generators(self) -> None:
        model = Noisy()
        for _ in range(3):
            kept = InitialState(model, CPU, Call((torch.zeros(4),)))
            with torch.no_grad():
                expected = model(torch.zeros(4))
            states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
            torch.rand(3)
            after = torch.get_rng_state()
            assert torch.equal(kept.whole(no_class), expected)
            assert torch.equal(torch.get_rng_state(), after)
            assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002

    def test_through_a_server(self) -> None:
        values = torch.randn(1, 4)

        class Drawing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Dropout(0.5)
                self.out = nn.Linear(4, 4)

            def forward(self, values: Tensor) -> Tensor:
                out: Tensor = self.out(self.first(values))
                return out

        def make() -> nn.Module:
            return Drawing().train()

        torch.manual_seed(7)
        served = make()
        torch.manual_seed(7)
        with (
            FakeServer(fake.tails(served)) as server,
            EdgeClient(server.address, ModelChoice(make(), model_id="m", device="cpu"), "first", witness=1.0) as client,
        ):
            outputs = []
            for _ in range(4):
                answer = client.infer(values)
                assert answer.witness is not None and answer.witness.same
                outputs.append(answer.output)
            assert not all(torch.equal(output, outputs[0]) for output in outputs)  # and the generator continues

    def test_state(self) -> None:
        model = Stateful()
        kept = InitialState(model, CPU, Call((torch.zeros(1),)))
        expected = model(torch.zeros(1))
        model(torch.zeros(1))
        before = (
            vars(model).copy(),
            list(model.log),
            list(model.known["inner"]),
            model.kept.clone(),
            model.total.clone(),
        )
        assert torch.equal(kept.whole(no_class), expected)
        assert model.seen == 2 and model.late == 2 and model.log == before[1] == [1, 2]
        assert model.known["inner"] == before[2] == [1, 2] and model.log is before[0]["log"]
        assert torch.equal(model.kept, before[3]) and torch.equal(model.total, before[4])

    def test_an_output_that_is_a_buffer(self) -> None:
        class Total(Stateful):
            def forward(self, values: Tensor) -> Tensor:
                super().forward(values)
                out: Tensor = self.total
                return out

        model = Total()
        kept = InitialState(model, CPU, Call((torch.zeros(1),)))
        model(torch.zeros(1))
        assert kept.whole(no_class).item() == 1.0
        model(torch.zeros(1))
        assert model.total.item() == 2.0 and kept.whole(no_class).item() == 1.0 and model.total.item() == 2.0

    def test_inputs_that_the_head_writes_to(self) -> None:
        for cut in ("first", "input"):
            with pair(InPlace, cut, witness=1.0) as client:
                answer = client.infer(torch.randn(1, 4))
                assert answer.witness is not None and answer.witness.same

    def test_inputs_that_begin_anywhere(self) -> None:
        """Kernels round by where in 64 bytes an input begins."""
        rows = torch.randn(8, 3 * 16 * 16 + 1)
        with pair(small_models.Residual, "stem", witness=1.0) as client:
            for row in rows:
                answer = client.infer(row[1:].view(1, 3, 16, 16))
                assert answer.witness is not None and answer.witness.same, answer.witness


class TestAnAnswerThatIsWrong:
    def test_difference_is_reported_and_the_cut_disabled(self, caplog: pytest.LogCaptureFixture) -> None:
        errors: list[Event] = []
        lifecycle = Lifecycle("edge")
        lifecycle.on("on_error")(errors.append)
        with pair(small_models.Residual, "body", serves=wrong(), witness=0.1, lifecycle=lifecycle) as client:
            answer = client.infer(image())
            reported = answer.witness
            assert reported is not None and not reported.same and reported.exact and reported.top1 == 1.0
            assert 0 < reported.largest < 1e-6 and reported.tolerance == 0.0 and "differs by" in reported.finding
            assert torch.equal(answer.output, whole()) and not torch.equal(reported.received, whole())
            assert list(client.refused) == ["body"]
            with pytest.raises(CutRefused, match=r"cannot cut after layer 1 \(body\): witness: request 1 differs by"):
                client.infer(image())
            for split in (1, "body"):
                with pytest.raises(CutRefused, match="witness"):
                    client.infer(image(), split=split)
            with pytest.raises(CutRefused, match="witness"):  # on inputs that were never seen, too
                client.infer(torch.randn(2, 3, 8, 8))
            by_name = {layer.name: layer for layer in client.wrapped.layers}
            assert not by_name["body"].can_split and "witness" in by_name["body"].reason
            assert by_name["stem"].can_split and client.infer(image(), split="stem").split == "stem"
            assert torch.equal(client.infer(image(), split="edge-only").output, whole())
        assert "cut body is out of use: witness: request 1 differs by" in caplog.text
        assert errors[0].where == "witness" and isinstance(errors[0].error, CutRefused)

    def test_with_the_input_the_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "any.png"
        path.write_bytes(b"x")
        with pair(small_models.Residual, "input", serves=wrong(), witness=1.0) as client:
            assert not client.infer(image()).witness.same  # type: ignore[union-attr]
            for split, value in (("input", image()), (CLOUD_ONLY, image()), (CLOUD_FILE, path)):
                with pytest.raises(CutRefused, match="cannot cut after input: witness: request 1"):
                    client.infer(value, split=split)

    def test_requests_in_flight_at_a_failed_cut_are_not_answered(self) -> None:
        """The second was answered wrong, and nobody compared: nobody gets it."""
        gates = {1: threading.Event()}
        options: dict[str, Any] = {"delay": held(gates), "connection": ConnectionOptions(max_in_flight=3)}
        with pair(small_models.Residual, "body", serves=wrong(), witness=0.1, **options) as client:
            gates[1].set()
            results = list(client.infer_many([image(seed) for seed in range(5)], failures="return"))
        assert isinstance(results[0], Answer) and not results[0].witness.same  # type: ignore[union-attr]
        for result in results[1:]:
            assert isinstance(result, Failure) and isinstance(result.error, CutRefused)
            assert "witness: request 1" in str(result.error)

    def test_a_model_that_fails_whole_is_a_difference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import edge_client.witness as module

        def fails(*_: Any) -> Any:
            raise RuntimeError("not enough\nmemory")

        with pair(small_models.Residual, "body", witness=1.0) as client:
            monkeypatch.setattr(module, "run_plain", fails)
            reported = client.infer(image()).witness
            assert reported is not None and not reported.same and reported.largest == math.inf
            assert reported.finding == "cannot be computed whole here (RuntimeError: not enough memory)"
            with pytest.raises(CutRefused, match="not enough memory"):
                client.infer(image())


class TestUnlikeMachines:
    ABOUT: ClassVar = {"torch": "0.1", "kind": "cpu"}

    def test_the_last_bits_may_differ(self) -> None:
        with pair(small_models.Residual, "body", serves=wrong(), witness=1.0, about=self.ABOUT) as client:
            answer = client.infer(image())
            reported = answer.witness
            assert (
                reported is not None
                and reported.same
                and not reported.exact
                and not reported.bits
                and 0 < reported.largest < reported.tolerance < 1e-3
            )
            assert reported.top1 == 1.0 and not torch.equal(answer.output, whole())  # what came stays the answer
            assert client.refused == {} and client.infer(image()).witness is not None

    def test_more_than_that_is_a_difference(self) -> None:
        with pair(small_models.Residual, "body", serves=wrong(0.5), witness=1.0, about=self.ABOUT) as client:
            reported = client.infer(image()).witness
            assert reported is not None and not reported.same and reported.largest > reported.tolerance > 0
            assert "torch" in reported.finding and "0.1 there" in reported.finding
            with pytest.raises(CutRefused, match="witness"):
                client.infer(image())

    def test_differences_that_count(self) -> None:
        mine = {"torch": "2.13", "kind": "cpu", "processor": "a", "threads": "1"}
        assert unlike(mine, mine) == unlike(mine, {}) == unlike(mine, {"python": "3.9"}) == []
        assert unlike(mine, {**mine, "threads": "4"}) == ["threads 1 here, 4 there"]
        assert unlike(mine, {**mine, "processor": "b"}) == ["processor a here, b there"]
        assert len(unlike(mine, {**mine, "torch": "2.12", "kind": "cuda X"})) == 2
        gpu = {**mine, "kind": "cuda X"}
        assert unlike(gpu, {**gpu, "processor": "b", "threads": "9"}) == []
        assert unlike(gpu, {**gpu, "kind": "cuda Y"}) == ["kind cuda X here, cuda Y there"]
        assert set(kind(CPU)) == set(mine)


class TestComparing:
    def test_numbers(self) -> None:
        a = torch.tensor([1.0, -4.0, 2.0])
        found = compare((a, "x"), (a + torch.tensor([0.0, 0.0, 1.0]), "x"), no_class)
        assert (found.bits, found.largest, found.top1) == (False, 0.25, 1.0)
        assert compare(a, -a, no_class).top1 == 0.0
        assert compare(a, a.clone(), no_class).bits

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (torch.ones(2), torch.ones(3)),
            (torch.ones(2), torch.ones(2, dtype=torch.float64)),
            (torch.tensor([1, 2]), torch.tensor([1, 3])),
            (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])),
            (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])),
            (torch.zeros(2), torch.ones(2)),
            ([torch.ones(2)], (torch.ones(2),)),
            ({"a": torch.ones(2), "b": 1}, {"a": torch.ones(2), "b": 2}),
            ("text", "other"),
        ],
    )
    def test_differences_beyond_any_tolerance(self, one: Any, other: Any) -> None:
        found = compare(one, other, no_class)
        assert not found.bits and found.largest == math.inf and not found.within(1e9)

    def test_equal_outputs(self) -> None:
        zero = compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), no_class)
        assert not zero.bits and zero.largest == 0.0 and zero.within(0.0)  # but not the same
        nan = torch.tensor([math.nan, 1.0])
        assert compare(nan, nan.clone(), no_class).bits
        strided = torch.ones(4, 5)[:1, 0]
        assert compare(strided, torch.ones(1), no_class).bits
        assert compare(torch.ones(2).to_sparse(), torch.ones(2).to_sparse(), no_class).bits
        halves = torch.tensor([1 + 2j]), torch.tensor([1 + 3j])
        assert compare(*halves, no_class).largest == 0.5

    def test_the_tolerance_is_half_of_the_digits_of_the_coarsest_format(self) -> None:
        assert tolerance([torch.float32]) == pytest.approx(3.45e-4, rel=0.01)
        assert tolerance([torch.float32, torch.bfloat16, torch.int64]) == pytest.approx(0.088, rel=0.01)
        assert tolerance([torch.float32], tf32=True) == 2.0**-5 and tolerance([torch.int64]) == 0.0
