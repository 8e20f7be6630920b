"""Every answer's numbers reach every sink; a sink that is slow or broken costs no request."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from edge_client import EdgeClient
from edge_client.__main__ import main
from edge_client.live import ToSinks, board, dashboard
from edge_client.model_choice import ModelChoice
from shared_hooks.sinks import Histogram, Value
from tests.edge_client import small_models
from tests.edge_client.test_client import built, image, pair
from tests.shipped import IMAGES
from tests.waiting import PATIENCE


class Kept:
    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, Value]]] = []
        self.closed = 0

    def write(self, values: Mapping[str, Value], step: int) -> None:
        self.written.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


class Broken(Kept):
    def write(self, values: Mapping[str, Value], step: int) -> None:
        raise OSError("the disk is full")

    def close(self) -> None:
        raise OSError("still full")


def test_an_answer_is_written_whole_and_the_client_closes_the_sinks() -> None:
    sink, broken = Kept(), Broken()
    with pair(small_models.Residual, "body", observers=["activation"]) as (client, _):
        hook = ToSinks(sink, broken)
        client.lifecycle.register(hook)
        answers = [client.infer(image()), client.infer(image(), split="edge-only")]
    assert sink.closed == 1 and [step for step, _ in sink.written] == [0, 1]
    assert hook.failures == 2 and hook.left_out == 0
    first, second = sink.written[0][1], sink.written[1][1]
    times = answers[0].times
    assert sum(value for name, value in first.items() if name.startswith("time_ms/") and isinstance(value, float)) == (
        pytest.approx(2 * times.end_to_end / 1e6)
    )
    assert first["time_ms/end_to_end"] == answers[0].measured_ns / 1e6 and first["bytes/up"] == answers[0].bytes_up
    assert first["cut"] == answers[0].layer_id and isinstance(second["cut"], float) and math.isnan(second["cut"])
    assert first["edge/layer_ms/stem"] == answers[0].layers_edge[0].inference_ns / 1e6
    assert isinstance(first["edge/activation/stem/histogram"], Histogram)
    assert not any(name.startswith("cloud/layer_ms") for name in second)


def test_a_sink_that_stands_still_leaves_answers_out() -> None:
    gate = threading.Event()

    class Standing(Kept):
        def write(self, values: Mapping[str, Value], step: int) -> None:
            assert gate.wait(PATIENCE)
            super().write(values, step)

    sink, quick = Standing(), Kept()
    hook = ToSinks(sink, quick)
    hook._asides[0]._most = 2
    with EdgeClient(None, ModelChoice(built(small_models.Residual), model_id="m"), "edge-only") as client:
        client.lifecycle.register(hook)
        for _ in range(10):
            client.infer(image())
        gate.set()
    assert len(quick.written) == 10 and hook.left_out >= 7 and len(sink.written) == 10 - hook.left_out


def test_entries_of_the_page_are_json_and_short() -> None:
    with pair(small_models.Residual, "body", observers=["activation", "debug"]) as (client, _):
        answer = client.infer(image())
    entry = dashboard.request(answer, 3)
    assert sum(entry["rows"]) == pytest.approx(entry["ms"], abs=0.01) and entry["cut"] == "body"
    assert len(entry["rows"]) == len(dashboard.stages())
    seen = board.observed(answer, 3)
    assert [table["title"] for table in seen["tables"]] == ["activation", "debug"] and seen["tables"][0]["rows"]
    hostile = board.event("failed", "\x1b[31m\n" + "<b>" * 1000, value=math.nan)
    assert len(hostile["text"]) <= board.TEXT and "\x1b" not in hostile["text"] and hostile["value"] is None
    json.dumps([entry, seen, hostile, board.cloud(answer)], allow_nan=False)


def test_run_writes_to_the_sinks_that_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("starlette")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [
        "run",
        "--split",
        "edge-only",
        "--input",
        f"{IMAGES}/00[0-9]*.png",
        "--no-progress",
        "--observe",
        "activation",
    ]
    assert main([*words, "--sink", f"tensorboard:{tmp_path}", "--dashboard", "0", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    count = len(list(IMAGES.glob("00[0-9]*.png")))
    assert (
        f"{count} of {count} inputs answered" in out and "dashboard at http://127.0.0.1:" in err and "--sink" not in err
    )
    found = EventAccumulator(str(tmp_path)).Reload()
    assert len(found.Scalars("time_ms/end_to_end")) == count == len(found.Scalars("edge/layer_ms/stem.0"))
    assert found.Scalars("edge/activation/stem.0/mean")[-1].step == count - 1
    assert found.Histograms("edge/activation/stem.0/histogram")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--split", "edge-only", "--input", str(IMAGES), "--sink", "tensorbord:x"], "Did you mean tensorboard"),
        (["run", "--split", "edge-only", "--input", str(IMAGES), "--dashboard", "eighty"], "expected [HOST:]PORT"),
        (["run", "--split", "edge-only", "--input", str(IMAGES), "--dashboard", "192.0.2.1:80"], "cannot be listened"),
        (["dashboard", "--server", "127.0.0.1:1", "--split", "stem.0"], "--split: nothing is run without --input"),
        (["dashboard", "--server", "127.0.0.1:1", "--sink", "wandb:x"], "--sink: nothing is run without --input"),
        (["dashboard", "--server", "127.0.0.1:1", "--observe", "debug"], "--observe: nothing is run without --input"),
        (["dashboard", "--server", "127.0.0.1:1", "--listen", "x"], "expected [HOST:]PORT"),
        (["dashboard", "--server", "nowhere"], "nowhere"),
    ],
)
def test_unobservable_target_is_reported_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
