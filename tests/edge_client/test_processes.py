"""The real server in a process of its own: exact answers, and nothing lost when it is killed, restarted or drained."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from edge_client import Answer, EdgeClient, State
from edge_client.model_choice import ModelChoice
from edge_client.transport.options import ConnectionOptions
from shared_hooks.errors import Disagreement, ModelFailed, ServerUnavailable, TooLarge, UnknownModel
from shared_hooks.models import load_spec
from tests.edge_client.small_models import Moody
from tests.ports import free_port
from tests.starts import Started
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
SMALL = "tests.edge_client.small_models"
CUT = "stage2.0.conv1"


class CloudProcess:
    """``python -m cloud_server`` with one thread, as the tests themselves have."""

    def __init__(self, *words: str, port: int = 0) -> None:
        self._process = Started(
            "cloud_server",
            ["--listen", f"127.0.0.1:{port}", "--threads", "1", *words],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("listening on "), "the server did not start"
        self.address = line.split()[-1]
        self.port = int(self.address.rpartition(":")[2])

    @property
    def process_id(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        return self._process.wait(seconds)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def cloud(*words: str, port: int = 0) -> Iterator[CloudProcess]:
    process = CloudProcess(*words, port=port)
    try:
        yield process
    finally:
        process.end()


@pytest.fixture(scope="module")
def server() -> Iterator[CloudProcess]:
    with cloud("--model", "digits", "--model", f"moody={SMALL}:Moody", "--model", f"wide={SMALL}:Wide") as process:
        yield process


@pytest.fixture(scope="module")
def whole() -> torch.nn.Module:
    return load_spec("digits").load_model("cpu")


def image(seed: int) -> torch.Tensor:
    return torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(seed))


def test_every_cut_of_the_shipped_model_is_exact(server: CloudProcess, whole: torch.nn.Module) -> None:
    with torch.no_grad():
        expected = whole(image(0))
    with EdgeClient(server.address, "digits") as client:
        layers = [layer.layer_id for layer in client.wrapped.layers if layer.can_split]
        for cut in ["input", *layers]:
            answer = client.infer(image(0), split=cut)
            assert torch.equal(answer.output, expected), cut
            assert answer.times.end_to_end == answer.measured_ns
            assert all(value >= 0 for _, value in answer.times.rows())
            assert len(answer.layers_edge) + len(answer.layers_cloud) == len(client.wrapped.layers)


def test_several_clients_at_once(server: CloudProcess, whole: torch.nn.Module) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        with EdgeClient(server.address, "digits", CUT) as client:
            for seed, answer in enumerate(client.infer_many(image(seed) for seed in range(10))):
                with torch.no_grad():
                    if not torch.equal(answer.output, whole(image(seed))):
                        wrong.append(f"client {number}, input {seed}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_killed_server_loses_nothing(whole: torch.nn.Module) -> None:
    """Killed with requests on it, twice, and started again on its port: every input is answered, in order, exactly."""
    processes = [CloudProcess("--model", "digits", port=free_port())]
    address, port = processes[0].address, processes[0].port
    restarts: list[threading.Thread] = []
    try:
        with EdgeClient(address, "digits", CUT, deadline=120, connection=ConnectionOptions(patience=60)) as client:
            for seed, answer in enumerate(client.infer_many(image(seed) for seed in range(40))):
                with torch.no_grad():
                    assert torch.equal(answer.output, whole(image(seed)))
                assert answer.times.end_to_end == answer.measured_ns
                if seed in (10, 25):
                    for restart in restarts:  # who answers may not be in the list yet
                        restart.join()
                    processes[-1].send(signal.SIGKILL)
                    processes[-1].wait()
                    restart = threading.Thread(
                        target=lambda: processes.append(CloudProcess("--model", "digits", port=port))
                    )
                    restart.start()
                    restarts.append(restart)
            assert seed == 39 and client.counters.streams == 3
    finally:
        for restart in restarts:
            restart.join()
        for process in processes:
            process.end()


def test_a_drained_server_answers_what_it_has_and_its_successor_the_rest(whole: torch.nn.Module) -> None:
    first = CloudProcess("--model", "digits", port=free_port())
    second: CloudProcess | None = None
    try:
        with EdgeClient(
            first.address, "digits", CUT, deadline=120, connection=ConnectionOptions(patience=60)
        ) as client:
            answers: list[Answer] = []
            for answer in client.infer_many(image(seed) for seed in range(40)):
                answers.append(answer)
                if len(answers) == 10:
                    first.send(signal.SIGTERM)
                    assert first.wait() == 0
                    second = CloudProcess("--model", "digits", port=first.port)
        with torch.no_grad():
            assert all(torch.equal(one.output, whole(image(seed))) for seed, one in enumerate(answers))
        assert len(answers) == 40
    finally:
        first.end()
        if second is not None:
            second.end()


def test_a_stopped_server_is_noticed_within_seconds() -> None:
    """SIGSTOP is what a lost machine looks like: the connection stands, nothing moves."""
    from edge_client import KeepAlive

    with cloud("--model", "digits") as process:
        keep_alive = KeepAlive(every=1.0, timeout=1.0)
        with EdgeClient(
            process.address, "digits", CUT, connection=ConnectionOptions(keep_alive=keep_alive, patience=60)
        ) as client:
            client.infer(image(0))
            process.send(signal.SIGSTOP)
            # without the options of `KeepAlive` it takes a minute
            eventually(lambda: client.state is not State.READY, "nothing was noticed", 30)
            process.send(signal.SIGCONT)
            assert client.infer(image(0)).output.shape == (1, 10)


def test_a_model_that_raises_on_the_server_is_quoted(server: CloudProcess) -> None:
    with EdgeClient(server.address, f"moody={SMALL}:Moody", "first") as client:
        assert torch.equal(client.infer(torch.ones(3)).output, torch.full((3,), 2.0))
        with pytest.raises(ModelFailed, match="that is too much"):
            client.infer(torch.full((3,), 200.0))
        assert torch.equal(client.infer(torch.ones(3)).output, torch.full((3,), 2.0))


def test_a_client_with_something_else_learns_what(server: CloudProcess) -> None:
    other = load_spec("digits").load_model("cpu")
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    with pytest.raises(Disagreement, match="weights"):
        EdgeClient(server.address, ModelChoice(other, model_id="digits")).open()
    with pytest.raises(Disagreement, match="class: client Moody, server DigitsNet"):
        EdgeClient(server.address, ModelChoice(Moody(), model_id="digits")).open()
    with pytest.raises(UnknownModel, match="nothing"):
        EdgeClient(server.address, ModelChoice(Moody(), model_id="nothing")).open()


def test_a_number_that_differs_is_named_with_its_module(server: CloudProcess) -> None:
    other = load_spec("digits").load_model("cpu")
    norm = next(name for name, module in other.named_modules() if isinstance(module, nn.BatchNorm2d))
    other.get_submodule(norm).eps = 1e-3
    with pytest.raises(Disagreement, match=f"{norm}: eps: client 0.001, server 1e-05"):
        EdgeClient(server.address, ModelChoice(other, model_id="digits")).open()


class Newer(nn.BatchNorm2d):
    """As a later release of torch might have it: with one more argument."""

    def __init__(self, number: int, invented: int = 3) -> None:
        super().__init__(number)
        self.invented = invented


Newer.__name__ = Newer.__qualname__ = nn.BatchNorm2d.__name__
Newer.__module__ = nn.BatchNorm2d.__module__


def test_state_of_another_torch_release_is_a_note(server: CloudProcess, caplog: pytest.LogCaptureFixture) -> None:
    other = load_spec("digits").load_model("cpu")
    norms = [module for module in other.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.__class__, norm.invented = Newer, 3
    with (
        caplog.at_level("INFO", "edge_client"),
        EdgeClient(server.address, ModelChoice(other, model_id="digits"), CUT) as client,
        EdgeClient(server.address, "digits", CUT) as plain,
    ):
        assert torch.equal(client.infer(image(0)).output, plain.infer(image(0)).output)
    assert "invented: client 3, server has none" in caplog.text
    for norm in norms:
        norm.__class__ = nn.BatchNorm2d  # whose own code keeps no such thing: it was set by somebody else
    with pytest.raises(Disagreement, match="invented: client 3, server has none"):
        EdgeClient(server.address, ModelChoice(other, model_id="digits")).open()


def test_a_server_that_is_gone_is_named() -> None:
    # The patience is also what the first connection has, on a busy machine.
    with (
        cloud("--model", "digits") as process,
        EdgeClient(process.address, "digits", CUT, connection=ConnectionOptions(patience=2.5)) as client,
    ):
        client.infer(image(0))
        process.end()
        with pytest.raises(ServerUnavailable, match=process.address):
            client.infer(image(0))


def test_the_port_of_something_else_is_not_trusted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        client = EdgeClient(address, "digits", connection=ConnectionOptions(patience=1.0))
        with pytest.raises(ServerUnavailable, match=address):
            client.open()
        client.close()


def test_large_frontiers_arrive_whole(server: CloudProcess) -> None:
    values = torch.randn(1, 4)
    with EdgeClient(server.address, f"wide={SMALL}:Wide", "spread") as client:
        with torch.no_grad():
            expected = client.wrapped.model(values)
        answer = client.infer(values)
        assert torch.equal(answer.output, expected) and answer.bytes_up > 16 << 20
        assert torch.equal(client.infer(values, split="input").output, expected)
        with pytest.raises(TooLarge):
            client.infer(values.expand(20, 4).contiguous())
