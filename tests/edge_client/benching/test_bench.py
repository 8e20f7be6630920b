"""A bench of a real server, as users run it: heads run here, or recorded; processes; a server that dies; Ctrl-C."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from edge_client import bench
from edge_client.__main__ import main
from edge_client.benching.gang import RecordedLane
from edge_client.benching.generator import Alone, Generator
from edge_client.benching.results import read
from edge_client.benching.run import Benched
from shared_hooks.errors import ServerUnavailable, SpecError, UnknownLayer
from tests.edge_client.served import Served, served

QUICK: dict[str, Any] = {"rate": 100, "seconds": 0.5, "warmup": 0.1, "clients": 2, "progress": False}


def run(one: Served, **words: Any) -> Benched:
    return bench(one.address, str(one.spec.folder / "small.toml"), **{**QUICK, **words})


@pytest.mark.parametrize("recorded", [False, True])
def test_every_request_is_answered_at_the_cuts_that_were_asked_for(tmp_path: Path, recorded: bool) -> None:
    with served(tmp_path) as one:
        found = run(one, rate=[50, 100], split="first=0.5,second=0.5", codec="raw,lz4", recorded=recorded, exact=False)
    assert found.ended is None and found.failure is None
    assert [row["rate"] for row in found.rows()] == [50, 100]
    for step in found.steps:
        assert step["answered"] == step["requests"] > 10 and not step["errors"]
        assert all(way["answered"] > 0 and way["bytes_up"] > 0 for way in step["ways"])
        assert step["server"]["workers"] >= 1
        assert step["generator"]["late_p99_ns"] > 0
    assert sum(step["requests"] for step in found.steps) < one.gate.received, "warming up was asked, too"
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["format"] == "isthmus bench 1"


def test_several_processes_send_what_was_recorded(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        found = run(one, recorded=True, processes=2, clients=3, arrivals="constant")
    (step,) = found.steps
    assert step["answered"] == step["requests"] == 50
    assert step["generator"]["processor"] > 0


def test_a_server_that_dies_halfway_ends_it_and_what_was_measured_is_there(tmp_path: Path) -> None:
    """The first rate is whole. In the second, the server is gone."""
    with served(tmp_path) as first:
        pass
    with pytest.raises(ServerUnavailable):
        run(first, patience=0.5)
    dying = served(tmp_path)
    one = dying.__enter__()
    gone = threading.Event()
    before = Generator.fire

    def fire(self: Generator, *args: Any) -> Any:
        fired = before(self, *args)
        if not gone.is_set():  # after the first rate
            gone.set()
            dying.__exit__(None, None, None)
        return fired

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "fire", fire)
        found = run(one, rate=[100, 101, 102], recorded=True, patience=0.2, seconds=1.0)
    assert len(found.steps) == 2, "and the third was not tried"
    assert found.steps[0]["answered"] == found.steps[0]["requests"]
    assert found.ended is not None and "the server was gone at 101 a second" in found.ended
    assert isinstance(found.failure, ServerUnavailable)
    assert found.steps[1]["errors"].get("ServerUnavailable")
    assert "NOT COMPLETE: the server was gone" in found.text(80)
    assert "the server was gone" in found.page()


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, as Python raises it, at the tenth request of the second rate."""
    counts = {"fired": 0, "sent": 0}
    send, fire = RecordedLane.send, Alone.fire

    def fired(self: Any, *args: Any) -> Any:
        counts["fired"] += 1
        return fire(self, *args)

    def sent(self: Any, *args: Any) -> None:
        counts["sent"] += counts["fired"] == 2
        if counts["sent"] == 10:
            counts["sent"] += 1
            raise KeyboardInterrupt
        send(self, *args)

    monkeypatch.setattr(RecordedLane, "send", sent)
    monkeypatch.setattr(Alone, "fire", fired)


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_writes_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    with served(tmp_path) as one:
        words = f"--server {one.address} --model {tmp_path}/small.toml --rate 100,200 --seconds 0.5 --warmup 0"
        words += f" --recorded --no-progress --json {out} --html {tmp_path}/out.html"
        assert main(["bench", *words.split()]) == 130
    known = read(out)
    assert len(known["steps"]) == 2 and known["ended"] == "interrupted at 200 a second"
    assert known["steps"][0]["ended"] is None and known["steps"][1]["ended"] == "interrupted"
    assert "NOT COMPLETE" in capsys.readouterr().out
    assert "not complete" in (tmp_path / "out.html").read_text()
    assert main(["compare", str(out), str(out)]) == 0
    assert "knee: A" in capsys.readouterr().out
    assert main(["compare", str(out), str(tmp_path)]) == 2 and "is no file of bench --json" in capsys.readouterr().err
    assert main(["compare", str(out), str(out), "--stages"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"rate": 0}, "above 0"),
        ({"rate": -5.0}, "above 0"),
        ({"rate": []}, "one at least"),
        ({"rate": [1, 1]}, "each once"),
        ({"rate": 1e9}, "can be kept"),
        ({"rate": 0.001}, "no request begins"),
        ({"clients": 0}, "at least 1"),
        ({"processes": 3}, "more than the 2 clients"),
        ({"deadline": 20}, "when the clients have"),
        ({"warmup": -1}, "0 or more"),
        ({"split": "auto"}, "is no cut"),
        ({"codec": "zip"}, "is not one of"),
        ({"arrivals": "often"}, "poisson, constant"),
    ],
)
def test_invalid_options_are_refused_before_loading(words: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        bench("127.0.0.1:9", "no-such-model", **{**QUICK, **words})


@pytest.mark.parametrize("recorded", [False, True])
def test_an_unknown_cut_ends_it_before_it_begins(tmp_path: Path, recorded: bool) -> None:
    with served(tmp_path) as one, pytest.raises(UnknownLayer, match="frist"):
        run(one, split="first=0.9,frist=0.1", recorded=recorded)
