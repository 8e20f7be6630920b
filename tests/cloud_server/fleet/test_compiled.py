"""A server that compiles tails: answers say so, and are the model's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from cloud_server.config import read_config
from cloud_server.fleet import ThisProcess
from edge_client import EdgeClient
from shared_hooks.compiling import CompiledTails
from shared_hooks.errors import SpecError
from shared_hooks.models import load_spec
from tests.cloud_server.fleet.served import Deep, fleet_of
from tests.waiting import eventually

DEEP = f'[models.deep]\nfactory = "{Deep.__module__}:Deep"\nexample = {{args = [{{shape = [2, 8]}}]}}\n'


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's interpreter in place of the compiler, which takes a minute."""
    made = partial(CompiledTails, backend="aot_eager", wins=lambda *_: True)
    monkeypatch.setattr("cloud_server.models.served_model.CompiledTails", made)


def test_a_tail_is_compiled_under_requests(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(DEEP + 'compile = true\nwarm_up = {cuts = ["first"], batch_sizes = [2, 3]}\n')
    spec, made = load_spec(f"deep={Deep.__module__}:Deep"), load_spec(f"deep={Deep.__module__}:Deep").load_model()
    with (
        fleet_of(file) as (fleet, server),
        EdgeClient(f"127.0.0.1:{server.port}", spec, "first", metrics=False, exact=False) as client,
    ):
        wanted = torch.no_grad()(made)

        def asked(rows: int) -> bool:
            answer = client.infer(x := torch.randn(rows, 8))
            assert torch.equal(answer.output, wanted(x))
            return answer.compiled

        eventually(lambda: asked(2) and asked(3))
        assert fleet["deep"].compiled == ["used", "used"]
        assert not asked(4), "nobody compiles but the operator"
        assert not client.infer(torch.randn(2, 8), split="input").compiled
        with EdgeClient(f"127.0.0.1:{server.port}", spec, "first", metrics=False) as exact:
            assert not exact.infer(torch.randn(2, 8)).compiled, "who does not allow it gets the model's own bits"
        with torch.no_grad():  # as code of the model's might
            fleet["deep"]._engine()._wrapped.model.first.weight.mul_(2)  # type: ignore[attr-defined]
        eventually(lambda: not asked(2))
        assert not asked(2) and fleet["deep"].compiled == ["refused", "refused"]


@pytest.mark.parametrize(("value", "says"), [('"fast"', "expected true"), ("1", "expected true")])
def test_contradictory_settings_are_refused(tmp_path: Path, value: str, says: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(DEEP + f"compile = {value}\n")
    with pytest.raises(SpecError, match=says):
        read_config(file)


def test_without_an_example_there_is_nothing_to_compile_on(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f'[models.deep]\nfactory = "{Deep.__module__}:Deep"\ncompile = "rounding"\n')
    config = read_config(file)
    with pytest.raises(SpecError, match="compile: its spec has no example"):
        ThisProcess(config).load(config.models)
