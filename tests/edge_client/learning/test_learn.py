"""Learned codecs as users have them: trained, put on both sides, asked; and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edge_client import EdgeClient, learn, local_server
from edge_client.__main__ import main
from edge_client.learning.examples import examples_of
from edge_client.learning.training import Trainer, TrainingTerms, ladder, parted
from edge_client.model_choice import ModelChoice
from edge_client.tasks.learn import FILE, Learned
from edge_client.tasks.subject import subject_of
from edge_client.user_input import named_inputs
from shared_hooks.codecs import CODECS
from shared_hooks.codecs.learned import read
from shared_hooks.errors import CutRefused, Disagreement, SpecError
from tests.edge_client.small_models import Residual

DIGITS = [torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(number)) for number in range(80)]
CUT = "stage2.1.relu#2"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(CODECS)
    monkeypatch.setattr("shared_hooks.codecs.registry._added", {})
    yield
    CODECS.clear()
    CODECS.update(before)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    folder = tmp_path_factory.mktemp("learnt")
    choice = ModelChoice("digits", device="cpu", threads=1)
    return learn(choice, DIGITS, "stage2", rate=40, output=folder, epochs=3, progress=False)


def test_learning_writes_a_file_and_a_table_within_the_size_limit(found: Learned) -> None:
    assert found.file.name == FILE and found.cut == CUT and found.met
    assert 0 < found.payloads[found.codec] <= 40
    assert {one.codec for one in found.losses} >= {"raw", "int8", found.codec}
    assert found.table.inputs == 16, "a fifth judges, which nothing was trained on"
    file = read(found.file).file
    assert file.model_id == "digits" and file.provenance["inputs"] == found.learnt_from == 52
    assert file.provenance["judged"]["inputs"] == 16
    assert str(found.file) in found.text() and json.dumps(found.as_dict())
    known = json.loads((found.file.parent / "calibration.json").read_text())
    assert known["format"] == "isthmus-codec-losses"


def test_the_same_call_continues_and_another_one_is_refused(found: Learned) -> None:
    said: list[str] = []
    how = {"output": found.file.parent, "epochs": 3, "progress": False, "say": said.append}
    choice = ModelChoice("digits", device="cpu", threads=1)
    again = learn(choice, DIGITS, "stage2", rate=40, **how)
    assert again.codec == found.codec and any("continuing after" in text for text in said)
    assert not any("epochs" in text for text in said), "nothing was trained again"
    with pytest.raises(SpecError, match="holds another learning"):
        learn(choice, DIGITS, "stage2", rate=41, **how)


def test_a_real_server_decodes_it_and_one_without_it_is_named(
    found: Learned, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = f"learned:{found.file}"
    choice = ModelChoice("digits", device="cpu", threads=1)
    with local_server(choice, arguments=["--codec", reference, "--workers", "2"]) as address:  # in processes, too
        with EdgeClient(address, choice, split="stage2", codec=reference) as client:
            assert client.codec == found.codec and found.codec in (client.codecs or ())
            answer = client.infer(DIGITS[0])
            assert answer.codecs == (found.codec,) and answer.bytes_up < 600
            batch = client.infer(torch.cat(DIGITS[:3]))
            assert batch.output.shape == (3, 10) and batch.codecs == (found.codec,)
        with caplog.at_level(logging.WARNING), EdgeClient(address, choice, split="stem", codec=reference) as client:
            assert client.infer(DIGITS[0]).codecs == ("raw",)
        assert f"it is for the cut after {CUT}" in caplog.text
        with EdgeClient(address, choice, split="stage2", codec="noise:0.5") as client:
            noisy = [client.infer(DIGITS[0]) for _ in range(2)]
            assert noisy[0].codecs == ("noise:0.5",) and not torch.equal(noisy[0].output, noisy[1].output)
    CODECS.pop(found.codec)
    monkeypatch.setattr("shared_hooks.codecs.registry._added", {})
    why = f"has no codec {found.codec}.*cloud-server --codec"
    with local_server(choice) as address, pytest.raises(Disagreement, match=why):
        EdgeClient(address, choice, split="stage2", codec=reference).infer(DIGITS[0])


def test_other_weights_are_refused(found: Learned, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(_weights())
    weights["classifier.bias"] += 1
    save_file(weights, tmp_path / "other.safetensors")
    choice = ModelChoice("digits", weights=(str(tmp_path / "other.safetensors"),), device="cpu")
    client = EdgeClient("127.0.0.1:1", choice, split="stage2", codec=f"learned:{found.file}")
    with pytest.raises(SpecError, match="was learnt with other weights of digits"):
        client.infer(DIGITS[0])


def _weights() -> Path:
    import shared_hooks.models.digits as package

    return Path(package.__file__).parent / "weights.safetensors"


def test_others_may_choose(tmp_path: Path) -> None:
    choice = ModelChoice("digits", device="cpu", threads=1)
    how = {"rate": 8, "output": tmp_path, "epochs": 1, "progress": False}
    found = learn(choice, DIGITS[:60], "stage2", choose_by=DIGITS[60:], **how)
    assert found.learnt_from == 48 and found.table.inputs == 12


def test_several_pieces_and_batches_are_trained_together() -> None:
    torch.manual_seed(0)
    model = Residual().eval()
    items = named_inputs([torch.randn(1, 3, 16, 16) for _ in range(48)])
    loaded = subject_of(model, items[:1]).load()
    with loaded.wrapped:
        plan = loaded.wrapped.plan(*loaded.args, **loaded.kwargs)
        cut = next(one.name for one in plan.cuts if len(loaded.wrapped.head(one.name, *loaded.args).pieces) > 1)
        examples = examples_of(loaded, cut, items)
        assert examples.batch == 48 and len(examples.pieces) > 1
        whole = [one.clone() for one in model.parameters()]
        designs = ladder(examples)
        assert [sum(one is not None for one in rung) for rung in designs] == [len(examples.pieces)] * len(designs)
        learn_, choose, _ = parted(len(examples))
        trainer = Trainer(examples, designs[-1], TrainingTerms(8))
        first = trainer.run(learn_, choose)
        assert first.history[-1] < first.history[0], "it learns"
        assert all(torch.equal(one, other) for one, other in zip(whole, model.parameters(), strict=True))
        assert all(one.requires_grad for one in model.parameters()) and all(
            one.grad is None for one in model.parameters()
        )
        again = Trainer(examples, designs[-1], TrainingTerms(8)).run(learn_, choose)
        assert again.history == first.history, "the same seed, the same encoder"


def test_a_model_of_one_input_at_a_time_is_trained_one_by_one() -> None:
    class OneOnly(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(24, 32), torch.nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] != 1:
                raise ValueError("one at a time")
            found: torch.Tensor = self.last(torch.relu(self.first(x)))
            return found

    items = named_inputs([torch.randn(1, 24) for _ in range(45)])
    loaded = subject_of(OneOnly().eval(), items[:1]).load()
    with loaded.wrapped:
        examples = examples_of(loaded, "first", items)
        assert examples.batch == 1
        made = Trainer(examples, ladder(examples)[0], TrainingTerms(2)).run(*parted(45)[:2])
        assert made.epochs == 2 and made.pieces[0] is not None


def test_where_outputs_have_no_common_shape_the_pieces_themselves_are_kept(tmp_path: Path) -> None:
    class Boxes(torch.nn.Module):
        """As many rows as are above a threshold."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(24, 32), torch.nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.last(torch.relu(self.first(x))).view(-1, 2)
            return found[found[:, 0] > 0]

    torch.manual_seed(0)
    items = named_inputs([torch.randn(1, 24) for _ in range(45)])
    loaded = subject_of(Boxes().eval(), items[:1]).load()
    with loaded.wrapped:
        examples = examples_of(loaded, "first", items)
        assert examples.outputs == () and examples.batch > 1
        made = Trainer(examples, ladder(examples)[-1], TrainingTerms(20)).run(*parted(len(examples))[:2])
        assert made.history[-1] < 0.9 * made.history[0]


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"rate": 10, "max_loss": 0.1}, SpecError, "the one or the other"),
        ({"rate": "much"}, SpecError, "expected 64MiB"),
        ({"max_loss": 2}, SpecError, "expected a share"),
        ({"epochs": 0}, SpecError, "at least 1"),
        ({"kind": "pictures"}, SpecError, "must be one of"),
        ({"inputs": DIGITS[:9]}, SpecError, "too few"),
        ({"choose_by": DIGITS[:9]}, SpecError, "too few"),
        ({"split": "nowhere"}, Exception, "nowhere"),
        ({"split": "classifier"}, CutRefused, "nothing crosses that an encoder could make smaller"),
    ],
)
def test_bad_words(words: dict, error: type[Exception], text: str, tmp_path: Path) -> None:
    choice = ModelChoice("digits", device="cpu", threads=1)
    how = {"inputs": DIGITS, "split": "stage2", "epochs": 1, **words}
    with pytest.raises(error, match=text):
        learn(choice, how.pop("inputs"), how.pop("split"), output=tmp_path, progress=False, **how)


def test_the_command_says_what_is_wrong_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "--split", "stem", "--input", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    (tmp_path / "x.png").touch()
    words = ["--codec", "learned:none.safetensors", "--split", "stem", "--server", "127.0.0.1:1"]
    assert main(["run", *words, "--input", str(tmp_path / "x.png")]) == 2
    assert "none.safetensors cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--codec", "int88"])
    assert "Did you mean int8" in capsys.readouterr().err
