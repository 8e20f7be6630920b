"""The server's TOML file and command line: what they make, and the file and key in every complaint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cloud_server.arguments import DEFAULT_LISTEN, parser
from cloud_server.config import ServerConfig, configure, read_config
from cloud_server.limits import MIB, Limits
from shared_hooks.errors import SpecError
from tests.cloud_server.real import Residual

FACTORY = f"{Residual.__module__}:Residual"


def given(*arguments: str) -> ServerConfig:
    return configure(parser().parse_args(arguments))


def write(folder: Path, text: str) -> Path:
    file = folder / "server.toml"
    file.write_text(text)
    return file


def test_nothing_given_serves_digits_to_this_machine_only() -> None:
    config = given()
    assert [entry.spec.model_id for entry in config.models] == ["digits"]
    assert config.listen == DEFAULT_LISTEN == "127.0.0.1:50051" and config.limits == Limits()


def test_file(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(f'id = "inside"\nfactory = "{FACTORY}"\n')
    file = write(
        tmp_path,
        f"""
        listen = "0.0.0.0:7"
        threads = 3
        [models]
        digits = "digits"
        renamed = "spec.toml"
        code = "{FACTORY}"
        [models.table]
        factory = "{FACTORY}"
        [limits]
        max_request_bytes = 1048576
        drain_seconds = 3
        """,
    )
    config = read_config(file)
    assert [entry.spec.model_id for entry in config.models] == ["digits", "renamed", "code", "table"]
    assert (config.listen, config.threads) == ("0.0.0.0:7", 3)
    assert config.limits == Limits(max_request_bytes=MIB, drain_seconds=3.0)


def test_a_reference_with_more_said_of_it(tmp_path: Path) -> None:
    file = write(tmp_path, '[models.mine]\nmodel = "digits"\ntails = ["stem.2"]\ndevice = "cpu"\n')
    (entry,) = read_config(file).models
    assert entry.spec.model_id == "mine" and entry.tails == ("stem.2",) and entry.device == "cpu"


def test_command_line_goes_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'listen = "127.0.0.7:7"\ndevice = "cuda"\n[models]\ndigits = "digits"\n')
    config = given(str(file), "--device", "cpu", "--model", f"mine={FACTORY}", "--drain-seconds", "2")
    assert [entry.spec.model_id for entry in config.models] == ["digits", "mine"]
    assert (config.listen, config.device, config.limits.drain_seconds) == ("127.0.0.7:7", "cpu", 2.0)


def test_weights_and_example_of_a_factory(tmp_path: Path) -> None:
    (entry,) = given(f"--model=mine={FACTORY}", "--weights=mine=w.safetensors", "--example=2,8:bfloat16").models
    assert entry.spec.weights == (Path("w.safetensors"),)
    args, kwargs = entry.spec.example()  # type: ignore[misc]
    assert (args[0].shape, args[0].dtype, kwargs) == ((2, 8), torch.bfloat16, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("listen = 5", "listen: expected a string"),
        ('listen = "here"', "listen: expected HOST:PORT"),
        ('lisen = "a:1"', "Did you mean listen"),
        ("threads = 0", "threads: expected at least 1"),
        ("workers = -1", "workers: expected at least 1"),
        ("[models]\nx = 3", "models.x: expected a built-in model"),
        ('[models]\nx = "no such thing"', 'models.x: no model "no such thing"'),
        ("[models.x]\nseed = 1", "models.x.factory: missing"),
        ('[models.x]\nmodel = "digits"\nseed = 1', "models.x.seed: unknown"),
        ('[models.x]\nmodel = "no such thing"', 'models.x: no model "no such thing"'),
        ('[models.x]\nfactory = "a:b"\ndepth = 1', "models.x.depth: unknown"),
        ("[limits]\nmax_clients = 0", "limits.max_clients: expected a number above 0"),
        ("[limits]\nhello_seconds = nan", "limits.hello_seconds: expected a number above 0"),
        ("[limits]\ndrain_seconds = inf", "limits.drain_seconds: expected at most"),
        ("[limits]\nmax_clients = 1.5", "limits.max_clients: expected an integer"),
        ("[limits]\nchunk_bytes = 100000000", "limits.chunk_bytes"),
        ("[limits]\nmax_request_bytes = 100000000000", "limits.max_request_bytes"),
        ("[limits]\nmax_client = 1", "Did you mean max_clients"),
        ("listen =", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        read_config(file)
    assert str(file) in str(caught.value) and says in str(caught.value)
