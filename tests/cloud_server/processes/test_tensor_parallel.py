"""A model's weights over two processes (gloo): generations are token for token those of the whole model."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cloud_server.config import ModelEntry, ServerConfig
from edge_client import ConnectionOptions, EdgeClient
from edge_client.generation import SplitGenerator
from edge_client.model_choice import ModelChoice
from shared_hooks.errors import CutRefused, SessionLost, SpecError
from shared_hooks.models import load_spec
from tests.cloud_server.real import Process
from tests.shared_hooks.generation.small import cut_of, make, prompt
from tests.starts import run
from tests.waiting import PATIENCE, eventually

pytest.importorskip("accelerate")
NAMES = ("llama", "experts")
TOKENS = 24


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("divided"), {}
    for name in (*NAMES, "gpt2"):
        make(name).save_pretrained(folder / name)  # type: ignore[operator]
        found[name] = folder / f"{name}.toml"
        found[name].write_text(
            f'id = "{name}"\nfactory = "transformers:AutoModelForCausalLM.from_pretrained"\n'
            f'[factory_kwargs]\npretrained_model_name_or_path = "{folder / name}"\n'
        )
    return found


@pytest.fixture(scope="module")
def server(specs: dict[str, Path]) -> Iterator[Process]:
    words = [word for name in NAMES for word in ("--model", str(specs[name]))]
    process = Process(*words, "--tensor-parallel", "2", "--device", "cpu")
    try:
        yield process
    finally:
        process.close()


def client(server: Process, spec: Path) -> EdgeClient:
    options = ConnectionOptions(patience=PATIENCE)
    return EdgeClient(
        f"127.0.0.1:{server.port}", ModelChoice(str(spec), device="cpu", threads=1), deadline=600.0, connection=options
    )


def generate(model: Any, **more: Any) -> torch.Tensor:
    asked = {**prompt(length=9), "max_new_tokens": TOKENS, "do_sample": False, **more}
    found: torch.Tensor = model.generate(**asked)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_whole_model(server: Process, specs: dict[str, Path], name: str) -> None:
    with client(server, specs[name]) as edge:
        whole: Any = edge.wrapped.model
        plain, beams = generate(whole), generate(whole, num_beams=3)
        for cut in ("model.layers.0", cut_of(name), "model.layers.3"):
            with SplitGenerator(edge, cut) as split:
                assert torch.equal(generate(split.model), plain), cut
                assert torch.equal(generate(split.model, num_beams=3), beams), cut


def test_sessions_take_turns(server: Process, specs: dict[str, Path]) -> None:
    with client(server, specs["llama"]) as one, client(server, specs["experts"]) as other:
        plain = [generate(edge.wrapped.model) for edge in (one, other)]
        with SplitGenerator(one, "model.layers.1") as first, SplitGenerator(other, "model.layers.1") as second:

            def between(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
                if ids.shape[1] == 12:
                    assert torch.equal(generate(second.model), plain[1])
                return torch.zeros(len(ids), dtype=torch.bool)

            assert torch.equal(generate(first.model, stopping_criteria=[between]), plain[0])


def test_refusals(server: Process, specs: dict[str, Path]) -> None:
    with client(server, specs["llama"]) as edge:
        for cut in ("model.layers.1.mlp", "model.layers.1.self_attn.q_proj", "model.norm"):
            with SplitGenerator(edge, cut) as split, pytest.raises(CutRefused, match="cut after whole blocks"):
                generate(split.model)
        with pytest.raises(CutRefused, match="divided among 2 processes.*continues generations"):
            edge.infer(prompt()["input_ids"], split="model.layers.1")
        with SplitGenerator(edge, "model.layers.1") as split:  # and it continues
            assert torch.equal(generate(split.model), generate(edge.wrapped.model))


def test_a_process_that_ends_takes_the_others_with_it_and_new_ones_serve(
    server: Process, specs: dict[str, Path]
) -> None:
    with client(server, specs["llama"]) as edge:
        plain = generate(edge.wrapped.model)

        def killed(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            if ids.shape[1] == 12:
                ranks = follower(server)
                ranks.send_signal(signal.SIGKILL)
                ranks.wait(PATIENCE)
            return torch.zeros(len(ids), dtype=torch.bool)

        with SplitGenerator(edge, "model.layers.1") as split:
            try:
                assert torch.equal(generate(split.model, stopping_criteria=[killed]), plain)
            except SessionLost:
                pass
        eventually(lambda: follower(server) is not None)
        with SplitGenerator(edge, "model.layers.1") as split:
            assert torch.equal(generate(split.model), plain)


def follower(server: Process) -> psutil.Process:
    """The process that a worker has started for the other half of the weights."""
    (worker,) = psutil.Process(server.process.pid).children()
    (found,) = [one for one in worker.children() if "spawn_main" in " ".join(one.cmdline())]
    return found


def test_models_that_nobody_divides(specs: dict[str, Path]) -> None:
    words = ["--model", str(specs["gpt2"]), "--tensor-parallel", "2", "--device", "cpu", "--listen", "127.0.0.1:0"]
    ended = run([sys.executable, "-m", "cloud_server", *words], timeout=PATIENCE)
    assert ended.returncode == 2 and "tp_plan" in ended.stderr.splitlines()[-1]
    with pytest.raises(SpecError, match="factory is from_pretrained"):
        load_spec("digits").load_shard(2)
    entry = ModelEntry(load_spec(str(specs["llama"])), only=("model.layers.1",))
    with pytest.raises(SpecError, match="llama: only, parts, tails, compile"):
        ServerConfig(models=(entry,), tensor_parallel=2)
    with pytest.raises(SpecError, match="device: one kind"):
        ServerConfig(device="cuda:0,cuda:1", tensor_parallel=2)
    with pytest.raises(SpecError, match="--in-process"):
        ServerConfig(worker_processes=False, tensor_parallel=2)
    with pytest.raises(SpecError, match="tensor_parallel: expected at least 1"):
        ServerConfig(tensor_parallel=0)
