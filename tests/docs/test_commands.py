"""Every command that a page shows is one that the real parsers take, in blocks and in the text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.commands import OURS, commands, complaint, options_of
from tests.docs.pages import Block, all_blocks, inline, pages

SHELL = all_blocks("sh", "console")


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.where)
def test_commands_are_taken_by_the_parsers(block: Block) -> None:
    found = list(commands(block))
    assert found, "no command in it"
    if block.not_run is None and ": error: " in block.text:  # shown on purpose; test_pages.py compares it
        return
    wrong = [f"{command.text}\n  {said}" for command in found if (said := complaint(command))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_quoted_commands_and_options_exist(page: Path) -> None:
    """As `edge-client run --in-flight 4`, quoted in a sentence: the command and its options."""
    if page.name == "CHANGELOG.md":  # tells of what has been, too
        return
    wrong = []
    for code in inline(page):
        program, *words = code.split() or [""]
        if program not in OURS or not words:
            continue
        known = options_of(program)
        command = words[0] if words[0] in known else ""
        if program == "edge-client" and not command and not words[0].startswith(("-", "COMMAND")):
            wrong.append(code)
        options = [found[0] for word in words if (found := re.match(r"--[\w-]+", word))]
        wrong += [f"{code}: no {option}" for option in options if option not in known[command]]
    assert not wrong, "\n".join(wrong)
