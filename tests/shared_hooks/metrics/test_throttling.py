"""What holds a machine back, against machines as their kernels show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared_hooks.doctor import CheckLevel, held_back
from shared_hooks.metrics.sampler import Throttling, throttling
from tests.shared_hooks.metrics.energy.test_trees import copy, machine

CALM = {
    "raspberry-pi-4": ("cpu-thermal", 52.582),
    "raspberry-pi-5": ("cpu-thermal", 52.582),
    "jetson-nano": ("CPU-therm", 41.5),
    "jetson-orin-nano": ("gpu-thermal", 50.156),
    "intel-laptop": ("x86_pkg_temp", 61.0),
    "amd-ryzen": None,
}


@pytest.mark.parametrize("tree", CALM)
def test_nothing_holds_back(tree: str, tmp_path: Path) -> None:
    found = throttling(machine(copy(tree, tmp_path)))
    assert found.now == ()
    assert found.hottest == CALM[tree]
    assert found.since(found) == ()


@pytest.mark.parametrize(
    ("bits", "now", "since_boot"),
    [
        ("0x50005", ("under-voltage", "heat (firmware)"), ("under-voltage", "heat (firmware)")),
        ("0x50000", (), ("under-voltage", "heat (firmware)")),
        ("0x80008", ("the soft limit of temperature",), ("the soft limit of temperature",)),
        ("0x20002", ("the firmware's limit of frequency",), ("the firmware's limit of frequency",)),
    ],
)
def test_a_raspberry_pi_by_its_firmware(
    bits: str, now: tuple[str, ...], since_boot: tuple[str, ...], tmp_path: Path
) -> None:
    board = copy("raspberry-pi-5", tmp_path)
    (board / "vcgencmd-get_throttled.txt").write_text(f"throttled={bits}\n")
    found = throttling(machine(board))
    assert found.now == now
    assert tuple(found.counts) == since_boot


@pytest.mark.parametrize("printed", ["", "throttled=\n", "throttled=0xfffffffffff\n", "VCHI initialization failed\n"])
def test_a_firmware_that_answers_something_else(printed: str, tmp_path: Path) -> None:
    board = copy("raspberry-pi-4", tmp_path)
    (board / "vcgencmd-get_throttled.txt").write_text(printed)
    assert throttling(machine(board)).now == ()


def test_a_clock_that_is_lowered_and_fans_that_turn(tmp_path: Path) -> None:
    board = copy("jetson-orin-nano", tmp_path)
    (board / "sys/class/thermal/cooling_device0/cur_state").write_text("3\n")
    assert throttling(machine(board)).now == ()
    (board / "sys/class/thermal/cooling_device2/cur_state").write_text("5\n")
    assert throttling(machine(board)).now == ("devfreq-17000000.gpu at step 5 of 8",)


def test_events_in_between(tmp_path: Path) -> None:
    board = copy("jetson-orin-nano", tmp_path)
    before = throttling(machine(board))
    (board / "sys/class/hwmon/hwmon2/oc2_event_cnt").write_text("4\n")
    assert throttling(machine(board)).since(before) == ("over-current",)


def test_throttling_within_the_interval_counts() -> None:
    assert Throttling(counts={"heat": 8}).since(Throttling(counts={"heat": 7})) == ("heat",)
    assert Throttling(counts={"heat": 7}).since(Throttling(counts={"heat": 7})) == ()
    assert Throttling().since(Throttling(now=("heat (firmware)",))) == ("heat (firmware)",)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    board = copy("intel-laptop", tmp_path)
    (board / "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count").write_text("?")
    (board / "sys/class/thermal/cooling_device0/cur_state").unlink()
    (board / "sys/class/thermal/thermal_zone0/temp").write_text("-40000\n")
    assert throttling(machine(board)) == Throttling((), {"heat": 7}, None)


@pytest.mark.parametrize(
    ("bits", "level", "says"),
    [
        ("0x0", CheckLevel.OK, "none; hottest: cpu-thermal, 53 degrees"),
        ("0x10000", CheckLevel.WARNING, "not now, but since boot: under-voltage; hottest: cpu-thermal, 53 degrees"),
        ("0x10001", CheckLevel.WARNING, "under-voltage; hottest: cpu-thermal, 53 degrees"),
    ],
)
def test_a_doctor_says_so(bits: str, level: CheckLevel, says: str, tmp_path: Path) -> None:
    board = copy("raspberry-pi-4", tmp_path)
    (board / "vcgencmd-get_throttled.txt").write_text(f"throttled={bits}\n")
    (found,) = held_back(machine(board))
    assert (found.level, found.says) == (level, says)
