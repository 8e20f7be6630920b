"""The table of one side's layers: its lines add up, and it tells what is known of energy, once."""

from __future__ import annotations

from edge_client.commands.report import folded, layer_table
from shared_hooks import ForwardMetrics, LayerMetrics
from shared_hooks.metrics.records import Reading

WHY = Reading.unavailable("no energy meter: RAPL: no permission")


def layers(energy: Reading) -> list[LayerMetrics]:
    return [
        LayerMetrics(0, "stem", "Conv2d", 2_000_000, 4096, cpu_ns=1_000_000, energy=energy),
        LayerMetrics(1, "relu", "ReLU", 500_000, 4096, energy=energy),
    ]


def test_layers_outside_and_the_whole_add_up() -> None:
    text = layer_table([layers(WHY)] * 2, [ForwardMetrics(3_000_000, 2_500_000, 2_000_000, WHY)] * 2)
    lines = text.split("\n")
    assert lines[0].split() == ["id", "name", "type", "mean", "ms", "cpu", "ms", "output"]
    assert lines[2].split() == ["0", "stem", "Conv2d", "2.000", "1.000", "4.0", "KiB"]
    assert lines[3].split() == ["1", "relu", "ReLU", "0.500", "-", "4.0", "KiB"]
    assert lines[4].split() == ["outside", "layers", "0.500"]
    assert lines[5].split() == ["whole", "forward", "3.000", "2.000"]
    assert lines[6:] == ["energy: no energy meter: RAPL: no permission"]


def test_energy_is_shown_where_there_is_some_and_estimates_are_marked() -> None:
    estimated = Reading.estimated(0.002, "share by time of 20 ms samples of RAPL package-0")
    measured = Reading.measured(0.005, "RAPL package-0, sampled every 20 ms")
    text = layer_table([layers(WHY), layers(estimated)], [None, ForwardMetrics(3_000_000, 2_500_000, 1, measured)])
    lines = text.split("\n")
    assert "~2.000" in lines[2] and "mJ" in lines[0]
    assert lines[5].split() == ["whole", "forward", "3.000", "0.000", "5.000"]
    assert lines[6:] == [f"energy: {estimated.note}", f"energy: {measured.note}"]


def test_without_metrics_there_is_nothing() -> None:
    assert layer_table([[], []], [None, None]) == "(none)"


def test_a_head_before_the_first_layer_has_only_what_is_outside() -> None:
    lines = layer_table([[]], [ForwardMetrics(1_000_000, 0)]).split("\n")
    assert lines[2].split() == ["outside", "layers", "1.000"]


def test_names_from_the_server_cannot_drive_the_terminal() -> None:
    text = layer_table([[LayerMetrics(0, "\x1b[2J", "\x1b]0;x\x07", 1, 1)]], [])
    assert "\x1b" not in text and "\x07" not in text


def test_layers_below_the_depth_that_is_shown_are_one_row() -> None:
    measured = Reading(0.25, "measured", "a meter")
    names = ["stem", "body.0.conv", "body.0.relu", "body.1", "body.1#2", "head.0"]
    records = [
        LayerMetrics(at, name, "Conv2d", 10 * at, 64 + at, cpu_ns=at, energy=measured) for at, name in enumerate(names)
    ]
    assert folded(records, None) == records
    found = folded(records, 1)
    assert [(one.name, one.layer_id, one.inference_ns, one.cpu_ns, one.energy.value) for one in found] == [
        ("stem", 0, 0, 0, 0.25),
        ("body", 4, 100, 10, 1.0),
        ("head", 5, 50, 5, 0.25),
    ]
    assert [one.name for one in folded(records, 2)] == ["stem", "body.0", "body.1", "body.1#2", "head.0"]
    assert found[1].output_bytes == 68 and found[1].layer_type == "4 layers"
