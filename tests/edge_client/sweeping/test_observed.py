"""Observers in a sweep: one more request an input, in the journal, in a file of its own and on the page."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from edge_client.__main__ import main
from edge_client.model_choice import ModelChoice
from edge_client.process import local_server
from edge_client.screen import tables
from edge_client.sweeping import runner
from edge_client.sweeping.records import ways_of
from edge_client.sweeping.report import render
from shared_hooks.observers.thumbnails import decoded
from tests.edge_client.sweeping import synthetic
from tests.edge_client.sweeping.test_report import data, shape
from tests.edge_client.sweeping.test_sweep import complaint, inputs_in, summary, words
from tests.shipped import folder_of

READER = """
id = "reader"
factory = "tests.shared_hooks.observers.small:reader"
[[example.args]]
shape = [1, 24]
dtype = "int64"
high = 40
"""
OBSERVERS = "activation,attention,memory,debug,tokens"
Captured = pytest.CaptureFixture[str]


def lines(out: Path) -> list[Any]:
    return [json.loads(line) for line in (out / "observations.jsonl").read_text().splitlines()]


def test_a_server_of_its_own_allows_them_and_the_page_shows_them(tmp_path: Path) -> None:
    spec, out = tmp_path / "reader.toml", tmp_path / "out"
    spec.write_text(READER)
    argv = ["sweep", "--model", str(spec), "--output", str(out), "--cuts", "transformer.h.0.ln_2", "--no-progress"]
    few = ["--repetitions", "1", "--no-local", "--profile-repetitions", "1", "--profile-seconds", "1", "--threads", "1"]
    assert main([*argv, *few, "--observe", OBSERVERS]) == 0
    (one,) = lines(out)
    assert one["input"] == "example" and one["way"] == "transformer.h.0.ln_2"
    seen = one["observations"]
    assert set(seen) == {"edge", "cloud"} and all(
        set(by_hook) == set(OBSERVERS.split(",")) for by_hook in seen.values()
    )
    for side, block in (("edge", 0), ("cloud", 1)):
        (record,) = seen[side]["attention"]["records"]
        assert record["name"] == f"transformer.h.{block}.attn" and decoded(record["picture"]).shape == (24, 24)
    known = summary(out)
    assert known["observed"] == [one] and known["settings"]["hooks"] == OBSERVERS.split(",")
    # it is no request of the sweep's
    assert all(way["requests"] == 2 for way in known["ways"])
    page = (out / "report.html").read_text()
    (shown,) = data(page)["attention"]
    assert [one["side"] for one in shown["maps"]] == ["edge", "cloud"] and shown["picture"] is None
    assert all(0 < one["most"] <= 1 and decoded(one["picture"]).shape == (24, 24) for one in shown["maps"])
    for word in (
        "transformer.h.1.attn",
        "no NaN and no Inf",
        "entropy by head",
        "on both sides of transformer.h.0.ln_2",
    ):
        assert word in page


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "images", 2)


def test_an_interrupted_one_continues_and_keeps_what_was_seen(images: Path, tmp_path: Path, capsys: Captured) -> None:
    (images / "0000_broken.png").write_bytes(b"no image")
    toml, out = tmp_path / "server.toml", tmp_path / "out"
    toml.write_text('[observers]\nallow = ["debug", "tokens"]\n')
    with local_server(ModelChoice("digits", threads=1), arguments=[str(toml)]) as server:
        argv = words(out, "--server", server, "--input", str(images), "--repetitions", "1")
        argv += ["--seconds", "0.000001", "--observe", "debug,tokens"]
        assert main(argv) == 1
        first = inputs_in(out)
        assert len(first) == 1 and len(lines(out)) == 1 and "InputMismatch" in lines(out)[0]["error"]
        main(argv)
        assert inputs_in(out)[:1] == first and len(lines(out)) == 2
        main(argv)
        assert [sorted(one) for one in lines(out)] == [
            ["error", "input", "way"],
            *[["input", "observations", "way"]] * 2,
        ]
        capsys.readouterr()
        # what is seen is a part of what a sweep is
        assert main([*argv[:-1], "debug"]) == 2
        assert "hooks: 2 then, 1 now" in complaint(capsys)
        assert main(argv[:-2]) == 2
        assert "hooks: debug tokens then, nothing now" in complaint(capsys)
        assert main([*argv[:-2], "--fresh"]) in (0, 1)
        assert not (out / "observations.jsonl").exists() and "observed" not in summary(out)


def test_a_server_that_refuses_is_one_line_before_anything_is_measured(
    images: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out"
    with local_server(ModelChoice("digits", threads=1)) as server:
        argv = words(out, "--server", server, "--input", str(images), "--repetitions", "1", "--observe", "debug")
        assert main(argv) == 2
    err = capsys.readouterr().err.strip()
    assert err.count("\n") == 0 and 'nothing was measured: --observe: the observer "debug" is not allowed' in err
    assert not inputs_in(out)
    assert main([*words(tmp_path / "other"), "--observe", "debgu"]) == 2
    assert "Did you mean debug?" in complaint(capsys) and not (tmp_path / "other").exists()


def test_a_wrong_tokenizer_ends_it_before_any_work(tmp_path: Path, capsys: Captured) -> None:
    spec, out = tmp_path / "reader.toml", tmp_path / "out"
    spec.write_text('tokenizer = "nowhere"' + READER)
    assert main(["sweep", "--model", str(spec), "--output", str(out), "--observe", "tokens"]) == 2
    assert "tokenizer: expected" in complaint(capsys) and not out.exists()


def test_observations_cover_both_sides() -> None:
    cuts = [("a", 0), ("b", 1), ("c", 2)]
    assert runner.way_of(ways_of(cuts, files=True, local=True)).name == "b"
    assert runner.way_of(ways_of([], files=True, local=True)).name == "cloud-only"


@pytest.mark.parametrize("hostile", ["<img src=x onerror=alert(1)>", '"><script>alert(1)</script>', "{{ 7*7 }}"])
def test_hostile_names_are_text(hostile: str) -> None:
    def page(name: str, **more: str) -> str:
        known = synthetic.known(2, observers=name, inputs=[name])
        known["observed"] = [synthetic.saw(name, name, **more), {"input": name, "way": name, "error": name}]
        return render(known)

    assert shape(page(hostile)) == shape(page("harmless"))
    (first, _) = data(page("harmless"))["attention"]
    assert len(first["maps"]) == 4
    # what is no picture is none
    bare = page("harmless", picture=f'{base64.b64encode(b"GIF").decode()}"><script>')
    assert not data(bare)["attention"][0]["maps"] and len(re.findall("<script", bare)) == 2


def test_without_observers_nothing_is_different() -> None:
    made = synthetic.known(2)
    assert "What observers saw" not in render(made) and runner.section(made) is None


@pytest.mark.parametrize(("edge", "cloud", "shown"), [(9, 9, (4, 4)), (1, 9, (1, 7)), (9, 2, (6, 2)), (3, 3, (3, 3))])
def test_a_short_table_has_rows_of_both_sides(edge: int, cloud: int, shown: tuple[int, int]) -> None:
    def found(count: int) -> dict[str, Any]:
        one = synthetic.saw("a", "a")["observations"]["edge"]["attention"]
        return {"attention": {**one, "records": [{**one["records"][0], "name": f"m{at}"} for at in range(count)]}}

    (table,) = tables({"edge": found(edge), "cloud": found(cloud)}, 8, "elsewhere")
    sides = [row[0] for row in table.rows]
    assert (sides.count("edge"), sides.count("cloud")) == shown and sides == sorted(sides, reverse=True)
    more = edge + cloud - sum(shown)
    assert (f"{more} more rows; elsewhere" in table.notes) == bool(more)
    assert [row[1] for row in table.rows if row[0] == "cloud"] == [f"m{at}" for at in range(shown[1])]
