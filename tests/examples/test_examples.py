"""Each example does what it says, as its reader runs it: in the checkout, against a server of the command it names."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from fastapi import HTTPException, Request
from nbclient import NotebookClient
from PIL import Image

import edge_client
from edge_client import local_server
from tests.docs.pages import ROOT
from tests.docs.serving import serving
from tests.ports import free_port

EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
PICTURES = sorted((ROOT / "shared_hooks/models/digits/images").glob("*.png"))
HARDWARE = {"jetson_gstreamer", "raspberry_pi_picamera2"}
"""Need a camera and its libraries: `make cameras` runs the first, nobody the second (docs/sources.md)."""
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """``python examples/NAME.py WORDS``, with the server that its docstring starts; what it printed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with ExitStack() as servers:

        def ran(name: str, *words: str) -> str:
            text = EXAMPLES[name].read_text(encoding="utf-8")
            (command,) = re.findall(r"^cloud-server (.*) &$", text, re.MULTILINE)
            ports = servers.enter_context(serving(shlex.split(command)))
            monkeypatch.setattr(sys, "argv", [name, "--server", f"127.0.0.1:{ports['50051']}", *words])
            runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
            return capsys.readouterr().out

        yield ran


def test_every_example_is_tried() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert {name for name in EXAMPLES if f'"{name}"' in text} == set(EXAMPLES)


def test_many_at_once_by_asyncio(run: Run) -> None:
    lines = run("asyncio_client").splitlines()
    assert lines == [
        "0011_label1.png is 1",
        "at once: 1 8 4 5 5 8 6 0",
        "one after the other: 40 of 40 right",
    ]


def test_a_camera_shows_the_newest(run: Run) -> None:
    lines = run("camera", "--frames", "6").splitlines()
    assert len(lines) == 7 and all(re.fullmatch(r"\d  \d+%  [\d.]+ ms", line) for line in lines[:6])
    assert re.fullmatch(r"6 frames answered; \d+ gave way to newer ones", lines[6])


@pytest.mark.parametrize("split", ["finder.highest", "reader.stage1.0.conv1", "edge-only"])
def test_digits_are_found_read_and_drawn(run: Run, tmp_path: Path, split: str) -> None:
    out = tmp_path / "boxes.png"
    lines = run("detector", "--split", split, "--output", str(out)).splitlines()
    assert sorted(line[:3] for line in lines[:4]) == ["a 0", "a 2", "a 7", "a 9"]
    corners = {line[2]: [int(edge) for edge in re.findall(r"\d+(?=[,\]])", line)[:2]] for line in lines[:4]}
    placed = {"7": (2, 5), "0": (60, 0), "2": (8, 58), "9": (61, 62)}
    for digit, place in placed.items():
        assert all(abs(found - wanted) <= 3 for found, wanted in zip(corners[digit], place, strict=True)), digit
    with Image.open(out) as picture:
        assert picture.size == (384, 384)
        assert picture.convert("RGB").getcolors(1 << 20) and (0, 255, 0) in {
            color for _, color in picture.getcolors(1 << 20) or ()
        }


def test_a_tokenizers_batch_goes_in_as_it_is(run: Run) -> None:
    lines = run("text_classifier", "a good day", "a bad film").splitlines()
    assert len(lines) == 2 and all(re.fullmatch(r"'.*': (good|bad) \(0\.\d\d\), \d+ bytes up", line) for line in lines)


def test_a_language_model(run: Run) -> None:
    *text, figures = run("language_model", "the first layers").splitlines()
    assert "".join(text)
    assert re.fullmatch(r"Summary\(\d+ tokens, .* round trips, .* up, .* down\)", figures)


