"""``only_head``: answers are the model's own, only the head's weights are in memory, and what needs more is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from edge_client import EdgeClient, ModelChoice
from edge_client.__main__ import main
from edge_client.adaptive import AutoClient
from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, Disagreement, SpecError, UnknownLayer
from shared_hooks.models import ModelSpec, load_spec
from tests.edge_client import fake_server as fake
from tests.edge_client.fake_server import FakeServer
from tests.edge_client.test_processes import CloudProcess, cloud

ROOT = Path(__file__).parents[2]
IMAGE = str(ROOT / "shared_hooks/models/digits/images/0011_label1.png")
HERE = "tests.edge_client.test_only_head"


class Text(nn.Module):
    """Its first and its last layer share their weights; the second reads those of a layer that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.borrow = Borrow()
        self.middle = nn.LSTM(16, 16, batch_first=True)
        self.lent = nn.Linear(16, 16)
        self.last = nn.Linear(16, 32, bias=False)
        self.last.weight = self.embed.weight
        self.unused = nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.middle(self.borrow(self.embed(ids), self.lent.weight))
        out: Tensor = self.last(self.lent(hidden))
        return out


class Borrow(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight)


class Forks(nn.Module):
    """Its second layer runs for some inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positive = bool(x.sum() > 0)
        x = self.first(x)
        if positive:
            x = self.sometimes(x)
        out: Tensor = self.last(x)
        return out


def spec_of(folder: Path, kind: type[nn.Module], example: str = "shape = [1, 4]") -> ModelSpec:
    torch.manual_seed(5)
    save_model(kind(), str(folder / "w.safetensors"))
    text = f'id = "m"\nfactory = "{HERE}:{kind.__name__}"\nweights = "w.safetensors"\n[[example.args]]\n{example}\n'
    (folder / "m.toml").write_text(text)
    return load_spec(folder / "m.toml")


def loaded(client: EdgeClient) -> set[str]:
    """Names of the parameters in memory."""
    only_head = client._edge_model.only_head
    assert only_head is not None
    return {name for name, one in client.wrapped.model.named_parameters() if only_head.weights.is_loaded(one)}


IDS = 'shape = [2, 5]\ndtype = "int64"\nhigh = 32'


@pytest.mark.parametrize(
    ("layer", "in_memory"),
    [
        ("input", set()),
        ("embed", {"embed"}),
        ("borrow", {"embed", "lent.weight"}),
        ("middle", {"embed", "lent.weight", "middle"}),
        ("last", {"embed", "lent", "middle"}),
    ],
)
def test_the_heads_weights_and_no_others(tmp_path: Path, layer: str, in_memory: set[str]) -> None:
    """A weight that is shared with the tail, or borrowed from it, is the head's, too."""
    spec = spec_of(tmp_path, Text, IDS)
    whole, ids = spec.load_model(), torch.randint(32, (2, 5))
    with (
        FakeServer(fake.tails(spec.load_model())) as server,
        EdgeClient(server.address, ModelChoice(spec, only_head=layer), layer) as client,
    ):
        names = loaded(client)
        assert {name for name in names if not any(name.startswith(one) for one in in_memory)} == set()
        assert all(any(name.startswith(one) for name in names) for one in in_memory)
        assert "unused.weight" not in names
        with torch.no_grad():
            assert torch.equal(client.infer(ids).output, whole(ids))
            assert torch.equal(client.infer(ids[:1, :3]).output, whole(ids[:1, :3])), "another size is another plan"
        assert client.wrapped.weights_hash() == WrappedModel(whole).weights_hash()


def test_a_layer_of_a_coarser_hierarchy() -> None:
    """Its modules are not looked into, and needed all the same."""
    client = EdgeClient("127.0.0.1:1", ModelChoice("digits", only_head="stage1", depth=1)).prepare()
    assert {name.partition(".")[0] for name in loaded(client)} == {"stem", "stage1"}
    client.close()


