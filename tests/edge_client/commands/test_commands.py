"""The command line: pure JSON on standard output, one clear line for an error, an exit status that tells."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_client.__main__ import main
from edge_client.client import EdgeClient
from edge_client.commands import report
from edge_client.commands.common import check_json_target
from edge_client.commands.tasks import COMMANDS
from edge_client.screen import progress, size
from shared_hooks.errors import Disagreement, ServerUnavailable, SpecError
from shared_hooks.models import load_spec
from tests.edge_client import fake_server as fake
from tests.edge_client import small_models
from tests.edge_client.fake_server import FakeServer
from tests.ports import free_port
from tests.shipped import IMAGES, folder_of
from tests.starts import Started
from tests.waiting import eventually

CUT = "stage2.0.conv1"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_SERVER", raising=False)
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(fake.tails(load_spec("digits").load_model("cpu"))) as one:
        yield one


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Six shipped images in a folder of their own."""
    return folder_of(tmp_path / "images", 6, "*_label*.png")


def complaint(capsys: Captured) -> str:
    """The one line on standard error; nothing on standard output."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("edge-client: error: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


def test_layers_as_json_and_as_a_table(capsys: Captured, tmp_path: Path) -> None:
    assert main(["layers", "--model", "digits", "--json", "-"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["model"] == "digits" and known["can_split"] == len(known["layers"]) > 20
    assert {"layer_id", "name", "layer_type", "output_bytes", "frontier_bytes", "can_split", "reason"} <= set(
        known["layers"][0]
    )
    assert main(["layers", "--json", str(tmp_path / "layers.json")]) == 0
    assert json.loads((tmp_path / "layers.json").read_text()) == known
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["id", "name", "type", "output", "parameters", "MACs", "crosses", "cut"]
    number = next(str(one["layer_id"]) for one in known["layers"] if one["name"] == CUT)
    (cut,) = (line.split() for line in lines if line.split()[:1] == [number])
    assert cut[1:] == [CUT.rpartition(".")[2], "Conv2d", "1x32x8x8", "4,608", "294,912", "24.0", "KiB", "yes"]
    assert any("174,970 parameters" in line for line in lines) and known["parameters"] == 174970


def test_depth_and_input_change_the_plan(capsys: Captured, inputs: Callable[..., Path]) -> None:
    image = next(IMAGES.glob("*.png"))
    folder = inputs(four=(4, 1, 32, 32))
    assert main(["layers", "--depth", "1", "--input", str(folder / "four.npy"), "--json", "-"]) == 0
    assert [layer["shape"] for layer in json.loads(capsys.readouterr().out)["layers"]][-1] == "4x10"
    assert main(["layers", "--depth", "1", "--input", str(image), "--json", "-"]) == 0
    assert [layer["name"] for layer in json.loads(capsys.readouterr().out)["layers"]][-1] == "classifier"


def test_verify_as_json_and_as_text(capsys: Captured) -> None:
    assert main(["verify", "--model", "digits", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is True and "Traceback" not in err
    assert main(["verify", "--depth", "1"]) == 0
    assert capsys.readouterr().out == "digits: of 7 cuts 7 exact: ok\n"


def test_verify_fails_when_a_cut_differs(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_hooks.verification.identical", lambda whole, other: False)
    assert main(["verify", "--depth", "1"]) == 1
    assert "differs" in capsys.readouterr().out


def test_run_prints_predictions_times_and_layers(
    server: FakeServer, images: Path, capsys: Captured, tmp_path: Path
) -> None:
    target = tmp_path / "run.json"
    words = ["--server", server.address, "--split", CUT, "--input", str(images), "--json", str(target), "--layers"]
    assert main(["run", *words]) == 0
    out, _ = capsys.readouterr()
    assert out.count("  ok\n") == 6 and "accuracy 1.0000 (6 of 6" in out
    for row in ("edge compute", "edge encode", "upload", "server queue", "server decode", "server compute", "download"):
        assert row in out
    assert "layers on the edge" in out and "layers on the cloud" in out
    known = json.loads(target.read_text())
    assert known["exit_status"] == 0 and known["answered"] == 6 and known["accuracy"] == 1.0
    assert known["layer_name"] == CUT
    assert known["times_ns"]["end_to_end"] == known["measured_ns"]
    for one in known["inputs"]:
        rows = {name: ns for name, ns in one["times_ns"].items() if name != "end_to_end"}
        assert sum(rows.values()) == one["times_ns"]["end_to_end"] == one["measured_ns"]
        assert one["predictions"][0]["label"] == one["truth"]
        assert one["layers_edge"] and one["layers_cloud"]


def test_json_on_standard_output_is_alone_there(server: FakeServer, images: Path, capsys: Captured) -> None:
    assert main(["run", "--server", server.address, "--split", "input", "--input", str(images), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["answered"] == 6
    assert "where the time went" in err


@pytest.mark.parametrize("split", ["input", "0", "17", CUT, "stage1.0.relu#2", "stage2"])
def test_a_cut_is_an_id_a_name_or_input(server: FakeServer, images: Path, capsys: Captured, split: str) -> None:
    words = ["--server", server.address, "--split", split, "--input", str(images / "*_label*.png"), "--codec", "lz4"]
    assert main(["run", *words, "--in-flight", "1"]) == 0
    assert "accuracy 1.0000" in capsys.readouterr().out


def test_the_server_may_come_from_the_environment(
    server: FakeServer, images: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_SERVER", server.address)
    assert main(["run", "--split", "0", "--input", str(images)]) == 0
    assert "6 of 6" in capsys.readouterr().out


def test_a_failing_input_is_reported_and_the_others_go_on(
    server: FakeServer, images: Path, capsys: Captured, tmp_path: Path
) -> None:
    (images / "0000_broken.png").write_bytes(b"not an image")
    np.save(images / "zz_shape.npy", np.zeros((1, 7, 3), dtype=np.float32))
    spec = load_spec("digits")
    args, _ = spec.preprocess(sorted(images.glob("*_label*.png"))[0])
    np.save(images / "zy_good.npy", args[0].numpy())
    target = tmp_path / "run.json"
    words = ["--server", server.address, "--split", CUT, "--input", str(images), "--json", str(target)]
    assert main(["run", *words]) == 1
    out, err = capsys.readouterr()
    assert "7 of 9 inputs answered" in out and "2 failed" in out
    assert "0000_broken.png: InputMismatch" in err and "zz_shape.npy: " in err and "Traceback" not in err
    known = json.loads(target.read_text())
    assert known["exit_status"] == 1
    assert [one["ok"] for one in known["inputs"]] == [False] + [True] * 7 + [False]


@pytest.fixture
def inputs(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Arrays as files of one folder."""

    def save(**arrays: tuple[int, ...]) -> Path:
        for name, shape in arrays.items():
            np.save(tmp_path / f"{name}.npy", np.ones(shape, dtype=np.float32))
        return tmp_path

    yield save