def test_a_web_service(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient

    service = runpy.run_path(str(EXAMPLES["fastapi_service"]))
    with serving(["--model", "digits"]) as ports:
        monkeypatch.setitem(os.environ, "ISTHMUS_SERVER", f"127.0.0.1:{ports['50051']}")
        with TestClient(service["app"]) as client:
            image = ROOT / "shared_hooks" / "models" / "digits" / "images" / "1728_label7.png"
            answer = client.post("/predict", content=image.read_bytes())
            assert answer.status_code == 200 and next(iter(answer.json()["predictions"])) == "7"
            assert answer.json()["split"] == "stage2.0.conv2"
            wrong = client.post("/predict", content=b"no picture at all")
            assert wrong.status_code == 400 and wrong.json()["detail"]
            assert client.post("/predict", content=b"", headers={"content-length": f"{1 << 40}"}).status_code == 413


def test_service_cancels_abandoned_requests() -> None:
    service = runpy.run_path(str(EXAMPLES["fastapi_service"]))
    heard: list[str] = []

    async def forever(picture: bytes) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    async def receive() -> dict[str, object]:
        heard.append("asked")
        return {"type": "http.request"} if len(heard) == 1 else {"type": "http.disconnect"}

    async def asked() -> None:
        service["app"].state.client = SimpleNamespace(infer=forever)
        headers = [(b"content-length", b"3")]
        scope = {"type": "http", "method": "POST", "app": service["app"], "headers": headers}
        await service["predict"](Request(scope, receive))

    with pytest.raises(HTTPException, match="499"):
        asyncio.run(asked())
    assert heard == ["asked", "asked", "cancelled"]


def test_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    with serving(["--model", "digits"]) as ports, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's client
        monkeypatch.setitem(os.environ, "ISTHMUS_SERVER", f"127.0.0.1:{ports['50051']}")
        monkeypatch.setitem(os.environ, "PYTHONPATH", str(ROOT))
        NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert sum("<table" in data.get("text/html", "") for data in shown) >= 4
    assert any("label='7'" in data["text/plain"] for data in shown)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of heads, as the two foreign edges say that it is made."""
    folder = tmp_path_factory.mktemp("exported") / "heads"
    assert edge_client.export("digits", split="stage2.0.conv2", output=folder).ok
    return folder


def labels(lines: list[str]) -> list[tuple[str, str]]:
    """What a picture is, by its name, and what a program says."""
    return [(line.split()[0].partition("label")[2][0], line.split()[1]) for line in lines]


def test_an_edge_in_python_that_shares_no_code(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLES["edge_in_python"].read_text(encoding="utf-8")
    assert len(text.splitlines()) < 62 and not re.search(r"import (isthmus|edge_client|shared_hooks|torch)", text)
    with local_server("digits", arguments=["--tails", "stage2.0.conv2"]) as address:
        words = [sys.executable, str(EXAMPLES["edge_in_python"]), address, str(exported), *map(str, PICTURES)]
        done = subprocess.run(words, cwd=exported, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = labels(done.stdout.splitlines())
    assert len(said) == 40 and all(is_ == says for is_, says in said)


def test_an_edge_in_node(exported: Path, tmp_path: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node")
    folder = ROOT / "examples" / "edge_in_node"
    for name in ("edge.js", "package.json", "package-lock.json"):
        shutil.copy(folder / name, tmp_path)
    npm = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    got = subprocess.run(npm, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    if got.returncode:
        pytest.skip(f"npm ci: {got.stderr.strip().splitlines()[-1][:200]}")
    port = free_port()
    with local_server("digits", arguments=["--tails", "stage2.0.conv2", "--rest-port", f"{port}"]):
        words = ["node", "edge.js", f"http://127.0.0.1:{port}", str(exported), *map(str, PICTURES)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        words[-len(PICTURES) :] = [str(PICTURES[0])]
        manifest = json.loads((exported / "manifest.json").read_text())
        other = Path(shutil.copytree(exported, tmp_path / "other"))
        (other / "manifest.json").write_text(json.dumps({**manifest, "weights": "0" * 32}))
        words[3] = str(other)
        refused = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    said = labels(done.stdout.splitlines())
    assert len(said) == 40 and all(is_ == says for is_, says in said)
    assert refused.returncode and "other weights" in refused.stderr
