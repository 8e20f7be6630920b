"""Names of version 0.1 go on for one version, with a warning that says what they are called now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cloud_server.config import read_config
from edge_client import ConnectionOptions, EdgeClient, KeepAlive, ModelChoice
from edge_client.__main__ import main
from shared_hooks import WrappedModel, observers


def test_a_limit_by_its_old_name(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("[limits]\nmax_recipe_bytes = 4096\n")
    with pytest.warns(FutureWarning, match=r"limits.max_recipe_bytes is called max_cuts_bytes now"):
        assert read_config(file).limits.max_cuts_bytes == 4096
    file.write_text("[limits]\nmax_recipe_bytes = 4096\nmax_cuts_bytes = 8192\n")
    with pytest.warns(FutureWarning):
        assert read_config(file).limits.max_cuts_bytes == 8192


def test_the_recipe_of_an_early_output() -> None:
    with WrappedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))) as wrapped:
        early = wrapped.head("0", torch.randn(1, 4))
        with pytest.warns(DeprecationWarning, match="EarlyOutput.crossing"):
            assert early.recipe is early.crossing


def residual() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).eval()


EXAMPLE = (torch.zeros(1, 4),), {}
OF_MODEL: list[tuple[str, Any]] = [("device", "cpu"), ("threads", torch.get_num_threads()), ("depth", 1)]
OF_CONNECTION: list[tuple[str, Any]] = [
    ("patience", 3.0),
    ("max_in_flight", 2),
    ("chunk_bytes", 1 << 18),
    ("max_answer_bytes", 10),
    ("keep_alive", KeepAlive(every=1.0)),
]


@pytest.mark.parametrize(("name", "value"), [*OF_MODEL, ("model_id", "other"), ("example", EXAMPLE)])
def test_what_a_client_was_told_of_its_model(name: str, value: Any) -> None:
    choice = ModelChoice(residual(), model_id="m")
    with pytest.warns(DeprecationWarning, match=rf"EdgeClient\(\.\.\., {name}=\.\.\.\) is .*ModelChoice"):
        client = EdgeClient(None, choice, "edge-only", **{name: value})
    assert getattr(client.choice, name) == value
    client.close()


@pytest.mark.parametrize(("name", "value"), OF_CONNECTION)
def test_what_a_client_was_told_of_its_connection(name: str, value: Any) -> None:
    choice = ModelChoice(residual(), model_id="m")
    with pytest.warns(DeprecationWarning, match=rf"EdgeClient\(\.\.\., {name}=\.\.\.\) is .*ConnectionOptions"):
        client = EdgeClient(None, choice, "edge-only", **{name: value})
    assert client.connection == ConnectionOptions(**{name: value})
    client.close()


def test_a_client_by_all_its_old_names_works_as_before() -> None:
    old: dict[str, Any] = dict(OF_MODEL + OF_CONNECTION)
    with pytest.warns(DeprecationWarning) as told:
        client = EdgeClient(None, residual(), "edge-only", model_id="m", example=EXAMPLE, **old)
    assert len(told) == len(old) + 2 and {warning.filename for warning in told} == {__file__}
    with client:
        assert client.infer(torch.zeros(1, 4)).split == "edge-only"
    assert client.max_in_flight == 2 and client.device == torch.device("cpu")


def test_a_name_that_there_never_was() -> None:
    with pytest.raises(TypeError, match="an unexpected keyword argument 'modelid'"):
        EdgeClient(None, residual(), "edge-only", modelid="m")  # type: ignore[call-arg]


def test_observers_by_their_old_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--split", "edge-only", "--input", "nothing.png", "--hooks", "debug"]) == 2
    assert "warning: --hooks is called --observe now" in capsys.readouterr().err
    choice = ModelChoice(residual(), model_id="m")
    with pytest.warns(DeprecationWarning, match=r"hooks=\.\.\.\) is EdgeClient\(\.\.\., observers="):
        client = EdgeClient(None, choice, "edge-only", hooks=["debug"])
    with pytest.warns(DeprecationWarning, match="EdgeClient.hooks is called observers now"):
        assert client.hooks == client.observers == ("debug",)
    with pytest.warns(DeprecationWarning, match="EdgeClient.hooks is called observers now"):
        client.hooks = ()
    assert client.observers == ()
    client.close()


def test_a_call_that_observers_look_at() -> None:
    with pytest.warns(DeprecationWarning, match="observers.Call is called ObservedCall now"):
        assert observers.Call is observers.ObservedCall
