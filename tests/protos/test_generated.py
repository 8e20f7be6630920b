"""The committed code of the wire is what the .proto file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos import generate


def test_generated_code_is_current() -> None:
    assert generate.main(["--check"]) == 0


def test_a_change_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto = tmp_path / "protos" / "isthmus" / "v1" / "split.proto"
    proto.parent.mkdir(parents=True)
    here = generate.ROOT / "protos" / "isthmus" / "v1"
    for file in here.iterdir():
        if file.is_file():
            (proto.parent / file.name).write_bytes(file.read_bytes())
    proto.write_text(proto.read_text().replace("message Draining {}", "message Draining { uint32 seconds = 1; }"))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main(["--check"]) == 1
    complaint = capsys.readouterr().err
    assert "split_pb2.py is not" in complaint and "split_pb2.pyi is not" in complaint
    assert "_grpc" not in complaint
