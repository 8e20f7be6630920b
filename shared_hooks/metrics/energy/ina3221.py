"""The INA3221 power monitors of NVIDIA's Jetson boards, in both layouts of sysfs.

* hwmon (JetPack 5 and later; Linux, Documentation/hwmon/ina3221.rst): ``inN_label``, ``inN_input`` in millivolts and
  ``currN_input`` in milliamperes, N from 1 to 3. Higher numbers are shunt voltages and their sum.
* NVIDIA's older driver ``ina3221x`` (JetPack 4): ``rail_name_N``, ``in_powerN_input`` in milliwatts, or
  ``in_voltageN_input`` and ``in_currentN_input``, N from 0 to 2, under ``iio:deviceM`` or ``iio_device``.

One rail supplies the whole module on most boards, and the others are parts of it. The AGX boards have none; there the
rails named in `SETS` run beside each other and are added up. Names: Jetson Linux Developer Guide, "Power Consumption".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shared_hooks.metrics.energy.meter import Absent, Integrated, Machine, Meter, MeterUnavailable

TOTALS = ("VDD_IN", "POM_5V_IN", "5V_IN", "VIN", "VIN_SYS")
"""Rails that supply the module, Jetson Nano to Orin NX and Thor."""

SETS = (
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),  # AGX Xavier
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),  # AGX Orin; VDDQ_VDD2_1V8AO comes from VIN_SYS_5V0
)

PERIOD_S = 0.1
"""Averaged by the chip, and read over a slow bus."""

Watts = Callable[[], float]


def find(machine: Machine) -> list[Meter]:
    """One meter: the board's."""
    rails = {**_older(machine), **_hwmon(machine)}
    if not rails:
        raise Absent("no INA3221 in /sys/class/hwmon or /sys/bus/i2c/drivers/ina3221x")
    for names in (*((total,) for total in TOTALS), *SETS):
        if all(name in rails for name in names):
            domain = " + ".join(names)
            meter = Integrated(
                f"INA3221 {domain}",
                domain,
                "board",
                _sum([rails[name] for name in names]),
                period_s=PERIOD_S,
                now=machine.now,
            )
            meter.read()  # raises here and now where a file cannot be read
            return [meter]
    raise MeterUnavailable(f"no rail known to supply the board among {', '.join(sorted(rails))}")


def _hwmon(machine: Machine) -> dict[str, Watts]:
    rails: dict[str, Watts] = {}
    for chip in sorted(machine.path("sys/class/hwmon").glob("hwmon*")):
        if not (chip / "name").exists() or machine.text(chip / "name") != "ina3221":
            continue
        for number in (1, 2, 3):
            label = chip / f"in{number}_label"
            if label.exists() and (chip / f"curr{number}_input").exists():
                rails[machine.text(label)] = _product(machine, chip / f"in{number}_input", chip / f"curr{number}_input")
    return rails


def _older(machine: Machine) -> dict[str, Watts]:
    rails: dict[str, Watts] = {}
    for label in sorted(machine.path("sys/bus/i2c/drivers/ina3221x").glob("*/iio*device*/rail_name_[0-2]")):
        number, folder = label.name[-1], label.parent
        power = folder / f"in_power{number}_input"
        rails[machine.text(label)] = (
            _milliwatts(machine, power)
            if power.exists()
            else _product(machine, folder / f"in_voltage{number}_input", folder / f"in_current{number}_input")
        )
    return rails


def _sum(parts: list[Watts]) -> Watts:
    return lambda: sum(part() for part in parts)


def _milliwatts(machine: Machine, path: Path) -> Watts:
    return lambda: machine.number(path) / 1e3


def _product(machine: Machine, millivolts: Path, milliamperes: Path) -> Watts:
    return lambda: machine.number(millivolts) * machine.number(milliamperes) / 1e6
