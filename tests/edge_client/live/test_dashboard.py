"""The page's facts without a browser: links that no controller measures, servers only watched, the command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_client.__main__ import main
from edge_client.adaptive.monitor import Decisions
from edge_client.live import Dashboard
from edge_client.live.dashboard import MachineFigures, _power
from shared_hooks.errors import SpecError
from shared_hooks.metrics import Reading, Track
from shared_hooks.metrics.sampler import SeriesNotes
from tests.edge_client.live import lag
from tests.edge_client.live.pages import reported
from tests.waiting import eventually

pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lag.Lag]:
    with lag.served(tmp_path_factory.mktemp("lag")) as one:
        yield one


def until(stream: Iterator[tuple[str, Any]], claim: Callable[[Any], Any]) -> Any:
    """The first news of which the claim is true."""
    return next(data for _, data in stream if claim(data))


def test_a_server_alone_is_watched_and_seen_to_go_and_to_come_back(
    served: lag.Lag, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("LOOK_SECONDS", 0.05), ("PING_EVERY", 0.05), ("TRAIN_EVERY", 0.2)):
        monkeypatch.setattr(f"edge_client.live.dashboard.{name}", seconds)
    with Dashboard(served.address) as page:
        assert page.board.since(0)[1].get("link") is None  # nobody looks, and nothing is sent
        stream = reported(int(page.url.rpartition(":")[2].strip("/")))
        kind, whole = next(stream)
        assert kind == "whole" and whole["about"]["server"] == served.address and not whole["about"]["model"]
        link = until(stream, lambda data: data.get("link") and data["link"][-1]["up"])["link"][-1]
        assert link["by"] == "probe" and link["rtt"] > 0
        assert until(stream, lambda data: data.get("cloud"))["cloud"][-1]["workers"] == 1
        assert until(stream, lambda data: data.get("edge"))["edge"][-1]["cpu"] is not None
        served.relay.refuse()
        gone = until(stream, lambda data: data.get("events"))["events"]
        assert [one["kind"] for one in gone] == ["gone"]
        served.relay.accept()
        assert [one["kind"] for one in until(stream, lambda data: data.get("events"))["events"]] == ["back"]
        stream.close()  # type: ignore[attr-defined]


def test_requests_of_a_fixed_cut_are_shown_with_both_machines(served: lag.Lag) -> None:
    with served.client("0", observers=["activation"]) as client, Dashboard(client, title="mine") as page:
        value = torch.zeros(1, 8)
        client.infer(value)
        client.split = "input"
        client.infer(value)
        with pytest.raises(SpecError):
            client.infer(value, deadline=-1)
        eventually(lambda: page.board.counts["answered"] == 2)
        _, whole = page.board.whole()
        eventually(lambda: "observed" in page.board.whole()[1])
    assert [one["cut"] for one in whole["requests"]] == ["0", "input"] and whole["about"]["title"] == "mine"
    assert whole["about"]["auto"] is False and "choice" not in whole
    moved = [one for one in whole["events"] if one["kind"] == "moved"]
    assert [(one["old"], one["new"]) for one in moved] == [("0", "input")]
    cloud = whole["cloud"][0]
    assert cloud["workers"] == 1 and cloud["cpu"][1] in ("measured", "estimated", "unavailable")
    assert whole["requests"][0]["energy"][1] is not None
    assert whole["server"]["torch"] == torch.__version__  # it was connected before there was a page


def test_a_closed_page_leaves_nothing_on_the_client(served: lag.Lag) -> None:
    with served.client("0") as client:
        before = list(client.lifecycle.hooks)
        page = Dashboard(client)
        assert len(client.lifecycle.hooks) == len(before) + 1
        page.close()
        page.close()
        assert list(client.lifecycle.hooks) == before
        client.infer(torch.zeros(1, 8))
    names = {thread.name for thread in threading.enumerate()}
    assert not [name for name in names if name.startswith("isthmus-dashboard")]


def test_earlier_decisions_reach_late_listeners() -> None:
    decisions, heard = Decisions(), []
    decisions.event("gone", reason="it is off")
    before = decisions.listen(heard.append)
    decisions.event("back")
    decisions.forget(heard.append)
    decisions.event("gone")
    assert [one["kind"] for one in before] == ["gone"] and [one["kind"] for one in heard] == ["back"]


def test_this_machine_is_looked_at_without_waiting() -> None:
    found = MachineFigures().look()
    assert set(found) == {"at", "cpu", "gpu", "memory", "process", "power"} and found["gpu"] is None
    assert found["power"][1] in ("measured", "estimated", "unavailable") and (found["power"][0] is None) == (
        found["power"][1] == "unavailable"
    )


def test_the_command_runs_rounds_and_a_server_that_is_gone_ends_nothing(
    served: lag.Lag, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "input.npy", np.zeros((1, 8), np.float32))
    spec = served.folder / "lag.toml"
    words = ["dashboard", "--model", str(spec), "--input", str(tmp_path / "input.npy"), "--listen", "0"]
    words += ["--every", "0.01", "--repeat", "2", "--device", "cpu", "--no-progress"]
    assert main([*words, "--server", served.address, "--split", "0"]) == 0
    assert capsys.readouterr().err.startswith("edge-client: dashboard at http://127.0.0.1:")
    assert main([*words, "--server", "127.0.0.1:1", "--split", "0", "--patience", "0.1"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2 and "ServerUnavailable" in err[1]  # once for both


def test_watts_are_what_the_energy_grew_by_over_the_time() -> None:
    second = 1_000_000_000
    times, joules = [n * second // 10 for n in range(21)], [0.5 * n for n in range(21)]
    counter = Track(SeriesNotes.of("a meter", second // 10), second // 10, times, joules)
    found = _power(counter, second // 2, 3 * second // 2)
    assert (found.value, found.status) == (pytest.approx(5.0), "measured")
    assert _power(counter, 100 * second, 101 * second).status == "unavailable"
    nothing = Reading.unavailable("no meter")
    assert _power(nothing, 0, second) is nothing
