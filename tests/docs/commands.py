"""Commands as pages show them, and whether the real parsers take them."""

from __future__ import annotations

import argparse
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from cloud_server import arguments as server_options
from edge_client.commands.arguments import make_parser
from tests.docs.pages import ROOT, Block, tracked

PROMPT = re.compile(r"\w*\$ +(.*)")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
COMMENT = re.compile(r"(^|\s)#(\s.*)?$")
OURS = ("edge-client", "cloud-server")
EXTRA = re.compile(r"(?:\.|isthmus)\[([\w,]+)\]")


@dataclass(frozen=True)
class Command:
    """One command of a block: its words without environment, ``sudo`` and redirections; ``text``: as it is shown."""

    block: Block
    text: str
    words: tuple[str, ...]
    to: str | None = None
    """Where its output is appended (``>> FILE``)."""

    @property
    def program(self) -> str:
        """``edge-client`` also for ``.venv/bin/edge-client`` and ``python -m edge_client``."""
        return self.words[0]


def commands(block: Block) -> Iterator[Command]:
    """Yield all lines of a block ``sh``, and those with a prompt of a ``console``."""
    for line in _lines(block):
        for words, to in _split(line):
            while words and (ASSIGNMENT.fullmatch(words[0]) or words[0] == "sudo"):
                words = words[1:]
            if words:
                yield Command(block, line, _named(words), to)


def _lines(block: Block) -> Iterator[str]:
    """Whole lines, without comments; what a quotation holds may go over several."""
    open_line = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        prompt = PROMPT.match(line.strip())
        if block.language == "console" and not prompt:
            continue
        open_line += COMMENT.sub("", prompt[1] if prompt else line)
        try:
            shlex.split(open_line)
        except ValueError:  # a quotation is open
            open_line += "\n"
            continue
        yield open_line.strip()
        open_line = ""
    assert not open_line, f"{block.where}: a quotation is never closed"


def _split(line: str) -> Iterator[tuple[list[str], str | None]]:
    """The simple commands of a line, each with the file it appends to."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|<>")
    lexer.commenters, lexer.whitespace_split = "", True
    words: list[str] = []
    to: str | None = None
    for word in lexer:
        if word in ("&", "&&", ";", "|", "||"):
            yield words, to
            words, to = [], None
        elif word in (">", ">>"):
            to = next(lexer)
        else:
            words.append(word)
    yield words, to


def _named(words: Sequence[str]) -> tuple[str, ...]:
    first = words[0].rpartition("/")[2] if not words[0].endswith(".py") else words[0]
    if first in ("python", "python3"):
        first = "python"
        if tuple(words[1:3]) in (("-m", "edge_client"), ("-m", "cloud_server")):
            return (words[2].replace("_", "-"), *words[3:])
    return (first, *words[1:])


def complaint(command: Command) -> str | None:
    """What is wrong with a command of ours; None where nothing is, and of what others made."""
    name, *words = command.words
    if name == "edge-client":
        return _parsed(make_parser(), words)
    if name == "cloud-server":
        if words[:1] == ["token"]:
            return None if words[1:2] and not words[1].startswith("-") else "token: whose?"
        parser = server_options.parser()
        if words[:1] == ["doctor"]:
            parser.add_argument("--json", action="store_true")
            words = words[1:]
        return _parsed(parser, words)
    if name == "make":
        unknown = [word for word in words if "=" not in word and word not in _targets()]
        return f"no target {', '.join(unknown)} in the Makefile" if unknown else None
    if name == "python" and words[:1] == ["-m"] and words[1] not in ("venv", "pip"):
        return None if find_spec(words[1]) else f"no module {words[1]}"
    if name == "python" and words and words[0].endswith(".py"):
        return None if words[0] in tracked() else f"no file {words[0]}"
    if name == "pip" or words[:2] == ["-m", "pip"]:
        extras = {extra for found in EXTRA.findall(command.text) for extra in found.split(",")}
        return f"no extra {', '.join(sorted(extras - _extras()))}" if extras - _extras() else None
    return None


def _parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> str | None:
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            parser.parse_args(list(words))
    except SystemExit as ended:
        if ended.code:
            return said.getvalue().splitlines()[-1]
    return None


@cache
def options_of(program: str) -> dict[str, frozenset[str]]:
    """The options of each command of a program; those of ``cloud-server`` itself under ""."""
    if program == "cloud-server":
        own = frozenset(server_options.parser()._option_string_actions)
        return {"": own, "doctor": own | {"--json"}, "token": frozenset({"--output", "--days"})}
    parser = make_parser()
    (commands,) = (action for action in parser._actions if action.dest == "command")
    known = {name: frozenset(one._option_string_actions) for name, one in (commands.choices or {}).items()}  # type: ignore[union-attr]
    return {"": frozenset(parser._option_string_actions), **known}


@cache
def _targets() -> frozenset[str]:
    return frozenset(re.findall(r"(?m)^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8")))


@cache
def _extras() -> frozenset[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text[text.index("[project.optional-dependencies]") : text.index("[project.scripts]")]
    return frozenset(re.findall(r"(?m)^([a-z]+) = \[", table))
