"""What observers found in TensorBoard and Weights & Biases, read back; and in a sink of one's own."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.errors import SpecError
from shared_hooks.observers import ActivationStats, AttentionCapture, MemoryUse, NonFiniteGuard
from shared_hooks.observers.named import plain
from shared_hooks.sinks import Histogram, Picture, TensorBoardSink, Value, of_records, open_sink, write_records
from tests.shared_hooks.sinks import wandb_file

pytest.importorskip("tensorboard")
wandb = pytest.importorskip("wandb")


class Kept:
    """A sink of one's own, in the lines that the documentation shows."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.written: list[tuple[int, dict[str, Value]]] = []

    def write(self, values: Mapping[str, Value], step: int) -> None:
        self.written.append((step, dict(values)))

    def close(self) -> None:
        self.written.append((-1, {}))


class Half:
    def write(self, values: Mapping[str, Value], step: int) -> None: ...


@pytest.fixture(scope="module")
def observers() -> tuple[ActivationStats, AttentionCapture]:
    """Two forwards of one model; the second has a NaN in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    stats, attention = ActivationStats("[01]"), AttentionCapture(picture=True)
    with stats.attach(model), attention.attach(model), torch.no_grad():
        model(torch.randn(1, 5, 8))
        model(torch.full((1, 5, 8), math.nan))
    return stats, attention


def test_record_names_module_and_observer(observers: tuple[ActivationStats, AttentionCapture]) -> None:
    stats, attention = observers
    values = of_records(record for record in stats.records if record.step == 0)
    assert set(values) == {
        f"{name}/{key}" for name in "01" for key in ("mean", "std", "min", "max", "sparsity", "nonfinite", "histogram")
    }
    first = stats.records[0]
    assert values["0/mean"] == first.mean and values["0/histogram"] == Histogram(
        first.low, first.high, tuple(first.histogram)
    )
    assert of_records([plain(first)]) == of_records([first])  # as an answer has them

    looked = of_records(attention.records[:1])
    (picture,) = (value for value in looked.values() if isinstance(value, Picture))
    assert picture.image().size == (5, 5)
    assert {key.rpartition("self_attn/")[2] for key in looked} == {
        *("entropy/0", "entropy/1", "maximum/0", "maximum/1", "picture", "picture_max", "over_max")
    }
    bare = of_records([replace(attention.records[0], picture="", over="")])
    assert not any(key.endswith("_max") for key in bare)


def test_readings_counts_and_nothing_that_is_no_number() -> None:
    model = nn.Linear(2, 2)
    with MemoryUse().attach(model) as memory, NonFiniteGuard().attach(model) as guard, torch.no_grad():
        model(torch.tensor([[math.inf, 1.0]]))
    values = of_records([*memory.records, *guard.records])
    assert values["(model)/output_bytes"] == 8.0
    assert not any(key.endswith(("where", "shape", "device", "dtype")) for key in values)
    assert all(isinstance(value, float) for value in values.values())
    hostile: dict[str, Any] = {"name": "x", "part": "", "histogram": "no", "low": 1, "high": 0, "picture": "%%", "n": 9}
    hostile |= {"text": [], "huge": 10**400, "yes": True, "odd": [1.0, "a"], "dictionary": {"value": None}}
    assert of_records([hostile]) == {"x/n": 9.0, "x/huge": math.inf}
    token = {"name": "(model)", "row": 1, "ids": [3, 4], "probabilities": [0.5, "nan"], "text": ["a", "b"]}
    values = of_records([token])
    assert values["(model)/row 1/text"] == "a, b" and values["(model)/row 1/probabilities/0"] == 0.5
    assert "(model)/row 1/ids/0" not in values


def test_event_files_are_read_back_by_tensorboard(
    observers: tuple[ActivationStats, AttentionCapture], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardSink(str(tmp_path)) as sink:
        write_records(sink, *observers, prefix="vit/")
        sink.write({"label": "seven"}, 1)
    found = EventAccumulator(str(tmp_path)).Reload()
    stats, _ = observers
    means = found.Scalars("vit/0/mean")
    assert [one.step for one in means] == [0, 1]
    assert means[0].value == pytest.approx(stats.records[0].mean) and math.isnan(means[1].value)
    (histogram,) = found.Histograms("vit/0/histogram")  # of nothing but NaN there is none
    assert sum(histogram.histogram_value.bucket) == 40
    assert histogram.histogram_value.min == pytest.approx(stats.records[0].low)
    assert [one.step for one in found.Images("vit/2.self_attn/picture")] == [0, 1]
    assert b"seven" in found.Tensors("label/text_summary")[0].tensor_proto.string_val[0]


def test_an_offline_run_is_read_back_and_nobody_was_called(
    observers: tuple[ActivationStats, AttentionCapture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    connect = socket.socket.connect

    def noted(self: socket.socket, address: Any) -> None:
        called.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", noted)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")  # it is not asked
    sink = open_sink("wandb:project")
    write_records(sink, *observers)
    sink.write({"late": 1.0, "label": "seven"}, 0)  # out of order, as a second observer's may be
    sink.close()
    wandb.teardown()  # the service that it leaves for later runs
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    first, second, third = wandb_file.history(file)
    stats, _ = observers
    assert (first["step"], second["step"], third["step"]) == (0, 1, 0)
    assert first["0/mean"] == pytest.approx(stats.records[0].mean) and math.isnan(second["0/mean"])
    assert (
        sum(first["0/histogram.values"]) == 40
        and len(first["0/histogram.bins"]) == len(first["0/histogram.values"]) + 1
    )
    assert (file.parent / "files" / first["2.self_attn/picture.path"]).is_file()
    assert (third["late"], third["label"]) == (1.0, "seven")
    assert all(address[0] in ("127.0.0.1", "::1") for address in called if isinstance(address, tuple)), called


def test_a_sink_of_ones_own_by_its_name(observers: tuple[ActivationStats, AttentionCapture]) -> None:
    sink = open_sink(f"{__name__}:Kept:some:text")
    write_records(sink, observers[0])
    assert type(sink).__name__ == "Kept"
    kept: Any = sink
    assert kept.text == "some:text" and [step for step, _ in kept.written] == [0, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensorboard", 'what comes after "tensorboard:" is missing'),
        ("tensorboard:", "is missing"),
        ("tensorboard:/dev/null/x", "cannot be written"),
        ("wandb:", "is missing"),
        ("tensorbord:x", "Did you mean tensorboard"),
        ("", "There are tensorboard:DIR, wandb:PROJECT"),
        ("csv", "There are tensorboard:DIR"),
        ("no_such_module_here:Sink", "cannot import"),
        ("math:sine", "has no"),
        ("math:pi", "not something to call"),
        ("math:sqrt", "making it raised TypeError"),
        (f"{__name__}:Half", "has no method close"),
    ],
)
def test_words_that_name_no_sink_are_reported_in_one_line(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        open_sink(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("torch.utils.tensorboard.writer", "tensorboard:x"), ("wandb", "wandb:x")])
def test_missing_package_is_named(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(SpecError, match=rf"isthmus\[{text.partition(':')[0]}\]"):
        open_sink(text)
