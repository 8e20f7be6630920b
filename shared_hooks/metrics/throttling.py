"""What holds a processor or a GPU back: heat, a weak power supply, a limit of current.

Read where the drivers show it:

* any Linux: cooling devices that are not fans and not at step 0, and the temperature of the hottest zone (Linux,
  Documentation/driver-api/thermal/sysfs-api.rst)
* x86: ``thermal_throttle/package_throttle_count``, which counts since boot
* a Raspberry Pi: ``vcgencmd get_throttled``, bits for now and since boot (Raspberry Pi documentation, vcgencmd)
* a Jetson: ``ocN_event_cnt`` of the hwmon ``soctherm_oc``, over-current since boot (Jetson Linux Developer Guide)
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shared_hooks.metrics.energy.meter import Machine, MeterUnavailable

BITS: Final = ("under-voltage", "the firmware's limit of frequency", "heat (firmware)", "the soft limit of temperature")
"""A Raspberry Pi's reasons: bits 0 to 3 for now, 16 to 19 since boot."""
_SLOWS: Final = re.compile(r"cpufreq|devfreq|^Processor$|-balanced$")
"""Types of cooling devices that lower a clock; others are fans."""
_THROTTLED: Final = re.compile(r"^throttled=0x([0-9a-fA-F]{1,8})\s*$")


@dataclass(frozen=True)
class Throttling:
    """At one moment. ``now``: reasons that hold; ``counts``: events since boot, by reason; bits count once."""

    now: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    hottest: tuple[str, float] | None = None
    """The hottest zone and its temperature in degrees Celsius."""

    def since(self, before: Throttling) -> tuple[str, ...]:
        """Reasons that held at ``before`` or hold now, and those whose events became more in between."""
        more = [reason for reason, count in self.counts.items() if count > before.counts.get(reason, 0)]
        return tuple(dict.fromkeys((*before.now, *self.now, *more)))


def throttling(machine: Machine | None = None) -> Throttling:
    """This machine's, or a recorded one's. What cannot be read is left out: most machines show a part of it."""
    machine = machine or Machine()
    bits = _raspberry_pi(machine)
    now = [*(reason for bit, reason in enumerate(BITS) if bits >> bit & 1), *_cooling(machine)]
    counts = {reason: 1 for bit, reason in enumerate(BITS) if bits >> (16 + bit) & 1}
    counts.update(_events(machine))
    zones = list(_zones(machine))
    return Throttling(tuple(now), counts, max(zones, key=lambda zone: zone[1], default=None))


def _raspberry_pi(machine: Machine) -> int:
    if "Raspberry Pi" not in machine.board:
        return 0
    try:
        printed = _THROTTLED.match(machine.run(["vcgencmd", "get_throttled"]))
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(printed[1], 16) if printed else 0


def _cooling(machine: Machine) -> Iterator[str]:
    for device in sorted(machine.path("sys/class/thermal").glob("cooling_device*")):
        try:
            kind, step = machine.text(device / "type"), machine.number(device / "cur_state")
            if step and _SLOWS.search(kind):
                yield f"{kind} at step {step:g} of {machine.number(device / 'max_state'):g}"
        except MeterUnavailable:  # intel_powerclamp's state is -1 while it does nothing
            continue


def _events(machine: Machine) -> Iterator[tuple[str, int]]:
    for reason, folder, pattern in (
        ("heat", "sys/devices/system/cpu", "cpu*/thermal_throttle/package_throttle_count"),
        ("over-current", "sys/class/hwmon", "hwmon*/oc*_event_cnt"),
    ):
        if files := sorted(machine.path(folder).glob(pattern)):
            yield reason, sum(_count(machine, file) for file in files)


def _count(machine: Machine, file: Path) -> int:
    try:
        return int(machine.number(file))
    except MeterUnavailable:
        return 0


def _zones(machine: Machine) -> Iterator[tuple[str, float]]:
    for zone in sorted(machine.path("sys/class/thermal").glob("thermal_zone*")):
        try:
            yield machine.text(zone / "type"), machine.number(zone / "temp") / 1e3
        except MeterUnavailable:  # a zone that is switched off answers with an error, one below zero is not the hottest
            continue
