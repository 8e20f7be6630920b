"""The ``cloud-server`` command as a process: what it prints, serves, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch

from cloud_server.__main__ import main as cloud_main
from cloud_server.cli import main
from shared_hooks import WrappedModel
from shared_hooks.models import load_spec
from tests.cloud_server.fakes import GrpcClient
from tests.cloud_server.real import Process, Residual, ask, greet, value
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
RESIDUAL = (f"--model=residual={Residual.__module__}:Residual", "--example=2,8")

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Process] = []

    def start(*arguments: str, held: Path | None = None) -> Process:
        started.append(Process(*arguments, cwd=ROOT, held=held))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def edge() -> Iterator[WrappedModel]:
    with WrappedModel(Residual().eval()) as wrapped:
        yield wrapped


def test_serves_digits_with_nothing_given(start: Start) -> None:
    process, spec = start(), load_spec("digits")
    args, kwargs = spec.example()  # type: ignore[misc]
    with WrappedModel(spec.load_model()) as edge, grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        client = GrpcClient(channel, greet(edge, "digits", edge.plan(*args, **kwargs).digest))
        ask(client, 1, edge.forward(*args, end=20, **kwargs))
        assert torch.equal(value(client, 1), edge.forward(*args, **kwargs))
    process.signal(signal.SIGTERM)
    assert process.wait() == 0 and "drained" in process.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(start: Start, edge: WrappedModel, number: int, tmp_path: Path) -> None:
    process = start(*RESIDUAL, held=tmp_path)
    with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        client = GrpcClient(channel, greet(edge, "residual"))
        slow = torch.full((2, 8), 14.0)
        early = edge.forward(slow, end="second")
        ask(client, 1, early)
        client.other("welcome")
        ask(client, 2, early)  # waits in the queue
        ask(client, 9, early, payload_bytes=1)  # refused when it comes, and those before it have come, too
        assert client.answer(9).failed
        eventually((tmp_path / "entered").exists)
        process.signal(number)
        client.other("draining")
        ask(client, 3, early)
        failed = client.answer(3).failed
        assert failed is not None and failed.error == "ServerUnavailable" and failed.retry
        late = GrpcClient(channel, greet(edge, "residual", client_id="late"))
        assert late.refusal()[0] == "UNAVAILABLE"
        (tmp_path / "opened").touch()
        expected = edge.forward(slow)["logits"]
        assert torch.equal(value(client, 1)["logits"], expected) and torch.equal(value(client, 2)["logits"], expected)
        assert client.refusal()[0] == "UNAVAILABLE"
    assert process.wait() == 0, process.log


@pytest.mark.parametrize("how", ["second signal", "time limit"])
def test_the_end_does_not_wait_forever(start: Start, edge: WrappedModel, how: str, tmp_path: Path) -> None:
    process = start(*RESIDUAL, *(["--drain-seconds", "0.3"] if how == "time limit" else []), held=tmp_path)
    with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        client = GrpcClient(channel, greet(edge, "residual"))
        early = edge.forward(torch.full((2, 8), 14.0), end="second")
        for id in range(1, 20):
            ask(client, id, early)
        eventually((tmp_path / "entered").exists)  # and never opened
        process.signal(signal.SIGTERM)
        if how == "second signal":
            client.other("draining")  # two signals at once would be one
            process.signal(signal.SIGTERM)
        assert process.wait() == 3, process.log
        client.ended()


def test_configuration_file(start: Start, edge: WrappedModel, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        f"""
        device = "cpu"
        workers = 2
        [models]
        digits = "digits"
        [models.mine]
        factory = "{Residual.__module__}:Residual"
        example.args = [{{shape = [2, 8]}}]
        [limits]
        max_in_flight = 3
        """
    )
    process = start(str(file), *RESIDUAL)
    with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        for name in ("residual", "mine"):
            with WrappedModel(Residual().eval()) as edge:
                client = GrpcClient(channel, greet(edge, name, edge.plan(torch.zeros(2, 8)).digest, name))
                assert client.other("welcome").welcome.max_in_flight == 3
                ask(client, 1, edge.forward(torch.ones(2, 8), end=1))
                value(client, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "nonsense"], 'no model "nonsense"'),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--device", "abacus"], "abacus"),
        (["--threads", "0"], "threads"),
        (["--weights", "missing.safetensors"], "missing.safetensors"),
        (["--weights", "other=missing.safetensors"], 'no model "other"'),
        (["--model=a=m:f", "--model=b=m:f", "--weights", "x.safetensors"], "say NAME=x.safetensors"),
        (["--model", "a=no_such_module:f"], "no_such_module"),
        (["no-such-file.toml"], "no-such-file.toml"),
        (["--memory-budget=100"], 'weights of "digits" take'),
    ],
)
def test_wrong_command_lines(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--listen=127.0.0.1:0", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud_server.fleet.hosts.ServedModel", None)  # noticed before
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([f"--listen=127.0.0.1:{port}"]) == 2
        assert f"127.0.0.1:{port} is in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listen", "says"),
    [
        ("192.0.2.1:50051", "is no address of this machine"),
        ("no.such.host.invalid:50051", "no host is called no.such.host.invalid"),
    ],
)
def test_a_wrong_host_is_reported_before_models_are_loaded(
    listen: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_server.fleet.hosts.ServedModel", None)  # not loaded
    assert main(["--listen", listen, "--insecure"]) == 2
    assert says in capsys.readouterr().err


def test_an_example_that_the_model_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--listen=127.0.0.1:0", "--example", "1,3"]) == 1
    assert "the model fails on its example" in capsys.readouterr().err


@pytest.mark.parametrize(
    "start", [["-m", "cloud_server"], ["-c", "from cloud_server.__main__ import main; exit(main())"]]
)
def test_ctrl_c_while_torch_is_loaded(tmp_path: Path, start: list[str]) -> None:
    # As libraries do now and then: whatever is raised meanwhile is dropped, and the start continues.
    swallows = "try: time.sleep(60)\nexcept BaseException: time.sleep(60)\n"
    (tmp_path / "torch.py").write_text(f"import time\nprint('loading', flush=True)\n{swallows}")
    process = subprocess.Popen(
        [sys.executable, *start],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "cloud-server: interrupted\n")


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "cloud_server.__main__.find_spec", lambda name: None if name == "prometheus_client" else object()
    )
    assert cloud_main(["--model", "digits"]) == 2
    assert capsys.readouterr().err == 'cloud-server: prometheus-client missing: pip install "isthmus[cloud]"\n'
