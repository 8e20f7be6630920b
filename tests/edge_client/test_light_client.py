"""Heads as ONNX files, run without PyTorch against a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch import nn

import edge_client
from edge_client import LightClient, ModelChoice, local_server
from edge_client.light import HeadFolder, LightAnswer, difference_at, elements, provider_of
from edge_client.light_codecs import CODECS, ROUNDING
from edge_client.live import LightDashboard
from protos.inference import inference_pb2
from shared_hooks.errors import (
    CutRefused,
    Disagreement,
    InputMismatch,
    ServerUnavailable,
    SpecError,
    UnknownLayer,
    UnknownModel,
)
from shared_hooks.models import digits, load_spec
from tests.edge_client.sources.streams import streaming
from tests.starts import made_once

IMAGES = sorted((Path(digits.__file__).parent / "images").glob("*.png"))
CUTS = ["stem.2", "stage2.0.conv2", "pool"]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with local_server(ModelChoice("digits"), arguments=["--tails", ",".join(CUTS), "--workers", "2"]) as address:
        yield address


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "heads-of-digits", export)


def export(folder: Path) -> None:
    found = edge_client.export("digits", [str(one) for one in IMAGES[:8]], split=CUTS, output=folder, whole=True)
    assert found.ok and [one.cut for one in found.heads] == CUTS
    assert all(one.difference < 1e-5 and not one.labels and one.compared == 9 for one in found.heads)


@pytest.fixture(scope="module")
def images() -> list[np.ndarray[Any, Any]]:
    spec = load_spec("digits")
    return [spec.preprocess(path)[0][0].numpy() for path in IMAGES]


def copy(heads: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(heads, tmp_path / "heads"))


@pytest.mark.parametrize("cut", CUTS)
def test_every_image_gets_the_models_label(
    cut: str, server: str, heads: Path, images: list[np.ndarray[Any, Any]]
) -> None:
    model = load_spec("digits").load_model()
    with LightClient(server, heads, cut) as client:
        for path, image, answer in zip(IMAGES, images, client.infer_many(IMAGES, in_flight=3), strict=True):
            assert isinstance(answer, LightAnswer)
            with torch.no_grad():
                wanted = model(torch.from_numpy(image)).numpy()
            assert np.abs(answer.output - wanted).max() <= 1e-5 * np.abs(wanted).max()
            assert answer.predictions[0].label == path.stem[-1] or answer.predictions[0].index == wanted.argmax()
            assert answer.split == cut and answer.bytes_up and not answer.fallback


def test_pictures_become_what_torch_makes_of_them(heads: Path, images: list[np.ndarray[Any, Any]]) -> None:
    known = HeadFolder(heads)
    for path, image in zip(IMAGES, images, strict=True):
        (found,) = known.read(path)
        assert found.dtype == image.dtype and np.array_equal(found, image)


def test_arrays_by_place_and_by_name(server: str, heads: Path, images: list[np.ndarray[Any, Any]]) -> None:
    with LightClient(server, heads, CUTS[0]) as client:
        (name,) = [one.name for one in client.heads.inputs]
        assert np.array_equal(client.infer(images[0]).output, client.infer(**{name: images[0]}).output)
        for args, kwargs in (
            ((), {}),
            ((images[0], images[0]), {}),
            ((images[0],), {name: images[0]}),
            ((), {"other": images[0]}),
            ((images[0].astype(np.float64),), {}),
            ((images[0][:, :, :16],), {}),
        ):
            with pytest.raises(InputMismatch):
                client.infer(*args, **kwargs)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda array: array * 1.05, "is wrong: for the model's example it differs by 5.0e-02 of the largest element"),
        (lambda array: array[:1, :1], "is wrong"),
        (lambda array: np.where(array == array.max(), np.nan, array), "is wrong"),
        (lambda array: 1 / 0, "fails on the model's example: division by zero"),
        (lambda array: array * 1.001, ""),  # as by TF32
    ],
)
def test_a_runtime_that_is_wrong_on_the_example_is_refused(
    wrong: Any, reason: str, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(onnxruntime.InferenceSession):  # type: ignore[misc]
        def run(self, *given: Any) -> Any:
            return [wrong(array) for array in super().run(*given)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Other)
    if not reason:
        LightClient("127.0.0.1:1", heads, CUTS[1]).close()
        return
    with pytest.raises(SpecError, match=f"in onnxruntime {onnxruntime.__version__} by CPUExecutionProvider, {reason}"):
        LightClient("127.0.0.1:1", heads, CUTS[1])
    with LightClient("127.0.0.1:1", heads, "auto", fallback="edge") as client, pytest.raises(SpecError, match=reason):
        client.infer(*client.heads.zeros(CUTS[0]))


@given(
    arrays(np.float32, array_shapes(max_dims=3, min_side=0, max_side=40), elements=st.floats(width=32)),
    st.integers(0, 2**32 - 1),
)
def test_elements_are_those_of_the_array(array: np.ndarray[Any, Any], seed: int) -> None:
    at, wanted = elements(array)
    assert len(at) <= 257 and np.array_equal(np.unique(at), at) and difference_at(array, at, wanted) == 0
    finite = np.isfinite(array)
    if finite.any() and np.abs(array[finite]).max() > 0:
        most = np.abs(np.where(finite, array, 0)).argmax()
        other = array.copy().reshape(-1)
        other[most] = -other[most]
        assert difference_at(other, at, wanted) > 0.01
    assert difference_at(np.append(array, array), at, wanted) > 0.01 or not array.size
    assert difference_at(array.astype(np.float64), at, wanted) > 0.01


def test_other_indices_are_other_results() -> None:
    tokens = np.arange(50_000)
    assert difference_at(tokens, *elements(tokens)) == 0 < difference_at(tokens + (tokens == 49_999), *elements(tokens))
    levels = np.arange(256, dtype=np.uint8)
    assert difference_at(np.maximum(levels, 1), *elements(levels)) <= 0.01  # one level, rounded otherwise


def test_auto_takes_an_available_head(server: str, heads: Path, images: list[np.ndarray[Any, Any]]) -> None:
    with LightClient(server, heads, "auto") as client:
        answer = client.infer(images[0])
        assert answer.split in CUTS and client.split == answer.split


def test_no_torch_is_loaded(server: str, heads: Path) -> None:
    program = (
        "import sys; from edge_client.__main__ import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    words = ["run", "--heads", str(heads), "--split", CUTS[1], "--server", server, "--json", "-", "--input"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words, *map(str, IMAGES[:3])], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["answers"]) == 3 and all(one["predictions"] for one in found["answers"])


def test_the_whole_model_here_where_the_server_is_gone(heads: Path, images: list[np.ndarray[Any, Any]]) -> None:
    nobody = "127.0.0.1:1"
    with LightClient(nobody, heads, CUTS[0], patience=0.5) as client, pytest.raises(ServerUnavailable):
        client.infer(images[0])
    with LightClient(nobody, heads, CUTS[0], deadline=5, fallback="edge") as client:
        answer = client.infer(images[0])
    with torch.no_grad():
        wanted = load_spec("digits").load_model()(torch.from_numpy(images[0])).numpy()
    assert answer.fallback and not answer.bytes_up and 0 < answer.difference < 1e-5
    with LightClient(nobody, heads, "auto", deadline=5, fallback="edge") as client:
        assert np.array_equal(client.infer(images[0]).output, answer.output) and client.split == "auto"
    assert np.abs(answer.output - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_a_head_of_other_weights_is_refused(
    server: str, heads: Path, images: list[np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    folder = copy(heads, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "weights": "0" * 32}))
    with LightClient(server, folder, CUTS[0]) as client, pytest.raises(Disagreement, match="other weights"):
        client.infer(images[0])


def test_a_tail_that_is_not_served(heads: Path, images: list[np.ndarray[Any, Any]]) -> None:
    with (
        local_server("digits") as address,
        LightClient(address, heads, CUTS[0]) as client,
        pytest.raises(UnknownModel, match="no tail behind"),
    ):
        client.infer(images[0])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "is no manifest"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100000), "is not JSON"),
        (lambda folder: (folder / "weights.bin").unlink(), "weights.bin cannot be read"),
        (lambda folder: (folder / "weights.bin").write_bytes(b"1"), "is not the file that was exported"),
        (lambda folder: (folder / "pool.onnx").write_bytes(b""), "is not the file that was exported"),
        (lambda folder: (folder / "pool.onnx").unlink(), "cannot be read"),
    ],
)
def test_a_folder_whose_files_are_not_its_own(spoil: Any, says: str, heads: Path, tmp_path: Path) -> None:
    folder = copy(heads, tmp_path)
    spoil(folder)
    with pytest.raises(SpecError, match=says):
        HeadFolder(folder)


def test_a_manifest_that_points_outside(heads: Path, tmp_path: Path) -> None:
    folder = copy(heads, tmp_path)
    text = (folder / "manifest.json").read_text().replace('"pool.onnx"', '"../heads/pool.onnx"')
    (folder / "manifest.json").write_text(text)
    with pytest.raises(SpecError, match="outside of the folder"):
        HeadFolder(folder)


def test_invalid_choices(server: str, heads: Path) -> None:
    with pytest.raises(UnknownLayer, match="no head of"):
        LightClient(server, heads, "nope")
    with pytest.raises(SpecError, match="several heads"):
        LightClient(server, heads)
    with pytest.raises(SpecError, match="HOST:PORT"):
        LightClient("nowhere", heads, CUTS[0])
    with pytest.raises(SpecError, match="is not in this onnxruntime .* there is: .*cpu"):
        provider_of("no such provider")
    with pytest.raises(SpecError, match="fallback"):
        LightClient(server, heads, CUTS[0], fallback="cloud")


class TwoInputs(nn.Module):
    """An input that is read behind the cut, a tensor that is transposed, a skip connection, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 4), nn.Linear(5, 4), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, late: torch.Tensor) -> dict[str, torch.Tensor]:
        turned = self.first(x).transpose(1, 2)
        mixed = self.second(turned)
        return {"scores": self.third(torch.relu(turned) + late), "mixed": mixed}


