"""The file of identities, and the command that makes its entries: every mistake is named, and no secret is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_server.__main__ import main
from cloud_server.access import Policy, hash_of, read_identities
from shared_hooks.errors import SpecError

HASH = "ab" * 32


def written(folder: Path, text: str) -> Path:
    path = folder / "identities.toml"
    path.write_text(text)
    return path


def test_all_that_can_be_said(tmp_path: Path) -> None:
    found = read_identities(
        written(
            tmp_path,
            f"""
            [[tokens]]
            identity = "edge-1"
            sha256 = "{HASH}"
            expires = 2027-01-31
            [identities.edge-1]
            models = ["digits"]
            cuts = []
            observers = ["debug"]
            profile = false
            probe = false
            max_in_flight = 8
            max_bytes = 100
            requests_per_minute = 60
            bytes_per_minute = 1000
            weight = 2
            [identities."spiffe://example/edge"]
            disabled = true
            """,
        )
    )
    assert found.policies["edge-1"] == Policy(("digits",), (), ("debug",), False, False, 8, 100, 60, 1000, 2.0)
    assert found.disabled == {"spiffe://example/edge"} and found.next_expiry(0) == 1801353600.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("token = 1", "Did you mean tokens"),
        ("tokens = 1", "tokens: expected an array"),
        ("tokens = [1]", r"expected tables \(\[\[tokens\]\]\), found an integer"),
        (f'[[tokens]]\nsha256 = "{HASH}"', r"tokens\[0\].identity: missing"),
        (
            '[[tokens]]\nidentity = "a"\nsha256 = "isthmus_secret"',
            "expected 64 hexadecimal digits, as cloud-server token",
        ),
        (f'[[tokens]]\nidentity = "a"\nsha256 = "{HASH}"\nexpires = "soon"', "expected a date or a time"),
        (f'[[tokens]]\nidentity = "a b"\nsha256 = "{HASH}"', "an identity's name has"),
        (f'[[tokens]]\nidentity = "a"\nsha256 = "{HASH}"\n' * 2, "the same hash as of an earlier token"),
        ("[identities]\na = 1", "identities.a: expected a table"),
        ("[identities.a]\nmodel = []", "Did you mean models"),
        ('[identities.a]\ncuts = "input"', "expected a list of names"),
        ("[identities.a]\nmax_bytes = -1", "identities.a.max_bytes: expected at least 0"),
        ("[identities.a]\nweight = 0.0", "identities.a.weight: expected a number above 0"),
        ("[identities.a]\nprofile = 1", "expected true or false"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as error:
        read_identities(written(tmp_path, text))
    assert "secret" not in str(error.value)


def test_a_token_is_made_and_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = ""
    for words in (["edge-1"], ["edge-1", "--output", "second", "--days", "1"]):
        assert main(["token", *words]) == 0
        printed += capsys.readouterr().out
    tokens = [Path(name).read_text().strip() for name in ("edge-1.token", "second")]
    assert Path("second").stat().st_mode & 0o777 == 0o600
    found = read_identities(written(tmp_path, printed))
    assert [token.sha256 for token in found.tokens] == [hash_of(token) for token in tokens]
    assert [token.expires is None for token in found.tokens] == [True, False]
    assert not any(token in printed for token in tokens) and len(set(tokens)) == 2
    assert main(["token", "edge-1"]) == 1  # not overwritten
    assert "edge-1.token is there already" in capsys.readouterr().err
    assert Path("edge-1.token").read_text().strip() == tokens[0]
