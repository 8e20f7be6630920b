"""Without a cut: everything here, everything there, and input files sent as they are. Two real processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_client import EdgeClient, Failure, State
from edge_client.__main__ import main
from edge_client.call import Load
from edge_client.model_choice import ModelChoice
from edge_client.probing import LinkProber, _parsed, fetch_profile, probe
from edge_client.process import local_server
from shared_hooks.errors import (
    BadFrame,
    CutRefused,
    Disagreement,
    InputMismatch,
    ModelFailed,
    ServerUnavailable,
    SpecError,
    TooLarge,
    UnknownModel,
)
from shared_hooks.models import InputItem, find_inputs, load_spec
from tests.edge_client import fake_server as fake
from tests.edge_client import small_models
from tests.edge_client.fake_server import FakeServer
from tests.shipped import IMAGES

SMALL = "tests.edge_client.small_models"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    more = ["--model", f"moody={SMALL}:Moody"]
    with local_server(ModelChoice("digits", device="cpu", threads=1), arguments=more) as address:
        yield address


@pytest.fixture(scope="module")
def items() -> list[InputItem]:
    return find_inputs(IMAGES)[:6]


@pytest.fixture(scope="module")
def expected(items: list[InputItem]) -> list[torch.Tensor]:
    spec = load_spec("digits")
    whole = spec.load_model("cpu")
    with torch.no_grad():
        return [whole(*spec.preprocess(item)[0]) for item in items]


class TestEverythingHere:
    def test_edge_only_needs_no_server(self, items: list[InputItem], expected: list[torch.Tensor]) -> None:
        spec = load_spec("digits")
        for server in (None, "127.0.0.1:1"):
            with EdgeClient(server, ModelChoice(spec, device="cpu"), "edge-only") as client:
                answers = list(client.infer_many(items, prepare=spec.preprocess))
                assert client.state is State.UNOPENED and client.counters.attempts == 0
            for answer, output in zip(answers, expected, strict=True):
                assert torch.equal(answer.output, output)
                assert answer.times.end_to_end == answer.measured_ns == sum(ns for _, ns in answer.times.rows())
                assert all(ns >= 0 for _, ns in answer.times.rows())
                assert answer.times.edge_compute > 0 and answer.times.network == answer.times.server == 0
                assert (answer.split, answer.layer_id, answer.bytes_up, answer.load) == ("edge-only", None, 0, None)
                assert len(answer.layers_edge) == len(client.wrapped.layers) and not answer.layers_cloud

    def test_beside_a_server_and_in_order(self, server: str, expected: list[torch.Tensor]) -> None:
        spec = load_spec("digits")
        with EdgeClient(server, ModelChoice(spec, device="cpu"), "stem.0") as client:
            image = spec.preprocess(find_inputs(IMAGES)[0])[0][0]
            outputs = [
                client.infer(image, split=split).output for split in ("edge-only", "stem.0", "cloud-only", "input")
            ]
            assert all(torch.equal(output, expected[0]) for output in outputs)

    def test_a_model_that_raises_takes_its_place(self) -> None:
        with EdgeClient(None, ModelChoice(small_models.Moody(), model_id="m", device="cpu"), "edge-only") as client:
            values = [torch.ones(3), torch.full((3,), 200.0), torch.ones(3)]
            answers = list(client.infer_many(values, failures="return"))
            assert isinstance(answers[1], Failure) and isinstance(answers[1].error, ModelFailed)
            assert [isinstance(answer, Failure) for answer in answers] == [False, True, False]
            with pytest.raises(ModelFailed, match="too much"):
                client.infer(values[1])

    def test_a_cut_without_a_server_is_refused(self) -> None:
        with (
            EdgeClient(None, ModelChoice(small_models.Residual(), model_id="m"), "edge-only") as client,
            pytest.raises(SpecError, match="no server"),
        ):
            client.infer(torch.randn(1, 3, 16, 16), split="stem")


class TestFiles:
    def test_are_answered_exactly(self, server: str, items: list[InputItem], expected: list[torch.Tensor]) -> None:
        with EdgeClient(server, ModelChoice("digits", device="cpu"), "cloud-only-file") as client:
            answers = list(client.infer_many(items))
            for item, answer, output in zip(items, answers, expected, strict=True):
                assert torch.equal(answer.output, output)
                assert answer.times.end_to_end == answer.measured_ns == sum(ns for _, ns in answer.times.rows())
                assert (answer.split, answer.layer_id) == ("cloud-only-file", -1)
                assert item.path.stat().st_size < answer.bytes_up < item.path.stat().st_size + 1000
                assert answer.times.server_decode > 0 and answer.times.server_compute > 0
                assert not answer.layers_edge and len(answer.layers_cloud) == len(client.wrapped.layers)
                assert isinstance(answer.load, Load) and answer.load.workers == 1
            assert torch.equal(client.infer(items[0]).output, expected[0])

    def test_hostile_ones_are_refused_by_name_and_the_server_lives(
        self, server: str, items: list[InputItem], expected: list[torch.Tensor], tmp_path: Path
    ) -> None:
        def file(name: str, data: bytes) -> InputItem:
            (tmp_path / name).write_bytes(data)
            return InputItem(tmp_path / name)

        wrong = [
            (file("x.exe", b"MZ"), InputMismatch),
            (file("garbage.png", b"garbage"), InputMismatch),
            (file("empty.png", b""), InputMismatch),
            (InputItem(tmp_path / "missing.png"), InputMismatch),
            (file("large.png", bytes(300 << 20)), TooLarge),
        ]
        with EdgeClient(server, ModelChoice("digits", device="cpu"), "cloud-only-file") as client:
            answers = list(client.infer_many([item for item, _ in wrong], failures="return"))
            for answer, (item, error) in zip(answers, wrong, strict=True):
                assert isinstance(answer, Failure) and isinstance(answer.error, error), (item, answer)
            assert torch.equal(client.infer(items[0]).output, expected[0])
            with pytest.raises(SpecError, match="input files"):
                client.infer(torch.zeros(1))

    def test_a_client_that_reads_otherwise_learns_it(self, server: str, items: list[InputItem], tmp_path: Path) -> None:
        home = IMAGES.parent
        text = (home / "digits.toml").read_text().replace('interpolation = "bicubic"', 'interpolation = "nearest"')
        for path in home.glob("*.safetensors"):
            shutil.copy(path, tmp_path)
        (tmp_path / "digits.toml").write_text(text)
        with (
            EdgeClient(server, ModelChoice(str(tmp_path / "digits.toml"), device="cpu"), "cloud-only-file") as client,
            pytest.raises(Disagreement, match="preprocessing"),
        ):
            client.infer(items[0])

    def test_a_model_without_preprocessing_says_so(self, server: str, items: list[InputItem]) -> None:
        with (
            EdgeClient(server, ModelChoice(f"moody={SMALL}:Moody", device="cpu"), "cloud-only-file") as client,
            pytest.raises(InputMismatch, match="for images; give"),
        ):
            client.infer(items[0])

    def test_a_model_that_was_changed_here_is_not_the_servers(self, server: str, items: list[InputItem]) -> None:
        with EdgeClient(server, ModelChoice("digits", device="cpu"), "cloud-only-file") as client:
            norm = next(one for one in client.wrapped.model.modules() if isinstance(one, torch.nn.BatchNorm2d))
            client.infer(items[0])
            norm.eps *= 2
            with pytest.raises(Disagreement, match="eps"):
                client.infer(items[0])
            norm.eps /= 2
            client.infer(items[0])


class TestProbing:
    def test_a_link_and_a_load(self, server: str) -> None:
        seen: list[tuple[int, int, str]] = []
        link, load = probe(
            server, sizes=(1000, 100_000), answer_sizes=(50_000,), seconds=30.0, on_progress=lambda *at: seen.append(at)
        )
        assert [size for size, _ in link.up.points] == [0, 1000, 50_000, 100_000]  # two that tell the speed
        assert [size for size, _ in link.down.points] == [0, 50_000]
        assert link.rtt_ns > 0 and link.source == "measured" and load.workers == 1
        assert seen[-1][0] == seen[-1][1] == max(done for done, _, _ in seen)

    def test_sizes_beyond_the_budget_are_left_to_the_curve(self, server: str) -> None:
        link, _ = probe(server, seconds=0.001)
        assert len(link.up.points) >= 1 and link.network_ns(10 << 20, 100) > 0

    def test_rounds_of_megabytes(self, server: str) -> None:
        with LinkProber(server) as prober:
            for nbytes, answer_bytes in (
                (0, 0),
                (1, 1),
                (1024, 0),
                (1025, 3),
                (3 << 20, 0),
                (0, 3 << 20),
                (2 << 20, 2 << 20),
            ):
                round = prober.round(nbytes, answer_bytes)
                assert (round.nbytes, round.answer_bytes) == (nbytes, answer_bytes)
                assert 0 < round.server_ns < round.total_ns and round.network_ns > 0

    def test_no_server_an_old_one_and_one_that_stays_silent(self) -> None:
        with LinkProber("127.0.0.1:1") as prober, pytest.raises(ServerUnavailable):
            prober.round(10)
        with FakeServer(fake.echo) as old:
            with pytest.raises(Disagreement, match="older server"):
                probe(old.address, seconds=0.1)
            with pytest.raises(Disagreement):
                fetch_profile(old.address, "digits")
        with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
            fetch_profile("127.0.0.1:1", "digits", patience=0.2)

    @pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"a":' * 100_000, b"\xff"])
    def test_a_profile_that_is_none_is_refused(self, data: bytes) -> None:
        with pytest.raises(BadFrame, match="here"):
            _parsed(data, "here")

    def test_a_prober_comes_back_after_a_failure(self, server: str) -> None:
        with LinkProber(server) as prober:
            with pytest.raises(TooLarge):
                prober.round(1, 1 << 40)
            assert prober.round(5).total_ns > 0
        with pytest.raises(ServerUnavailable, match="closed"):
            prober.round(5)


class TestProfile:
    def test_of_a_served_model(self, server: str) -> None:
        seen: list[Any] = []
        settings = {"warmup": 1, "repetitions": 2, "seconds": 5.0}
        found = fetch_profile(server, "digits", **settings, on_progress=lambda *at: seen.append(at))  # type: ignore[arg-type]
        assert found["side"] == "cloud" and seen
        assert fetch_profile(server, "digits", **settings) == found  # type: ignore[arg-type]
        assert found["machine"]["id"]

    def test_is_refused_by_name(self, server: str) -> None:
        with pytest.raises(UnknownModel, match="nothing"):
            fetch_profile(server, "nothing")
        with pytest.raises(CutRefused, match="moody"):
            fetch_profile(server, "moody")


class TestCommand:
    @pytest.mark.parametrize("split", ["edge-only", "cloud-only", "cloud-only-file"])
    def test_run(self, server: str, split: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["run", "--split", split, "--input", str(IMAGES), "--json", "-", "--device", "cpu", "--no-progress"]
        if split != "edge-only":
            words += ["--server", server]
        assert main(words) == 0
        known = json.loads(capsys.readouterr().out)
        assert known["answered"] == 40 and known["accuracy"] >= 0.95
        assert known["times_ns"]["end_to_end"] == known["measured_ns"]

    def test_a_local_server_that_cannot_start_says_why(self) -> None:
        with pytest.raises(ServerUnavailable, match="nosuch"), local_server(ModelChoice("nosuch")):
            pass
