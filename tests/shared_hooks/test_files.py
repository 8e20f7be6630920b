"""A file is what it was or what it became, whenever the power goes."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from shared_hooks import files
from shared_hooks.errors import SpecError
from shared_hooks.files import write_json, write_text, write_whole


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text("before")
    file.chmod(0o640)
    write_json(file, {"a": 1})
    assert file.read_text() == '{\n  "a": 1\n}\n'
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["profile.json"]


def test_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text("before")

    def half(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(file, half)
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["profile.json"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text("before")

    def full(path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SpecError, match=r"--json: .*profile\.json cannot be written: No space left"):
        write_whole(file, full, "--json")
    assert file.read_text() == "before"


def test_all_is_on_the_disk_before_the_old_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    replace = os.replace
    monkeypatch.setattr(files, "_to_disk", lambda path: happened.append(f"sync {path.name}"))
    monkeypatch.setattr(os, "replace", lambda *paths: (happened.append("replace"), replace(*paths)))
    write_text(tmp_path / "a", "text")
    assert happened == [f"sync .a.{os.getpid()}.part", "replace", f"sync {tmp_path.name}"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to(file)
    write_text(link, "text")
    assert link.is_symlink()
    assert file.read_text() == "text"


def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join(10)
    assert read == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_file_that_is_mounted_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(os, "replace", busy)
    (tmp_path / "file").write_text("before")
    write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["missing/file", "."])
def test_unwritable_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="cannot be written"):
        write_text(tmp_path / name, "text")
