"""What a page may show: what came out, but for what is said to vary."""

from __future__ import annotations

import pytest

from tests.docs.shapes import match, plain, refreshed

TABLE = """\
id  name   mean ms  output
--  -----  -------  ------
 0  stem     0.030  16 KiB
40 inputs in 0.15 s at 127.0.0.1:4711"""


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("0.030", "17.25"), True),  # a time in a column
        (("0.15 s", "2 s"), True),
        ((":4711", ":5"), True),
        (("16 KiB", "17 KiB"), False),  # a size is no time
        (("stem", "bn"), False),
        (("40 inputs", "41 inputs"), False),
    ],
)
def test_times_may_differ_and_nothing_else(change: tuple[str, str], same: bool) -> None:
    found = TABLE.replace(*change)
    assert (plain(TABLE, "times") == plain(found, "times")) is same
    assert plain(TABLE, "") != plain(found, "")


@pytest.mark.parametrize(
    ("shown", "places"),
    [
        ("a b c d", [(0, 4)]),
        ("a ... d", [(0, 1), (3, 4)]),
        ("... c d", [(0, 0), (2, 4)]),
        ("a ...", [(0, 1), (4, 4)]),
        ("a c", None),
        ("b ...", None),
        ("a ... c", None),
        ("a ... a b c d", None),
    ],
)
def test_omissions(shown: str, places: list[tuple[int, int]] | None) -> None:
    assert match(shown.split(), list("abcd")) == places


def test_numbers_are_refreshed_and_what_is_left_out_stays_left_out() -> None:
    assert refreshed("a 1 ms\n...  (two more)\nd 2 ms", "a 3 ms\nb\nc\nd 4 ms\n", "times") == (
        "a 3 ms\n...  (two more)\nd 4 ms"
    )
    assert refreshed("a\n...\nd", "a\nb\nnew\n", "") == "a\nb\nnew"


def test_progress_of_a_busy_machine_is_no_difference() -> None:
    shown, found = "$ do it\nof 6 cuts 6 exact: ok", "$ do it\ncuts: 1 of 6, 5.2 s left\nof 6 cuts 6 exact: ok"
    assert plain(found, "") == plain(shown, "")
    assert plain("$ do it\ncuts: 5 of 6 exact", "") != plain("$ do it", "")