@contextmanager
def serving(model: str) -> Iterator[list[str]]:
    """A server of a small model; the words to run it."""
    reference = f"{small_models.__name__}:{model}"
    with FakeServer(fake.tails(load_spec(reference).load_model("cpu"))) as other:
        yield ["run", "--server", other.address, "--model", reference]


def test_a_first_input_that_fails_does_not_end_the_run(inputs: Callable[..., Path], capsys: Captured) -> None:
    folder = inputs(a_bad=(1, 4, 16, 16), b=(1, 3, 16, 16), c=(1, 3, 16, 16))
    with serving("Residual") as words:
        assert main([*words, "--split", "body", "--input", str(folder), "--json", "-"]) == 1
        out, err = capsys.readouterr()
        known = json.loads(out)
        assert [one["ok"] for one in known["inputs"]] == [False, True, True]
        assert known["inputs"][0]["error"] == "ModelFailed" and "a_bad.npy: ModelFailed" in err
        # Only the bad one: nothing to check --split on.
        assert main([*words, "--split", "0", "--input", str(folder / "a_bad.npy")]) == 1
        assert "0 of 1 inputs answered" in capsys.readouterr().out


def test_a_name_is_the_same_layer_on_every_path(inputs: Callable[..., Path], capsys: Captured) -> None:
    folder = inputs(one=(1, 4), two=(2, 4))

    def cuts(split: str) -> tuple[list[tuple[int, str]], Any]:
        assert main([*words, "--split", split, "--input", str(folder), "--json", str(folder / "run.json")]) == 0
        known = json.loads((folder / "run.json").read_text())
        return [(one["layer_id"], one["layer_name"]) for one in known["inputs"]], known

    with serving("Longer") as words:
        found, known = cuts("first")
        assert found == [(0, "first"), (1, "first")]
        assert (known["layer_id"], known["layer_name"]) == (None, "first")
        out = capsys.readouterr().out
        assert "cut after layer 0 (first): 1 inputs, after layer 1 (first): 1 inputs;" in out
        rows = [line for line in out.splitlines() if ".npy" in line]
        assert [(row[:3], row.endswith("  cut after layer 1 (first)")) for row in rows] == [
            ("one", False),
            ("two", True),
            ("two", True),
        ]
        found, known = cuts("0")
        assert found == [(0, "first"), (0, "extra")]
        assert (known["layer_id"], known["layer_name"]) == (0, None)


