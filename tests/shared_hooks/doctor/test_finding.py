"""Findings on the screen: one line each, whatever they say, and a look that breaks costs no other."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_hooks import doctor
from shared_hooks.doctor import Finding, as_json, contained, counts, ok, report, warning, wrong

FOUND = [ok("tcp", "connected"), warning("clock", "late", "set it"), wrong("tls", "no", "yes")]


def test_lines_and_counts() -> None:
    out = io.StringIO()
    assert report(FOUND, out) == FOUND
    assert out.getvalue().splitlines() == [
        "ok       tcp          connected",
        "warning  clock        late. To mend: set it",
        "wrong    tls          no. To mend: yes",
        "1 wrong, 1 warning, 1 ok",
    ]
    assert counts(FOUND) == {"wrong": 1, "warning": 1, "ok": 1}
    assert as_json(FOUND)["findings"][1] == {"level": "warning", "about": "clock", "says": "late", "mend": "set it"}


def test_text_of_the_other_side_cannot_break_lines() -> None:
    out = io.StringIO()
    report([wrong("tls", "x\nok       tls          all is well\x1b[2J", "")], out)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].startswith("wrong") and "\x1b" not in out.getvalue()


def test_folded_below_itself_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    there, here = pty.openpty()
    with os.fdopen(here, "w") as terminal:
        report([ok("models", "word " * 30)], terminal)
        text = b""
        while b"1 ok" not in text:
            text += os.read(there, 4096)
    os.close(there)
    lines = text.decode().splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 80
    assert lines[1].startswith(" " * 22 + "word")


def test_a_look_that_breaks_is_a_finding() -> None:
    def looks() -> Iterator[Finding]:
        yield ok("a", "b")
        raise ZeroDivisionError("oh")

    one, other = contained("a", looks())
    assert one == ok("a", "b") and other.level.value == "wrong" and "ZeroDivisionError: oh" in other.says


@pytest.mark.parametrize(
    ("governor", "driver", "level"),
    [
        ("performance", "acpi", "ok"),
        ("powersave", "intel_pstate", "ok"),
        ("powersave", "acpi", "warning"),
        ("", "", "ok"),
    ],
)
def test_the_governor(tmp_path: Path, governor: str, driver: str, level: str) -> None:
    folder = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    folder.mkdir(parents=True)
    (folder / "scaling_governor").write_text(governor)
    (folder / "scaling_driver").write_text(driver)
    found = list(doctor.processor({"cores_usable": 2, "cpu_quota": None, "cpu": "x"}, 2, tmp_path))
    assert [one.level.value for one in found] == ["ok", level]


def test_more_threads_than_a_control_group_allows() -> None:
    found = next(doctor.processor({"cores_usable": 8, "cpu_quota": 1.5, "cpu": "x"}, 4))
    assert found.level.value == "warning" and "--threads 1" in found.mend


def test_limits_beyond_the_memory() -> None:
    (found,) = doctor.memory(1 << 60, "the limits")
    assert found.level.value == "warning"
    (found,) = doctor.memory(1 << 20, "the limits")
    assert found.level.value == "ok"
