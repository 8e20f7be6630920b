"""Witnesses beside a controller, and in processes of their own: what is wrong is used no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_client import Answer, EdgeClient
from edge_client.__main__ import main
from edge_client.adaptive import AutoClient
from edge_client.adaptive.controller import SplitController
from edge_client.model_choice import ModelChoice
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from shared_hooks.errors import CutRefused
from shared_hooks.models import load_spec
from tests.edge_client import small_models
from tests.edge_client.adaptive.test_auto import CallReports
from tests.edge_client.adaptive.test_controller import link
from tests.edge_client.planning.made import Layer, profile
from tests.edge_client.test_client import image
from tests.edge_client.test_processes import CloudProcess, cloud
from tests.edge_client.witness.made import CUT, pair, whole, wrong
from tests.shipped import IMAGES


class Giving(CallReports):
    """Gives names in turn, until they are refused."""

    def __init__(self, *names: str) -> None:
        super().__init__(names[0], network_ms=1e6)  # nothing is late: no request goes another way for its slowness
        self.names = list(names)

    def choose(self, now: int) -> Any:
        self.name = self.names[0]
        return super().choose(now)

    def refuse(self, name: str) -> None:
        self.names.remove(name)
        self.heard.append(f"refused {name}")


class TestAuto:
    def test_run_continues_after_a_failed_witness(self) -> None:
        """Four under way, all wrong: one is found, the others go again, another way; all answers are right."""
        reported = Giving("body", "stem", EDGE_ONLY)
        with (
            pair(small_models.Residual, "input", serves=wrong(), witness=1.0) as client,
            AutoClient(client, reported) as auto,  # type: ignore[arg-type]
        ):
            answers = list(auto.infer_many([image(seed) for seed in range(16)]))
        for seed, answer in enumerate(answers):
            assert isinstance(answer, Answer) and torch.equal(answer.output, whole(seed)), seed
            assert answer.times.end_to_end == answer.measured_ns
        assert [one for one in reported.heard if one.startswith("refused")] == ["refused body", "refused stem"]
        assert answers[-1].split == EDGE_ONLY  # type: ignore[union-attr]
        refused = [entry for entry in auto.decisions.all if entry["kind"] == "refused"]
        assert [entry["cut"] for entry in refused] == ["body", "stem"] and "witness" in refused[0]["reason"]

    def test_with_the_input_goes_the_file(self) -> None:
        reported = Giving(CLOUD_ONLY, CLOUD_FILE, EDGE_ONLY)
        with (
            pair(small_models.Residual, "input", serves=wrong(), witness=1.0) as client,
            AutoClient(client, reported) as auto,  # type: ignore[arg-type]
        ):
            assert auto.infer(image()).split == "input"
            assert auto.infer(image()).split == EDGE_ONLY

    def test_a_refusal_that_no_witness_made_is_the_inputs_failure(self) -> None:
        reported = Giving("body", EDGE_ONLY)
        with (
            pair(small_models.Residual, "input", witness=1.0) as client,
            AutoClient(client, reported) as auto,  # type: ignore[arg-type]
        ):
            client.wrapped.refuse("body", "a test")
            with pytest.raises(CutRefused, match="a test"):
                auto.infer(image())

    def test_the_controller_takes_the_next_best(self) -> None:
        layers = [Layer(20, 1, 60_000), Layer(1, 0, 80_000), Layer(200, 20, 500)]  # the second is beaten in everything
        controller = SplitController(profile("edge", layers), profile("cloud", layers), link(20))
        seen = [controller.choose(0).candidate.name]
        while seen[-1] != EDGE_ONLY:
            controller.refuse(seen[-1])
            choice = controller.choose(0)
            assert choice.moved and choice.candidate.name not in seen and "not allowed any more" in choice.reason
            seen.append(choice.candidate.name)
        assert set(seen) >= {CLOUD_ONLY, "layer0", "layer1"}
        controller.refuse(EDGE_ONLY)
        assert controller.choose(0).candidate.name == EDGE_ONLY


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudProcess]:
    """A real server, in a process of its own, whose answers after `CUT` have a wrong bit (`tests.edge_client.liar`)."""
    hook = f'{{ hook = "tests.edge_client.liar:Liar", options = {{ cuts = ["{CUT}"] }} }}'
    config = tmp_path_factory.mktemp("liar") / "server.toml"
    config.write_text(f'[models]\ndigits = "digits"\n[lifecycle]\nhooks = [{hook}]\n')
    with cloud(str(config)) as process:
        yield process


class TestProcesses:
    def test_one_bit_at_one_cut(self, liar: CloudProcess) -> None:
        value = torch.randn(1, 1, 32, 32)
        with torch.no_grad():
            expected = load_spec("digits").load_model("cpu")(value)
        with EdgeClient(liar.address, ModelChoice("digits", device="cpu"), CUT, witness=0.5) as client:
            layers = [layer.name for layer in client.wrapped.layers if layer.can_split and layer.name != CUT]
            for layer in ["input", *layers]:
                answer = client.infer(value, split=layer)
                assert torch.equal(answer.output, expected) and (answer.witness is None or answer.witness.same)
            answers = [client.infer(value, deadline=30.0)]
            if answers[0].witness is None:  # so many others that the next one's turn it is
                answers.append(client.infer(value))
            found = answers[-1].witness
            assert found is not None and not found.same and torch.equal(answers[-1].output, expected)
            with pytest.raises(CutRefused, match="witness"):
                client.infer(value)
            assert client.infer(value, split=layers[0]).split == layers[0]

    def test_the_command(self, liar: CloudProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        words = ["run", "--server", liar.address, "--input", str(IMAGES), "--device", "cpu", "--no-progress"]
        target = tmp_path / "run.json"
        assert main([*words, "--split", "stage2.0.conv2", "--witness", "0.3", "--json", str(target)]) == 0
        out = capsys.readouterr().out
        assert "witness: 12 of 40 answers computed whole, too: all the same bit for bit" in out
        assert "beside these times: witnesses, mean" in out
        known = json.loads(target.read_text())
        assert sum(one["witness"] is not None for one in known["inputs"]) == 12
        assert known["witness"]["same"] == known["witness"]["witnessed"] == 12 and known["witness"]["refused"] == {}
        assert known["witness"]["ns"] == sum(one["witness"]["ns"] for one in known["inputs"] if one["witness"])
        assert known["times_ns"]["end_to_end"] == known["measured_ns"]

        assert main([*words, "--split", CUT, "--witness", "0.1", "--json", str(target)]) == 1
        out, err = capsys.readouterr()
        assert "WITNESS DIFFERS" in out and "witness: 1 of 1 answers computed whole, too: 1 DIFFERS" in out
        assert f"out of use: cut {CUT}; request 1 differs by" in out and "edge-client: cut" in err
        known = json.loads(target.read_text())
        assert known["exit_status"] == 1 and known["failed"] == 39 and list(known["witness"]["refused"]) == [CUT]
        assert known["inputs"][0]["witness"]["same"] is False
        assert {one["error"] for one in known["inputs"][1:]} == {"CutRefused"}

    def test_the_command_that_chooses(
        self, liar: CloudProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        words = ["run", "--server", liar.address, "--input", str(IMAGES), "--device", "cpu", "--no-progress"]
        words += ["--split", "auto", "--partitioner", "cycle", "--profile-seconds", "0.5", "--witness", "1"]
        assert main([*words, "--json", "-"]) == 1
        known = json.loads(capsys.readouterr().out)
        assert known["answered"] == 40 and known["accuracy"] >= 0.95
        assert list(known["witness"]["refused"]) == [CUT] and known["witness"]["differing"] == 1
        kinds = [(entry["kind"], entry.get("cut")) for entry in known["decisions"]]
        assert kinds.count(("refused", CUT)) == 1

    @pytest.mark.parametrize("split", [EDGE_ONLY, CLOUD_FILE])
    def test_where_nothing_is_split_it_is_refused(self, split: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["run", "--server", "127.0.0.1:1", "--split", split, "--input", str(IMAGES), "--witness", "1"]
        assert main(words) == 2
        assert "--witness compares split requests" in capsys.readouterr().err

    @pytest.mark.parametrize("share", ["2", "-1", "nan", "all"])
    def test_a_share_that_is_none(self, share: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["run", "--split", CUT, "--input", str(IMAGES), f"--witness={share}"])
        assert ended.value.code == 2 and "is not a share from 0 to 1" in capsys.readouterr().err
