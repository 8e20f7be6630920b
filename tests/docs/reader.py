"""Somebody who follows a page from top to bottom, in an empty folder of their own.

Python of one page shares one namespace. A block whose first line is a comment with a file's name (``# net.py``) is put
into that file. ``edge-client`` and ``cloud-server`` run in this process; a server listens on a free port, which stands
for the one that the page says from there on. Before that, and on pages without one, a server of `digits` is there.
What others made (make, pip, docker) is not run.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib
import inspect
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image

from deploy import certs
from edge_client.__main__ import main as edge_client
from shared_hooks.profiling.profiler import ProfileOptions
from tests.docs import tables
from tests.docs.commands import PROMPT, Command, commands
from tests.docs.pages import ROOT, Block
from tests.docs.serving import serving
from tests.docs.shapes import match, plain
from tests.shipped import IMAGES

WIDTH = "100"
"""Columns of the terminal."""
ADDRESS = re.compile(r"\b(localhost|HOST|cloud|\d+\.\d+\.\d+\.\d+):(PORT|\d{4,5})\b")
STANDS_FOR = {"SPEC": "digits", "LAYER": "stage2.0.conv2"}
FILE = re.compile(r"# ([\w./-]+\.\w+)\b")
ANSWERED = {"token", "doctor", "--hooks", "--version", "--help", "--print-completion"}
"""With these words ``cloud-server`` serves nothing."""
MEASURED: dict[str, float] = {"repetitions": 1, "warmup": 1, "seconds": 0.2, "pause": 0.0}
"""At most, of any profile: here measuring is to work, not to be exact."""


@dataclass(frozen=True)
class Output:
    """What came where ``block`` shows something."""

    block: Block
    text: str


class Reader:
    """Use as a context manager: in it, ``folder`` is the working folder. ``ports``: of the server that is there."""

    def __init__(self, folder: Path, ports: Mapping[str, str]) -> None:
        self.folder = folder
        self._ports = dict(ports)
        self._names: dict[str, Any] = {"__name__": "page"}
        self._ends = ExitStack()
        self._printed = ""

    def __enter__(self) -> Reader:
        environment = {"HOME": str(self.folder), "COLUMNS": WIDTH, "ISTHMUS_SERVER": ""}
        self._ends.enter_context(patch.dict(os.environ, environment))
        del os.environ["ISTHMUS_SERVER"]
        for name in ("shared_hooks", "examples", "deploy"):
            (self.folder / name).symlink_to(ROOT / name)
        for name in ("images", "photos"):
            (self.folder / name).symlink_to(IMAGES)
        Image.linear_gradient("L").resize((320, 240)).convert("RGB").save(self.folder / "photo.jpg")
        self._ends.enter_context(_inside(self.folder))
        self._ends.enter_context(patch.object(ProfileOptions, "__post_init__", _briefly))
        torch.manual_seed(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.close()

    def follow(self, block: Block) -> Output | None:
        """Does what the block says; what came of it, where the page shows that. Raises what is raised, with the place
        in the page, and AssertionError for a status other than 0.
        """
        try:
            return self._follow(block)
        except BaseException as error:
            if sys.version_info >= (3, 11):
                error.add_note(block.where)
            raise

    def _follow(self, block: Block) -> Output | None:
        if "before" in block.notes:
            self._execute(block, block.notes["before"])
        if block.not_run is not None:
            return None
        if name := block.notes.get("file"):
            return Output(block, (ROOT / name).read_text(encoding="utf-8"))
        if (named := FILE.match(block.text)) and block.language in ("python", "toml", "yaml", "json"):
            self._write(named[1], block)
        elif block.language == "toml":
            tables.read(self._local(block.text), self.folder)
        elif block.language == "python":
            self._printed = self._execute(block, block.text)
        elif block.language == "sh":
            for command in commands(block):
                self._run(command)
        elif block.language == "console":
            lines = list(self._session(block))
            return Output(block, "\n".join(lines)) if shows_output(block) else None
        elif "printed" in block.notes:
            return Output(block, self._printed)
        return None

    def _write(self, name: str, block: Block) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._local(block.text), encoding="utf-8")
        if block.language == "python":
            importlib.invalidate_caches()
            importlib.import_module(file.stem)
        elif block.language == "toml":
            tables.read(self._local(block.text), self.folder)

    def _execute(self, block: Block, code: str) -> str:
        """Runs Python as a notebook would, with ``await`` at the top; returns what it printed."""
        text = "\n" * block.line + self._local(code)  # so that a traceback's lines are the page's
        compiled = compile(text, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        printed = io.StringIO()
        with redirect_stdout(printed):
            found = eval(compiled, self._names)  # noqa: S307 - our own pages
            if inspect.iscoroutine(found):
                asyncio.run(found)
        return printed.getvalue()

    def _session(self, block: Block) -> Iterator[str]:
        """The lines of a console: prompts as they are, each with what came."""
        lines = iter(commands(block))
        for line in block.text.splitlines():
            if PROMPT.match(line):
                yield line
                yield from self._run(next(lines)).rstrip("\n").splitlines()

    def _run(self, command: Command) -> str:
        words = [STANDS_FOR.get(word, self._local(word)) for word in command.words]
        program, *rest = words
        if program == "edge-client":
            return self._called(command, lambda: edge_client(rest))
        if program == "cloud-server":
            if not ANSWERED.intersection(rest):
                said = command.words[1:]
                said = [self._local(one) if at and said[at - 1] == "--next" else one for at, one in enumerate(said)]
                self._ports.update(self._ends.enter_context(serving(said)))
                return "listening on 127.0.0.1:50051\n"
            from cloud_server.__main__ import main as cloud_server

            return self._called(command, lambda: cloud_server(rest))
        if (program, *rest) == ("make", "certs"):
            return self._called(command, lambda: certs.main([]))
        if program == "python" and rest and rest[0].endswith(".py"):
            return self._called(command, lambda: _script(rest))
        return ""

    def _called(self, command: Command, call: Any) -> str:
        said, errors = io.StringIO(), io.StringIO()
        session = command.block.language == "console"
        with redirect_stdout(said), redirect_stderr(said if session else errors):
            try:
                status = call()
            except SystemExit as ended:  # --help, --version, a wrong word
                status = ended.code or 0
        known = f"{command.block.where}: {command.text}\n{said.getvalue()}{errors.getvalue()}status {status}"
        assert status == 0 or (session and shows_output(command.block)), known
        if command.to is not None:
            file = self.folder / Path(command.to).expanduser()
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as opened:
                opened.write(said.getvalue())
        return said.getvalue()

    def _local(self, text: str) -> str:
        """With the addresses of the servers that are there."""

        def here(found: re.Match[str]) -> str:
            port = self._ports.get(found[2], self._ports["50051"] if found[2] == "PORT" else found[2])
            return f"{'localhost' if found[1] == 'localhost' else '127.0.0.1'}:{port}"

        return ADDRESS.sub(here, text)


def shows_output(block: Block) -> bool:
    """Whether a console shows more than what to type."""
    return any(not PROMPT.match(line) for line in block.text.splitlines())


def difference(output: Output) -> str | None:
    """How an output differs from what its block shows; None where it does so only in what is said to vary."""
    varies = output.block.notes.get("varies", "")
    shown, found = plain(output.block.text, varies), plain(output.text, varies)
    if match(shown, found) is not None:
        return None
    lines = difflib.unified_diff(shown, found, "shown", "what came", lineterm="")
    return "\n".join([f"{output.block.where} (make docs-update mends it)", *lines])


def _briefly(options: ProfileOptions, checked: Callable[[ProfileOptions], None] = ProfileOptions.__post_init__) -> None:
    checked(options)
    for name, most in MEASURED.items():
        object.__setattr__(options, name, min(getattr(options, name), most))


def _script(words: list[str]) -> int:
    before = sys.argv
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """In this block ``folder`` is the working folder, and its modules can be imported; nothing of them stays."""
    before, modules = Path.cwd(), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(folder):
                del sys.modules[name]
