"""Branch cuts between an edge and a server: as a plain cut in all that is around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import edge_client
from cloud_server import CloudServer, Core, Limits, ModelEntry, ServedModel
from cloud_server.access import Register, entry, hash_of, new_token
from edge_client import ConnectionOptions, EdgeClient, ModelChoice
from edge_client.credentials import Credentials
from shared_hooks import WrappedModel
from shared_hooks.errors import AccessRefused, CutRefused, SpecError, UnknownLayer
from shared_hooks.models import ModelSpec, load_spec
from shared_hooks.modules import tables
from shared_hooks.tensors import tensors_in
from tests.edge_client.test_processes import CloudProcess
from tests.shared_hooks.planning.test_branches import Choosing
from tests.zoo.branching import MODELS, made

SPEC = """
id = "towers"
factory = "tests.edge_client.test_branches:towers"
[example]
args = [{shape = [2, 8]}, {shape = [2, 8]}]
"""
ROOT = Path(__file__).parents[2]
INPUTS = MODELS["two towers"][1]


def towers() -> torch.nn.Module:
    return made("two towers")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("towers") / "towers.toml"
    path.write_text(SPEC)
    return load_spec(path)


@contextmanager
def served(spec: ModelSpec, register: Register | None = None) -> Iterator[str]:
    with Core([ServedModel(ModelEntry(spec), torch.device("cpu"))], Limits()) as core:
        server = CloudServer(core, "127.0.0.1:0", register=register)
        server.start()
        try:
            yield f"127.0.0.1:{server.port}"
        finally:
            server.stop()


def expected() -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = towers()(*INPUTS)
    return answer


def test_a_list_is_what_runs_here(spec: ModelSpec) -> None:
    with served(spec) as address, EdgeClient(address, ModelChoice(spec, device="cpu"), ["right"]) as client:
        answer = client.infer(*INPUTS)
        assert torch.equal(answer.output, expected())
        assert answer.split == "right" and answer.layers_edge[0].name == "right.0"
        assert [layer.name for layer in answer.layers_cloud] == ["left.0", "left.1", "head"]
        answer = client.infer(*INPUTS, split=["left.0", "right.1"])
        assert torch.equal(answer.output, expected()) and answer.split == "left.0 + right.1"
        answer = client.infer(*INPUTS, split="right")
        assert torch.equal(answer.output, expected()) and len(answer.layers_edge) == 5
        for answer in client.infer_many([INPUTS] * 5, split=["right.1"]):
            assert torch.equal(answer.output, expected())


@pytest.mark.parametrize("codec", ["lz4", "zstd", "fp16", "int8", "auto"])
def test_codecs_hold(spec: ModelSpec, codec: str) -> None:
    with (
        served(spec) as address,
        EdgeClient(address, ModelChoice(spec, device="cpu"), ["right"], codec=codec) as client,
    ):
        found = client.infer(*INPUTS).output
        assert torch.allclose(found, expected(), atol=0.0 if codec in ("lz4", "zstd", "auto") else 0.05)


def test_witnesses_observers_and_batches_hold(spec: ModelSpec) -> None:
    choice = ModelChoice(spec, device="cpu")
    with served(spec) as address, EdgeClient(address, choice, ["right"], witness=1.0, exact=False) as client:
        answer = client.infer(*INPUTS)
        assert answer.witness is not None and answer.witness.same and answer.batch_size == 1


def test_a_group_of_modules_is_a_set(spec: ModelSpec) -> None:
    tables.add_group("rechts", "^right$")
    try:
        with served(spec) as address, EdgeClient(address, ModelChoice(spec, device="cpu"), "group:rechts") as client:
            answer = client.infer(*INPUTS)
            assert torch.equal(answer.output, expected())
            assert {layer.name.partition(".")[0] for layer in answer.layers_edge} == {"right"}
            assert answer.split == client.infer(*INPUTS, split=["right"]).split
    finally:
        del tables.GROUPS["rechts"]


@pytest.mark.parametrize(
    ("split", "error", "text"),
    [
        (["nowhere"], UnknownLayer, "nowhere"),
        ("group:vision", UnknownLayer, "the groups of this model are: head"),
        (["left", "group:vision"], UnknownLayer, "the groups of this model are: head"),
        ([], SpecError, "expected"),
        (["right", "auto"], SpecError, "is no layer"),
        ([["right"]], SpecError, "expected"),
    ],
)
def test_invalid_branch_cuts(spec: ModelSpec, split: str | list[str], error: type[Exception], text: str) -> None:
    with (
        served(spec) as address,
        EdgeClient(address, ModelChoice(spec, device="cpu"), ["right"]) as client,
        pytest.raises(error, match=text),
    ):
        client.infer(*INPUTS, split=split)


def test_caller_restricted_to_cuts_may_not_cut_along_branches(spec: ModelSpec, tmp_path: Path) -> None:
    token = new_token()
    path = tmp_path / "identities.toml"
    path.write_text(entry("alice", hash_of(token), None) + '\n[identities.alice]\ncuts = ["right", "right.2"]\n')
    connection = ConnectionOptions(credentials=Credentials(token=token))
    with (
        served(spec, Register(path)) as address,
        EdgeClient(address, ModelChoice(spec, device="cpu"), "right", connection=connection) as client,
    ):
        assert torch.equal(client.infer(*INPUTS).output, expected())
        with pytest.raises(AccessRefused, match="along branches"):
            client.infer(*INPUTS, split=["right"])


def test_a_server_of_its_own_process_and_worker_processes(spec: ModelSpec) -> None:
    process = CloudProcess("--model", spec.origin, "--worker-processes", "--trials", "never")
    try:
        with EdgeClient(process.address, ModelChoice(spec, device="cpu"), ["right"]) as client:
            assert torch.equal(client.infer(*INPUTS).output, expected())
    finally:
        process.end()


def test_middle_parts_and_sets_do_not_go_together(spec: ModelSpec) -> None:
    with served(spec) as address, EdgeClient([address, "next"], ModelChoice(spec, device="cpu"), "edge-only") as client:
        with pytest.raises(SpecError, match="expected"):
            client.infer(*INPUTS, split=[["left.0", "right.1"], "head"])
        assert list(tensors_in(client.infer(*INPUTS).output))


def test_inputs_that_the_plan_has_not_seen(spec: ModelSpec) -> None:
    with served(spec) as address, EdgeClient(address, ModelChoice(spec, device="cpu"), ["right"]) as client:
        for rows in (1, 3, 5, 8):
            left, right = torch.ones(rows, 8), torch.full((rows, 8), 0.5)
            with torch.no_grad():
                known = towers()(left, right)
            assert torch.equal(client.infer(left, right).output, known)
        with pytest.raises(CutRefused):
            client.wrapped.forward(client.wrapped.head(["right"], *INPUTS), end="head")


def test_data_that_decide_behind_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "choosing.toml"
    path.write_text(
        'id = "choosing"\nfactory = "tests.shared_hooks.planning.test_branches:Choosing"\n'
        "[example]\nargs = [{shape = [1, 4]}, {shape = [1, 4]}]\n"
    )
    choosing, model = load_spec(path), Choosing().eval()
    for split in (["right"], ["one", "right.0"]):
        with served(choosing) as address, EdgeClient(address, ModelChoice(choosing, device="cpu"), split) as client:
            for size in (4.0, 0.1, 2.0, 4.0, 0.2, 1.5):
                inputs = torch.full((1, 4), size), torch.arange(4.0)[None]
                with torch.no_grad():
                    wanted = model(*inputs)
                assert torch.equal(client.infer(*inputs).output, wanted), (split, size)


def test_verify_and_calibrate_take_sets_by_one_name() -> None:
    found = edge_client.verify("none", towers(), INPUTS, cuts="left.0 + right.0,right", progress=False)
    assert found.ok and [one.name for one in found.cuts] == ["input", "left.0 + right.0", "right.2"]
    samples = [(torch.randn(1, 8), torch.randn(1, 8)) for _ in range(3)]
    measured = edge_client.calibrate(
        towers(), samples, cuts="right + left.0,right", codecs="raw,int8", kind="tensors", progress=False
    ).table
    assert [(cut.name, cut.frontier_bytes) for cut in measured.cuts] == [("right.2", 64), ("left.0 + right", 64)]
    assert not any(cut.refused for cut in measured.cuts)
    with pytest.raises(UnknownLayer, match="nowhere"):
        edge_client.verify("none", towers(), INPUTS, cuts="left + nowhere", progress=False)
    with pytest.raises(SpecError, match="along a chain"):
        edge_client.verify(["a:1", "b"], towers(), INPUTS, cuts="left", progress=False)


def test_a_set_that_differs_is_refused_from_then_on() -> None:
    wrapped = WrappedModel(towers())
    plan = wrapped.plan(*INPUTS)
    plan.refuse("left.0 + right.0", "it differs")
    with pytest.raises(CutRefused, match="left.0 and right.0: it differs"):
        wrapped.head(["right.0", "left.0"], *INPUTS)
    assert plan.resolve("left.0 + right.0").reason.endswith("it differs")  # type: ignore[union-attr]
    wrapped.head(["right.2", "left.1"], *INPUTS)
