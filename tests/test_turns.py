"""Every case has its turn, and functions of few cases have all of them each time."""

from __future__ import annotations

import pytest

from tests.turns import FEW, TURNS, of_turn, turn

MANY = [f"a.py::test_many[{number}-x[y]]" for number in range(10 * FEW + 1)]
SOME = [f"a.py::test_some[{number}]" for number in range(FEW)]
ONE = ["a.py::test_one", "b.py::test_many[1]"]


def test_in_as_many_turns_as_there_are_every_case_runs_once() -> None:
    shares = [of_turn([*MANY, *SOME, *ONE], number) for number in range(TURNS)]
    assert set().union(*shares) == {*MANY, *SOME, *ONE}
    assert all({*SOME, *ONE} <= share for share in shares)
    assert all(sum(name in share for share in shares) == 1 for name in MANY)


@pytest.mark.parametrize("text", ["4", "-1", "first", "1.0"])
def test_another_turn_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_TURN", text)
    with pytest.raises(pytest.UsageError, match="0 to 3"):
        turn()


def test_without_one_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_TURN", raising=False)
    assert turn() is None
    monkeypatch.setenv("ISTHMUS_TURN", "")
    assert turn() is None