def test_later_cuts_and_the_whole_are_refused_by_name(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, Text, IDS)
    ids = torch.randint(32, (2, 5))
    with (
        FakeServer(fake.tails(spec.load_model())) as server,
        EdgeClient(server.address, ModelChoice(spec, only_head=1), "embed") as client,
    ):
        assert client.loaded == "0.0 of 0.0 MiB of the weights are in memory"
        with pytest.raises(CutRefused, match=r"layer 2 \(middle\): only the weights up to borrow are loaded"):
            client.infer(ids, split="middle")
        with pytest.raises(SpecError, match="only the weights up to borrow are loaded"):
            client.infer(ids, split="edge-only")
        with pytest.raises(SpecError, match="an AutoClient may run the whole model"):
            AutoClient(client, None)  # type: ignore[arg-type]
        assert client.infer(ids, split="cloud-only").output.shape == (2, 5, 32)


def test_a_layer_that_does_not_run_for_every_input(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, Forks, 'shape = [1, 4]\ndtype = "float32"\nfill = 1')
    whole = spec.load_model()
    with (
        FakeServer(fake.tails(spec.load_model())) as server,
        EdgeClient(server.address, ModelChoice(spec, only_head="sometimes"), "first") as client,
        torch.no_grad(),
    ):
        for x, runs in ((torch.rand(1, 4), True), (-torch.rand(1, 4), False), (torch.rand(1, 4), True)):
            assert torch.equal(client.infer(x).output, whole(x))
            if runs:
                assert torch.equal(client.infer(x, split="sometimes").output, whole(x))
            with pytest.raises(CutRefused, match="only the weights up to sometimes are loaded"):
                client.infer(x, split="last")
        assert loaded(client) == {"first.weight", "first.bias", "sometimes.weight", "sometimes.bias"}


@pytest.mark.parametrize("layer", ["nope", 99, "m", "unused"])
def test_an_unknown_layer(tmp_path: Path, layer: int | str) -> None:
    client = EdgeClient("127.0.0.1:1", ModelChoice(spec_of(tmp_path, Text, IDS), only_head=layer), "input")
    for _ in range(2):  # it stays so
        with pytest.raises(UnknownLayer, match=f"only the weights up to {layer}: no layer '?{layer}"):
            client.infer(torch.randint(32, (2, 5)), split=layer)
    client.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"witness": 0.5}, "witness runs the whole model here"),
        ({"fallback": "edge"}, 'fallback="edge" runs the whole model here'),
        ({"split": "edge-only"}, 'split="edge-only" runs the whole model here'),
    ],
)
def test_operations_that_need_the_whole_model(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        EdgeClient("127.0.0.1:1", ModelChoice("digits", only_head="stem.0"), **options)


def test_weights_that_are_in_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a module has all of them in memory"):
        EdgeClient("127.0.0.1:1", ModelChoice(Text(), model_id="m", only_head="embed"))
    with pytest.raises(SpecError, match="weights: there is no file to leave them in: the factory makes them"):
        EdgeClient("127.0.0.1:1", ModelChoice(f"{HERE}:Text", only_head="embed"))


@pytest.fixture(scope="module")
def server() -> Any:
    with cloud("--model", "digits") as process:
        yield process


CUT = "stage2.0.conv2"


def test_with_a_real_server(server: CloudProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """It agrees on hash, structure and plan of the whole model."""
    words = ("run", "--server", server.address, "--model", "digits", "--input", IMAGE, "--threads", "1")
    assert main([*words, "--split", CUT, "--only-head", CUT]) == 0
    output = capsys.readouterr()
    assert "truth 1  ok" in output.out and f"of the weights are in memory (--only-head {CUT})" in output.err
    assert main([*words, "--split", "classifier", "--only-head", CUT]) == 2
    assert f"only the weights up to {CUT} are loaded" in capsys.readouterr().err
    for more in (["--split", "auto"], ["--split", CUT, "--witness", "1"], ["--split", CUT, "--fallback", "edge"]):
        assert main([*words, *more, "--only-head", CUT]) == 2
        assert "needs the whole model here, and --only-head leaves" in capsys.readouterr().err


def test_other_weights_beyond_the_head_are_noticed(server: CloudProcess, tmp_path: Path) -> None:
    model = load_spec("digits").load_model()
    with torch.no_grad():
        model.get_parameter("classifier.bias")[0] += 1
    save_model(model, str(tmp_path / "other.safetensors"))
    choice = ModelChoice("digits", weights=(str(tmp_path / "other.safetensors"),), only_head="stem.0", threads=1)
    with pytest.raises(Disagreement, match="weights"), EdgeClient(server.address, choice, "stem.0"):
        pass
