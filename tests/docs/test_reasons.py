"""What does not run says why, where it is shown; and there is no more of it than is known."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.docs.pages import ROOT, Block, all_blocks

PATH = re.compile(r"\b(?:tests|studies|docs|examples)/[\w./-]*\w")
NOT_RUN = [block for block in all_blocks() if block.not_run is not None]
KNOWN = {"python": 3, "console": 7, "sh": 43}
"""How many blocks of each language do not run. Mended one? Take it off. Added one? Is there really no way to run it?"""


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.where)
def test_skipped_examples_give_a_reason(block: Block) -> None:
    reason = block.not_run or ""
    assert len(reason.split()) >= 3, "in words that tell a reader something"
    gone = [path for path in PATH.findall(reason) if not (ROOT / path).exists()]
    assert not gone, "what is said to run it instead is not there"


def test_no_more_than_is_known() -> None:
    found = Counter(block.language for block in NOT_RUN)
    assert found == KNOWN, "\n".join(f"{block.where}: {block.not_run}" for block in NOT_RUN)


def test_notes_stand_right_before_a_block() -> None:
    """A note that something else follows would be taken for none."""
    for path in {block.page for block in all_blocks()}:
        written = path.read_text(encoding="utf-8").count("<!-- not run:")
        taken = sum(block.page == path for block in NOT_RUN)
        assert written == taken, f"{path.relative_to(ROOT)}: {written} notes, {taken} before a block"
