"""Help, versions and slips of both commands: one line each, near names, and no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloud_server import arguments as cloud
from cloud_server.limits import Limits
from edge_client.commands.arguments import CODECS as HIDDEN_CODECS
from edge_client.commands.arguments import make_parser
from edge_client.options import CODECS
from shared_hooks.codecs import CODECS as ALL_CODECS
from shared_hooks.command_line import SHELLS
from shared_hooks.generation.hidden import CODECS as ALL_HIDDEN_CODECS
from studies.footprint.starts import commands

PROGRAM = """
import sys
sys.modules["torch"] = None  # importing it raises
from cloud_server.__main__ import main as cloud_server
from edge_client.__main__ import main as edge_client
for command in {commands}:
    try:
        {{"edge_client": edge_client, "cloud_server": cloud_server}}[command[0]](command[1:])
    except SystemExit as ended:
        assert ended.code == (2 if "wrong" in command[-1] else 0), command
    else:
        raise AssertionError(f"{{command}} went on")
"""


def test_help_version_and_slips_load_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(commands=commands())],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    slips = done.stderr.splitlines()
    assert len(slips) == 3 and all(line.endswith("--help)") for line in slips)
    assert done.stdout.count("usage: ") == len(commands()) - len(slips) - 2  # versions


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--modle", "x"], "edge-client run: error: there is no option --modle. Did you mean --model, "),
        (["ruin"], 'edge-client: error: argument COMMAND: "ruin" is not one of layers, '),
        ([], "edge-client: error: say what to do: layers, verify, "),
        (["layers", "resnet.toml"], '"resnet.toml" is one word too many; a model is named by --model resnet.toml ('),
        (["compare", "a", "b", "c"], '"c" is one word too many ('),
        (["plan", "--codec", "lz"], "Did you mean lz4?"),
    ],
)
def test_a_slip_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and said in line


def test_repeated_option_is_accepted_if_equal() -> None:
    assert tuple(ALL_CODECS) == CODECS
    assert ALL_HIDDEN_CODECS == HIDDEN_CODECS
    assert f"after SIGTERM; default {Limits.drain_seconds:g}" in " ".join(cloud.parser().format_help().split())


@pytest.mark.parametrize("shell", SHELLS)
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    for parser in (make_parser(), cloud.parser()):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--print-completion", shell])
        text = capsys.readouterr().out
        assert ended.value.code == 0 and "--model" in text and parser.prog in text


def test_completion_without_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--print-completion", "bash"])
    assert 'pip install "isthmus[completion]"' in capsys.readouterr().err


def test_several_inputs_after_one_option() -> None:
    words = ["run", "--split", "1", "--input", "a.png", "b.png", "--input", "c.png"]
    assert make_parser().parse_args(words).input == ["a.png", "b.png", "c.png"]


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "plan", "sweep", "bench", "dashboard", "calibrate", "generate"])
def test_help_shows_a_dozen_options_and_help_all_every_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = helped(capsys, command, "--help"), helped(capsys, command, "--help", "all")
    parsers: Any = next(one for one in make_parser()._actions if one.dest == "command").choices
    options = [one for one in parsers[command]._actions if one.option_strings]
    shown = sum(line.startswith("  -") for line in short.splitlines())
    assert shown <= 12
    assert f"{len(options) - shown} more options: edge-client {command} --help all" in short
    for one in options:
        assert any(line.startswith(f"  {one.option_strings[0]}") for line in whole.splitlines()), one.option_strings


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks where the streams lead")
@pytest.mark.parametrize("closed", ["0<&- 1>&- 2>&-", "1>&-", "2>&-", "0<&-"])
def test_closed_standard_streams_are_the_null_device(closed: str) -> None:
    program = """
import os, sys
from shared_hooks.command_line import open_closed_streams
were = [number for number in range(3) if not os.path.exists(f"/proc/self/fd/{number}")]
open_closed_streams()
print(sys.stdin.read(0), flush=True)
print("an error", file=sys.stderr, flush=True)
led = [os.readlink(f"/proc/self/fd/{number}") == os.devnull for number in were]
os._exit(3 if led and all(led) else 1)
"""
    command = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, program],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        timeout=120,
    )
    assert done.returncode == 3
