"""Progress looks right where it is shown: on a terminal of 80 columns, in a pipe, in a notebook's cell."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import edge_client.screen as module
from edge_client.screen import progress

LONG = "0154_label4.png: [red]encoder.layers.encoder_layer_11.mlp.with_a_very_long_name.linear (local)"


def shown_on_a_terminal(columns: int, total: int | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that a terminal of so many columns was sent, without colours."""
    master, slave = pty.openpty()
    found: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(master, 1 << 16)
            except OSError:
                return
            found.append(data)
            if not data or b"\x04" in data:
                return

    reader = threading.Thread(target=read)
    reader.start()
    with open(slave, "w", encoding="utf-8") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm-256color")
        with progress("sweep", total) as advance:
            for _ in range(3):
                advance(LONG)
        screen.write("\x04")
    reader.join(10)
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(found).decode()).replace("\x04", "")
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize("total", [3, None])
def test_on_80_columns_it_is_one_line_with_every_part(total: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown_on_a_terminal(80, total, monkeypatch)
    last = lines[-1]
    assert all(len(line) <= 80 for line in lines)
    assert "sweep" in last and "0154_label4.png" in last and last.endswith("…")
    assert ("3/3" in last and "━" in last) == (total is not None)


def test_in_a_pipe_it_is_a_plain_line_with_the_time_left_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, now = io.StringIO(), iter(range(0, 1000, 2))
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    with progress("sweep", 9) as advance:
        for number in range(9):
            advance(f"input {number}\x1b[2J\n")
    lines = pipe.getvalue().splitlines()
    assert lines and len(lines) < 9 and lines[0] == "sweep: 2 of 9, 28 s left, input 1\\x1b[2J"
    assert "\x1b" not in pipe.getvalue()


def test_the_time_left_is_what_the_caller_knows_before_it_is_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, now = io.StringIO(), iter(range(0, 100000, 6))
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    with progress("inputs", 100) as advance:
        advance("", done=10, total=40, left=205)
        advance("", done=40, total=40, left=7300)
    assert pipe.getvalue().splitlines() == ["inputs: 10 of 40, 3 min 20 s left", "inputs: 40 of 40, 2 h 2 min left"]


def test_a_slow_start_and_steps_of_an_earlier_run_are_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress("cuts", 110) as advance:
        for at, done in ((30.0, 60), (31.0, 61), (34.0, 64), (40.0, 70)):
            now[0] = at
            advance("", done=done)
    assert pipe.getvalue().splitlines() == [
        "cuts: 60 of 110",
        "cuts: 61 of 110, 49 s left",
        "cuts: 70 of 110, 40 s left",
    ]


def test_hidden_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("sweep", 3, show=False) as advance:
        advance("x")
    assert capsys.readouterr() == ("", "")


NOTEBOOK = """
import time
import edge_client.screen as module
module.NOTEBOOK_EVERY_SECONDS = 0.0
with module.progress("sweep", 4) as advance:
    for number in range(4):
        advance("<b>0154.png</b>: a layer")
print("done")
"""


def test_in_a_notebook_the_cell_shows_the_same_bar_and_is_clean_in_the_end() -> None:
    """A kernel, run as a notebook is."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)])
    client = nbclient.NotebookClient(book, timeout=120, kernel_name="python3")
    shown: list[Any] = []
    process = client.process_message

    def seen(message: Any, *more: Any) -> Any:
        if message["msg_type"] in ("display_data", "update_display_data"):
            shown.append(message["content"]["data"])
        return process(message, *more)

    client.process_message = seen
    client.execute()
    pages = [one["text/html"] for one in shown]
    assert len(pages) == 6 and pages[-1] == ""
    assert "sweep" in pages[0] and "0/4" in pages[0] and "4/4" in pages[4] and "━" in pages[4]
    assert "&lt;b&gt;0154.png&lt;/b&gt;" in pages[1] and "<b>" not in pages[1]
    assert all(one["text/plain"] == "" for one in shown)
    bar, said = book.cells[0].outputs  # nothing on standard error
    assert bar["output_type"] == "display_data" and said["text"] == "done\n"
