"""One default for the server: the option, the variable, the settings file, in this order; and who named it is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.__main__ import main
from edge_client.settings import OWN, server_of
from shared_hooks.errors import SpecError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ISTHMUS_SERVER", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def settings(path: Path, server: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'[client]\nserver = "{server}"\n')
    return path


def test_the_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert str(server_of()) == "no server"
    home = settings(tmp_path / "home" / "isthmus" / "config.toml", "home:1")
    assert str(server_of()) == f"server home:1 (from {home})"
    settings(Path("isthmus.toml"), "here:2")
    assert str(server_of()) == "server here:2 (from isthmus.toml)"
    assert server_of(config=settings(tmp_path / "named.toml", "named:3")).address == "named:3"
    monkeypatch.setenv("ISTHMUS_SERVER", "variable:4")
    assert str(server_of()) == "server variable:4 (from ISTHMUS_SERVER)"
    assert str(server_of("given:5")) == "server given:5 (from --server)"
    assert server_of("none").address is None
    assert server_of("own").address == OWN


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[client]\nserver = "nowhere"', 'isthmus.toml: server "nowhere": expected HOST:PORT'),
        ('[client]\nserver = ["a:1"]', "isthmus.toml: client.server: expected a server"),
        ('[client]\nsever = "a:1"', "isthmus.toml: client.sever: unknown key in [client]; known: server"),
        ('[clients]\nserver = "a:1"', "isthmus.toml: clients: unknown key"),
        ("server = a:1", "isthmus.toml: not valid TOML"),
    ],
)
def test_a_file_that_says_it_wrong(text: str, said: str) -> None:
    Path("isthmus.toml").write_text(text)
    with pytest.raises(SpecError) as wrong:
        server_of()
    assert str(wrong.value).startswith(said)


def test_other_tables_of_the_same_file_are_let_be() -> None:
    Path("isthmus.toml").write_text('[client]\nserver = "a:1"\n[lifecycle]\nhooks = []\n[tracing]\n')
    assert server_of().address == "a:1"


def test_a_default_is_shown_in_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a command that measures through a server does not take one of its own instead."""
    image = Path(__file__).parents[2] / "shared_hooks" / "models" / "digits" / "images" / "0011_label1.png"
    settings(Path("isthmus.toml"), "127.0.0.1:1")
    run = ["run", "--split", "input", "--patience", "0.1", "--input", str(image)]
    for words in (run, ["verify"], ["plan"], ["sweep", "--output", "x", "--no-predict"], ["doctor"]):
        monkeypatch.setattr("edge_client.commands.doctor.looks", lambda *known: [])
        monkeypatch.setattr("edge_client.commands.tasks.choice_of", _ends)
        main(words)
        assert "server 127.0.0.1:1 (from isthmus.toml)" in capsys.readouterr().err, words
    assert main([*run, "--server", "127.0.0.1:1"]) == 3
    assert "(from " not in capsys.readouterr().err


def _ends(options: object) -> None:
    raise SpecError("far enough")
