"""``verify`` covers all that a request does: an output that cannot be sent, or that the spec cannot read, is not ok."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_client.__main__ import main
from shared_hooks.crossing import Parcel
from shared_hooks.errors import InputMismatch
from shared_hooks.models import load_spec
from tests.edge_client.commands.test_commands import Captured

REMEDY = "use_cache = false under [call_kwargs] of the spec"


def spec(folder: Path, more: str = "") -> str:
    text = 'id = "caching"\nfactory = "tests.edge_client.small_models:Caching"\n[[example.args]]\nshape = [1, 4]\n'
    (folder / "net.toml").write_text(text + more)
    return str(folder / "net.toml")


def test_an_output_that_cannot_be_sent_is_reported_with_the_remedy(tmp_path: Path, capsys: Captured) -> None:
    assert main(["verify", "--model", spec(tmp_path), "--json", str(tmp_path / "found.json")]) == 1
    out = capsys.readouterr().out
    assert "no request can be answered: the output cannot be sent: " in out and "KeyCache" in out and REMEDY in out
    assert out.endswith("caching: of 3 cuts 3 exact: NOT OK\n")
    known = json.loads((tmp_path / "found.json").read_text())
    assert known["ok"] is False and REMEDY in known["unsendable"] and len(known["problems"]) == 1
    assert main(["verify", "--model", spec(tmp_path, "[call_kwargs]\nuse_cache = false\n")]) == 0


def test_an_output_that_the_spec_cannot_read(tmp_path: Path, capsys: Captured) -> None:
    words = '[call_kwargs]\nuse_cache = false\n[postprocess]\noutput = "logit"\n'
    assert main(["verify", "--model", spec(tmp_path, words)]) == 1
    assert "the output does not fit the spec: postprocess: expected class scores" in capsys.readouterr().out


def test_the_server_says_the_remedy_too(tmp_path: Path) -> None:
    args, kwargs = load_spec(spec(tmp_path)).example()  # type: ignore[misc]
    output = load_spec(spec(tmp_path)).load_model()(*args, **kwargs)
    with pytest.raises(InputMismatch) as refused:  # where it makes an answer of it
        Parcel.of_value(output)
    assert REMEDY in str(refused.value)
