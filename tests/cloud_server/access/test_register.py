"""The file of identities while it changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloud_server.access import CallCredentials, Register, hash_of
from shared_hooks.errors import NotAuthenticated


def test_half_written_register_disconnects_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever rewrites it in place makes it empty first, and so a valid file without anybody."""
    path, now = tmp_path / "identities.toml", 1_800_000_000.0
    path.write_text(f'[[tokens]]\nidentity = "alice"\nsha256 = "{hash_of("word").hex()}"\n')
    shown = CallCredentials(hash_of("word"), ())
    register = Register(path)
    path.write_text("")
    os.utime(path, (now, now))
    monkeypatch.setattr("time.time", lambda: now + 0.1)
    assert not register.refresh()
    assert register.caller("peer:1", shown).identity == "alice"
    monkeypatch.setattr("time.time", lambda: now + 0.3)
    assert register.refresh()
    with pytest.raises(NotAuthenticated):
        register.caller("peer:1", shown)