def test_inputs_behind_the_cut_and_tensors_that_lie_otherwise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TwoInputs().eval()
    example = (torch.rand(2, 5, 6), torch.rand(2, 4, 5)), {}
    found = edge_client.export(ModelChoice(model, example=example), split="all", output=tmp_path, whole=True)
    assert found.ok, found.text()
    by_cut = {one.cut: one for one in found.heads}
    assert [one.name for one in by_cut["first"].crossing] == ["input.late", "first"]
    assert all(one.difference < 1e-5 for one in found.heads)


def test_places_that_are_none_and_folders_that_cannot_be(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    choice = ModelChoice(model, example=((torch.rand(3, 4),), {}))
    with pytest.raises(UnknownLayer):
        edge_client.export(choice, split="nope", output=tmp_path)
    with pytest.raises(CutRefused):
        edge_client.export(choice, split="input", output=tmp_path)
    with pytest.raises(SpecError, match="cannot be a folder"):
        (tmp_path / "file").write_text("")
        edge_client.export(choice, split="0", output=tmp_path / "file")
    found = edge_client.export(choice, split=["0", "1"], output=tmp_path)
    assert found.ok and HeadFolder(tmp_path).cuts == ["0", "1"]


class Chunks(nn.Module):
    """Behind the cut only a part of a tensor is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[:, 1])


def test_only_a_part_of_a_tensor_crosses(tmp_path: Path) -> None:
    torch.manual_seed(0)
    choice = ModelChoice(Chunks().eval(), example=((torch.rand(3, 5, 4),), {}))
    found = edge_client.export(choice, split="all", output=tmp_path)
    assert found.ok, found.text()
    by_cut = {one.cut: one for one in found.heads}
    assert by_cut["first"].nbytes == 4 * 3 * 4 and by_cut["first"].difference < 1e-5


class Reads(nn.Module):
    """A number is read from data between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.third(self.second(x) * float(x.sum()))


def test_a_cut_behind_a_number_with_a_fraction_is_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    choice = ModelChoice(Reads().eval(), example=((torch.rand(3, 4),), {}))
    found = edge_client.export(choice, split="all", output=tmp_path)
    assert "third" not in HeadFolder(tmp_path).cuts
    refused = {one.cut: one.refused for one in found.heads if one.refused}
    assert refused and all("a number with a fraction from data" in why for why in refused.values())
    assert HeadFolder(tmp_path).refused == refused


@pytest.mark.parametrize(
    ("shape", "data"),
    [((1, 10), b"1" * 39), ((1, 10), b""), ((-1, -10), b"1" * 40), ((1 << 32, 1 << 32), b""), ((1,) * 40, b"1" * 4)],
)
def test_a_server_that_lies_about_its_output(
    shape: tuple[int, ...], data: bytes, server: str, heads: Path, images: list[np.ndarray[Any, Any]]
) -> None:
    reply = inference_pb2.ModelInferResponse(model_name="digits")
    reply.outputs.add(name="output", datatype="FP32", shape=shape)
    reply.raw_output_contents.append(data)
    with LightClient(server, heads, CUTS[0]) as client:
        client._infer = lambda request, timeout: reply
        with pytest.raises(Disagreement, match="the server gives"):
            client.infer(images[0])


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_codecs(codec: str, server: str, heads: Path, images: list[np.ndarray[Any, Any]]) -> None:
    model = load_spec("digits").load_model()
    cut = CUTS[1]
    with LightClient(server, heads, cut, codec=codec) as client, LightClient(server, heads, cut) as plain:
        bound = client.heads.head(cut).codecs.get(codec, client.heads.head(cut).difference)
        for image in images:
            answer, raw = client.infer(image), plain.infer(image)
            with torch.no_grad():
                wanted = model(torch.from_numpy(image)).numpy()
            assert answer.output.argmax() == wanted.argmax() and answer.difference == bound
            assert np.abs(answer.output - wanted).max() <= max(bound, 1e-5) * np.abs(wanted).max()
            assert answer.bytes_up < raw.bytes_up
            if codec not in ROUNDING:
                assert np.array_equal(answer.output, raw.output)
    with pytest.raises(SpecError, match="must be one of"):
        LightClient(server, heads, CUTS[0], codec="int9")


def test_where_a_heads_time_goes(heads: Path, images: list[np.ndarray[Any, Any]]) -> None:
    with LightClient("127.0.0.1:1", heads, CUTS[1]) as client:
        found = client.node_times(images[0], runs=3)
        assert len(found) > 5 and all(one.ns >= 0 and one.runs == 3 for one in found)
        assert {"Conv"} <= {one.kind.removeprefix("Fused") for one in found} and "CPU" in found[0].provider
        assert len(client.node_times(images[0], split=CUTS[0])) < len(found)
        with pytest.raises(InputMismatch):
            client.node_times()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_doctor_without_torch(server: str, heads: Path, tmp_path: Path, wrong: bool) -> None:
    program = (
        "import sys; from edge_client.__main__ import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    folder = copy(heads, tmp_path)
    if wrong:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, "weights": "0" * 32}))
    words = [sys.executable, "-c", program, "doctor", server, "--heads", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == (1 if wrong else 0), done.stderr
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert lines.keys() == {"versions", "heads", "provider", *CUTS}
    for cut in CUTS:
        assert lines[cut].startswith("wrong" if wrong else "ok") and ("other weights" in lines[cut]) == wrong


def test_a_camera_without_torch(server: str, heads: Path) -> None:
    program = (
        "import sys; from edge_client.__main__ import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    with streaming(frames=60, seconds=0.05) as address:
        words = ["run", "--heads", str(heads), "--split", CUTS[1], "--server", server, "--input", address]
        done = subprocess.run(
            [sys.executable, "-c", program, *words, "--frames", "3", "--json", "-"],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)["answers"]
    assert len(answers) == 3 and all(one["predictions"] and "#" in one["file"] for one in answers)


def test_a_bench_without_torch(server: str, heads: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from edge_client.__main__ import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    words = ["bench", "--server", server, "--heads", str(heads), "--rate", "10,20", "--seconds", "1", "--warmup", "0.2"]
    words += ["--split", f"{CUTS[0]}=0.5,{CUTS[1]}=0.5", "--codec", "raw,lz4", "--clients", "2", "--deadline", "8"]
    words += ["--input", str(IMAGES[0].parent), "--json", "-", "--html", str(tmp_path / "page.html"), "--no-progress"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == "digits" and found["settings"]["inputs"] == len(IMAGES)
    assert [one["rate"] for one in found["steps"]] == [10, 20]
    for step in found["steps"]:
        assert step["requests"] == step["answered"] > 0 and not step["errors"]
        assert {one["name"] for one in step["ways"]} == set(CUTS[:2])
    assert "digits: bench" in (tmp_path / "page.html").read_text()


def test_a_bench_in_python(server: str, heads: Path, images: list[np.ndarray[Any, Any]]) -> None:
    found = edge_client.bench_heads(
        server, heads, images[:2], rate=20, seconds=1, warmup=0.1, clients=2, deadline=8, progress=False
    )
    assert found.ended is None and found.rows()[0]["answered"] == found.rows()[0]["requests"] > 0
    assert found.settings["split"] == ",".join(CUTS)
    with pytest.raises(UnknownLayer):
        edge_client.bench_heads(server, heads, split="nothing", progress=False)
    with pytest.raises(SpecError, match="none of yours|is not one of"):
        edge_client.bench_heads(server, heads, codec="basis", progress=False)
    with pytest.raises(SpecError, match="files and arrays"):
        edge_client.bench_heads(server, heads, [3], progress=False)
    with pytest.raises(ServerUnavailable):
        edge_client.bench_heads("127.0.0.1:9", heads, split=CUTS[0], patience=0.2, progress=False)


def test_a_page_without_torch(server: str, heads: Path, images: list[np.ndarray[Any, Any]]) -> None:
    with LightClient(server, heads, CUTS[0]) as client, LightDashboard(client) as page:
        client.infer(images[0])
        client.infer(images[0], split=CUTS[1])
        with pytest.raises(InputMismatch):
            client.infer(images[0], split=CUTS[1], deadline=1.0, other=images[0])
        with urllib.request.urlopen(page.url, timeout=10) as reply:
            assert "<html" in reply.read().decode()
        with urllib.request.urlopen(f"{page.url}events", timeout=10) as stream:
            while not (line := stream.readline().decode()).startswith("data:"):
                pass
        shown = json.loads(line.removeprefix("data:"))
        assert shown["counts"]["answered"] == 2 and shown["counts"]["failed"] == 1
        assert [one["kind"] for one in shown["events"]] == ["moved", "failed"]
        for one in shown["requests"]:
            assert len(one["rows"]) == len(shown["about"]["stages"]) == 4
            assert sum(one["rows"]) == pytest.approx(one["ms"], rel=0.2) and one["rows"][3] > 0
        assert client.ping() > 0
        page.close()
        assert not client.listeners


def test_a_run_with_a_page_without_torch(server: str, heads: Path) -> None:
    program = (
        "import sys; from edge_client.__main__ import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    words = ["run", "--heads", str(heads), "--split", CUTS[1], "--server", server, "--dashboard", "0", "--input"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words, str(IMAGES[0])], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "dashboard at http://127.0.0.1:" in done.stderr, done.stderr