def test_a_layer_that_only_later_inputs_run(inputs: Callable[..., Path], capsys: Captured) -> None:
    folder = inputs(one=(1, 4), two=(2, 4))
    with serving("Longer") as words:
        assert main([*words, "--split", "extra", "--input", str(folder)]) == 1
        out, err = capsys.readouterr()
        assert "cut after layer 0 (extra)" in out and "one.npy: UnknownLayer" in err
        assert main([*words, "--split", "extr", "--input", str(folder)]) == 2
    complaint(capsys)


def test_names_that_cannot_be_shown_end_nothing(server: FakeServer, images: Path, tmp_path: Path) -> None:
    image = sorted(images.iterdir())[0]
    for name in (b"\xff\xfe.png", "é.png".encode(), b"\x1b[2J.png", b"[red]x.png"):
        shutil.copy(image, os.fsencode(images) + b"/" + name)
    target = tmp_path / "run.json"
    words = ["run", "--server", server.address, "--split", "0", "--input", str(images), "--json", str(target)]
    process = spawn(*words, PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "10 of 10 inputs answered" in out and json.loads(target.read_text())["answered"] == 10
    assert "\\udcff\\udcfe.png" in out and "\\xe9.png" in out and "\\x1b[2J.png" in out and "\x1b" not in out


def test_a_bar_takes_any_name(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("inputs", 1) as advance:
        advance("x[/blue].png")
        print("a row")
    assert capsys.readouterr().out == "a row\n"


def test_json_is_alone_whatever_the_model_prints(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["from torch import nn", "print('loaded')", "def build():", "    print('built')", "    return nn.ReLU()"]
    (tmp_path / "noisy_net.py").write_text("\n".join(lines))
    (tmp_path / "noisy.toml").write_text(
        'id = "noisy"\nfactory = "noisy_net:build"\n[[example.args]]\nshape = [1, 4]\n'
    )
    for command in ("layers", "verify"):
        assert main([command, "--model", str(tmp_path / "noisy.toml"), "--json", "-"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["model"] == "noisy" and "built" in err


def test_a_json_file_is_tried_before_the_work(images: Path, tmp_path: Path, capsys: Captured) -> None:
    nowhere = tmp_path / "file"
    nowhere.touch()
    for target in (nowhere / "x.json", tmp_path, tmp_path / "none" / "x.json"):
        assert (
            main(["run", "--server", "127.0.0.1:1", "--split", "0", "--input", str(images), "--json", str(target)]) == 2
        )
        assert f"--json: {target} cannot be written" in complaint(capsys)
    check_json_target(str(tmp_path / "later.json"))
    assert not (tmp_path / "later.json").exists()


def test_json_that_fails_late_costs_only_itself(
    server: FakeServer, images: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.commands.run.check_json_target", lambda target: None)
    words = ["--server", server.address, "--split", "0", "--input", str(images), "--json", str(tmp_path)]
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert "6 of 6 inputs answered" in out and "where the time went" in out and "cannot be written" in err


def test_nan_becomes_null(server: FakeServer, capsys: Captured, tmp_path: Path) -> None:
    args, _ = load_spec("digits").preprocess(next(IMAGES.glob("*.png")))
    np.save(tmp_path / "nan.npy", torch.full_like(args[0], float("nan")).numpy())
    words = ["--server", server.address, "--split", "0", "--input", str(tmp_path / "nan.npy"), "--json", "-"]
    assert main(["run", *words]) == 0
    known = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert known["inputs"][0]["predictions"][0]["score"] is None


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["layers", "--model", "digitz"], ["digitz", "digits"]),
        (["layers", "--model", "no/such.toml"], ["no/such.toml"]),
        (["layers", "--device", "tpu"], ["tpu"]),
        (["layers", "--json", "/no/such/folder/file.json"], ["/no/such/folder"]),
        (["verify", "--input", "no-such.png"], ["no-such.png"]),
        (["run", "--split", "0", "--input", "{images}"], ["ISTHMUS_SERVER"]),
        (["run", "--server", "nowhere", "--split", "0", "--input", "{images}"], ["nowhere", "HOST:PORT"]),
        (["run", "--server", "{server}", "--split", "stage2.0.conv", "--input", "{images}"], ["stage2.0.conv1"]),
        (["run", "--server", "{server}", "--split", "999", "--input", "{images}"], ["999", "0 to"]),
        (["run", "--server", "{server}", "--split", "stage", "--input", "{images}"], ["stage2"]),
        (["run", "--server", "{server}", "--split", "0", "--input", "{images}", "--deadline", "1e12"], ["deadline"]),
        (["run", "--server", "{server}", "--split", "-1", "--input", "{images}"], ["-1"]),
        (["run", "--server", "{server}", "--split", "0", "--input", "{images}/nothing.png"], ["nothing.png"]),
        (["run", "--server", "{server}", "--split", "0", "--input", "{images}/*.jpg"], ["*.jpg"]),
    ],
)
def test_wrong_words_are_named(
    server: FakeServer, images: Path, capsys: Captured, words: list[str], names: list[str]
) -> None:
    filled = [word.format(images=images, server=server.address) for word in words]
    assert main(filled) == 2
    line = complaint(capsys)
    assert all(name in line for name in names)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["run", "--input", "x"],
        ["run", "--split", "0"],
        ["run", "--split", "0", "--input", "x", "--deadline", "0"],
        ["run", "--split", "0", "--input", "x", "--in-flight", "none"],
        ["run", "--split", "0", "--input", "x", "--codec", "zip"],
    ],
)
def test_words_that_make_no_command(words: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("edge-client") and ": error: " in line and line.endswith(" --help)")


def test_no_server_is_said_in_one_line(images: Path, capsys: Captured, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    target = tmp_path / "run.json"
    words = ["--server", address, "--split", "0", "--input", str(images), "--patience", "0.3", "--json", str(target)]
    assert main(["run", *words]) == 3
    assert f"ServerUnavailable: no server at {address}" in complaint(capsys)
    known = json.loads(target.read_text())
    assert known["failed"] == 6 and known["inputs"][0]["error"] == "ServerUnavailable" and known["accuracy"] is None


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (fake.grpc.StatusCode.FAILED_PRECONDITION, "Disagreement"),
        (fake.grpc.StatusCode.NOT_FOUND, "UnknownModel"),
    ],
)
def test_a_server_that_disagrees_is_quoted(images: Path, capsys: Captured, code: Any, name: str) -> None:
    with FakeServer(fake.refuse(code, "weights: client 1, server 3")) as other:
        assert main(["run", "--server", other.address, "--split", "0", "--input", str(images)]) == 3
        line = complaint(capsys)
        assert name in line and other.address in line and "weights: client 1, server 3" in line


def test_a_server_lost_on_the_way_ends_with_what_was_answered(images: Path, capsys: Captured, tmp_path: Path) -> None:
    answering = fake.tails(load_spec("digits").load_model("cpu"))

    def two(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[Any]:
        seen = 0
        for frame in answering(server, frames, context):
            yield frame
            seen += frame.WhichOneof("frame") == "chunk"
            if seen == 2:
                context.abort(fake.grpc.StatusCode.NOT_FOUND, "the model was taken away")

    # The stream may end before the third request is on it, which then goes out on another.
    gone = fake.refuse(fake.grpc.StatusCode.NOT_FOUND, "the model was taken away")
    target = tmp_path / "run.json"
    with FakeServer(two, gone) as other:
        words = ["--server", other.address, "--split", "0", "--input", str(images), "--json", str(target)]
        assert main(["run", *words, "--in-flight", "1"]) == 3
    out, err = capsys.readouterr()
    rows = [line.split()[0] for line in out.splitlines() if "  truth " in line]
    assert 0 < len(rows) < 6
    assert f"{len(rows)} of 6 inputs answered" in out and f", {6 - len(rows)} failed" in out
    assert err.count("the model was taken away") == 1
    known = json.loads(target.read_text())
    assert [Path(one["file"]).name for one in known["inputs"] if one["ok"]] == rows
    failed = [one for one in known["inputs"] if not one["ok"]]
    assert (known["answered"], known["failed"]) == (len(rows), len(failed)) == (len(rows), 6 - len(rows))
    assert all(one["error"] == "UnknownModel" for one in failed)


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(SpecError):
        main(["layers", "--device", "tpu", "--debug"])


def test_tables_are_aligned_and_sizes_readable() -> None:
    text = report.table(["a", "bb"], [["1", "x"], ["22", "yyy"]], right=(0,))
    assert text.splitlines() == [" a  bb", "--  ---", " 1  x", "22  yyy"]
    assert [size(n) for n in (None, 0, 1023, 2048, 3 << 20, 5 << 30)] == [
        "-",
        "0 B",
        "1023 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]


def spawn(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "edge_client", *words],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_ends_promptly_and_cleanly(images: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with FakeServer(fake.deaf) as other:
        words = ["--server", other.address, "--split", "0", "--input", str(images), "--json", str(file)]
        process = Started("edge_client", ["run", *words])
        eventually(lambda: other.seen.requests)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)  # half of what the request has
    assert process.returncode == 130
    assert err == "edge-client: interrupted\n"
    known = json.loads(file.read_text())
    assert known["interrupted"] and known["answered"] == 0 and known["exit_status"] == 130


def test_an_interrupted_run_tells_what_was_answered(
    server: FakeServer, images: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = EdgeClient.infer_many

    def until_the_third(client: EdgeClient, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for number, answer in enumerate(whole(client, *args, **kwargs)):
            if number == 2:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(EdgeClient, "infer_many", until_the_third)
    file, words = tmp_path / "run.json", ["--server", server.address, "--split", CUT, "--input", str(images)]
    assert main(["run", *words, "--json", str(file), "--no-progress"]) == 130
    captured = capsys.readouterr()
    assert "2 of 2 inputs answered" in captured.out and "then interrupted" in captured.out
    assert "edge-client: interrupted" in captured.err
    known = json.loads(file.read_text())
    assert known["interrupted"] and len(known["inputs"]) == known["answered"] == 2 and known["exit_status"] == 130


SWALLOWS = """
import time
print('loading', flush=True)
try:
    time.sleep(60)
except BaseException:
    pass
time.sleep(60)
"""


def test_ctrl_c_while_torch_is_loaded_is_not_swallowed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SWALLOWS)
    process = spawn("run", "--server", "127.0.0.1:1", "--split", "0", "--input", "x", PYTHONPATH=str(tmp_path))
    assert process.stdout is not None and process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "edge-client: interrupted\n")


def test_a_swallowed_ctrl_c_comes_again() -> None:
    lines = [
        "import signal, time",
        "from edge_client import interrupts",
        "interrupts.AGAIN_SECONDS = 0.1",
        "with interrupts.ends_at_once():",
        "    interrupts.insists()",
        "    try:",
        "        signal.raise_signal(signal.SIGINT)",
        "    except BaseException:",
        "        print('swallowed', flush=True)",
        "    try:",
        "        time.sleep(60)",
        "    except KeyboardInterrupt:",
        "        interrupts.acknowledge()",
        "    time.sleep(0.3)",
        "    print('heard')",
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "swallowed\nheard\n"), done.stderr


def test_progress_is_one_printable_line(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes next may be a server's word."""
    monkeypatch.setattr("edge_client.screen.PLAIN_EVERY_SECONDS", 0.0)
    with progress("server's profile", None) as advance:
        advance("\x1b[31mred\nand more")
    assert capsys.readouterr().err == "server's profile: 1, \\x1b[31mred and more\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ServerUnavailable("gone"), 3),
        (Disagreement("other weights"), 3),
        (SpecError("no"), 2),
    ],
)
def test_the_exit_status_of_every_command_tells_a_server_from_a_wrong_word(
    error: Exception, status: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(options: object) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "plan", fails)
    assert main(["plan"]) == status
    assert capsys.readouterr().err == f"edge-client: error: {error}\n"


def test_with_log_format_json_every_line_on_standard_error_is_an_object(capsys: Captured) -> None:
    words = ["run", "--server", "127.0.0.1:1", "--split", CUT, "--input", str(next(IMAGES.glob("*.png")))]
    assert main([*words, "--patience", "0.1", "--log-level", "info", "--log-format", "json", "--no-progress"]) == 3
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines].count("error") == 1
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


def test_a_folder_per_class_is_labels(capsys: Captured, tmp_path: Path) -> None:
    for label, name in (("1", "0011_label1.png"), ("7", "0053_label8.png")):
        (tmp_path / label).mkdir()
        shutil.copy(IMAGES / name, tmp_path / label / "image.png")
    assert main(["run", "--split", "edge-only", "--input", str(tmp_path), "--no-progress"]) == 0
    out = capsys.readouterr().out
    assert "truth 1  ok" in out and "truth 7  WRONG" in out and "accuracy 0.5000 (1 of 2" in out
