"""Read the meters of processors, boards and GPUs: RAPL, Raspberry Pi, Jetson's INA3221, zeus, NVML.

NVML's energy counter (nvmlDeviceGetTotalEnergyConsumption, millijoules; Volta and later) and power
(nvmlDeviceGetPowerUsage, milliwatts; sampled where there is no counter) update about every 100 ms and cover whole GPUs.
On a Jetson the library loads but answers "not supported", so it is not used there.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared_hooks.metrics.energy.meter import Absent, Gpu, Integrated, Machine, Meter, MeterUnavailable, Scope

# Intel's and AMD's running average power limit counters, by the kernel's powercap tree.
#
# Each zone ``intel-rapl:N`` counts microjoules in ``energy_uj`` up to ``max_energy_range_uj``, then starts again at 0
# (Linux, Documentation/power/powercap/powercap.rst). A package's sub-zones ``core`` and ``uncore`` are parts of it;
# ``dram`` is not: it counts the memory beside it. ``psys`` covers everything, packages included, where the board
# wires it. ``intel-rapl-mmio`` counts the same packages a second time and is left out. AMD's zones carry Intel's
# name. Since Linux 5.10 only root may read the counters.

POWERCAP = "sys/class/powercap"


class RaplMeter:
    """The energy counter of one RAPL zone."""

    period_s = 0.02
    unit = ""

    def __init__(self, machine: Machine, zone: Path, domain: str, scope: Scope) -> None:
        self.name = f"RAPL {domain}"
        self.domain = domain
        self.scope: Scope = scope
        self._machine = machine
        self._file = zone / "energy_uj"
        self._range = machine.number(zone / "max_energy_range_uj")
        self._last = machine.number(self._file)
        self._microjoules = 0.0

    def read(self) -> float:
        now = self._machine.number(self._file)
        # the counter starts again at 0; twice between two samples would take a minute of the largest machines
        self._microjoules += now - self._last if now >= self._last else now + self._range - self._last
        self._last = now
        return self._microjoules / 1e6


def find_rapl(machine: Machine) -> list[Meter]:
    """Return one meter per package, and one per package's memory. All or none: a partial sum would be wrong."""
    tree = machine.path(POWERCAP)
    zones = sorted(tree.glob("intel-rapl:*"))
    if not zones:
        raise Absent(f"no /{POWERCAP}/intel-rapl:*")
    found: list[Meter] = []
    for zone in zones:
        label = machine.text(zone / "name")
        parents = zone.name.split(":")[:-1]
        top = len(parents) == 1
        if top and label.startswith("package"):
            found.append(RaplMeter(machine, zone, label, "package"))
        elif not top and label == "dram":
            beside = machine.text(tree / ":".join(parents) / "name")
            found.append(RaplMeter(machine, zone, f"dram of {beside}", "memory"))
    if not found:
        raise MeterUnavailable(f"/{POWERCAP} has no package")
    return found


# The power chip of the Raspberry Pi 5 and similar ones, by ``vcgencmd pmic_read_adc``.
#
# It prints a line for each rail's current, ``VDD_CORE_A current(7)=1.42880000A``, and one for its voltage,
# ``VDD_CORE_V volt(15)=0.90659250V``. Rails with both are multiplied and added up. That is the output of the chip's
# own rails: the losses of its converters, and devices on the 5 V input (USB, fan, HATs), are not in it, since the
# input's current is not measured. Older boards answer "Command not registered".

RAIL_LINE = re.compile(r"^\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=([0-9]+(?:\.[0-9]+)?)[AV]\s*$", re.MULTILINE)
VCGENCMD_PERIOD_S = 0.25
"""Seconds between readings, each of which starts a process."""


def find_vcgencmd(machine: Machine) -> list[Meter]:
    """Return the Raspberry Pi's board meter, which covers the rails that its power chip measures."""
    if "Raspberry Pi" not in machine.board:
        raise Absent("not a Raspberry Pi")
    meter = Integrated(
        "PMIC rails (without 5 V input losses)",
        "PMIC rails",
        "board",
        lambda: watts(machine),
        period_s=VCGENCMD_PERIOD_S,
        now=machine.now,
    )
    meter.read()
    return [meter]


def watts(machine: Machine) -> float:
    """Return the sum over all rails with a current and a voltage."""
    try:
        printed = machine.run(["vcgencmd", "pmic_read_adc"])
    except FileNotFoundError as error:
        raise MeterUnavailable("vcgencmd is not installed") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise MeterUnavailable(f"vcgencmd pmic_read_adc: {_short(error)}") from error
    found: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for rail, what, value in RAIL_LINE.findall(printed):
        found[what][rail] = float(value)
    pairs = found["A"].keys() & found["V"].keys()
    if not pairs:
        first = printed.strip().partition("\n")[0][:60]
        raise MeterUnavailable(f"vcgencmd pmic_read_adc shows no rails: {first!r}")
    return sum(found["A"][rail] * found["V"][rail] for rail in sorted(pairs))


def _short(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit status {error.returncode}"
    return "no answer in time" if isinstance(error, subprocess.TimeoutExpired) else str(error)[:80]


# The INA3221 power monitors of NVIDIA's Jetson boards, in both layouts of sysfs.
#
# * hwmon (JetPack 5 and later; Linux, Documentation/hwmon/ina3221.rst): ``inN_label``, ``inN_input`` in millivolts and
#   ``currN_input`` in milliamperes, N from 1 to 3. Higher numbers are shunt voltages and their sum.
# * NVIDIA's older driver ``ina3221x`` (JetPack 4): ``rail_name_N``, ``in_powerN_input`` in milliwatts, or
#   ``in_voltageN_input`` and ``in_currentN_input``, N from 0 to 2, under ``iio:deviceM`` or ``iio_device``.
#
# One rail supplies the whole module on most boards, and the others are parts of it. The AGX boards have none; there the
# rails named in `SETS` run beside each other and are added up. Names: Jetson Linux Developer Guide, "Power
# Consumption".

TOTALS = ("VDD_IN", "POM_5V_IN", "5V_IN", "VIN", "VIN_SYS")
"""Names of the rails that supply the whole module, Jetson Nano to Orin NX and Thor."""

SETS = (
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),  # AGX Xavier
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),  # AGX Orin; VDDQ_VDD2_1V8AO comes from VIN_SYS_5V0
)

INA3221_PERIOD_S = 0.1
"""Seconds between readings, which the chip averages and a slow bus carries."""

Watts = Callable[[], float]


def find_ina3221(machine: Machine) -> list[Meter]:
    """Return the Jetson's board meter."""
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
                period_s=INA3221_PERIOD_S,
                now=machine.now,
            )
            meter.read()  # raises here where a file cannot be read
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


# GPUs that only the zeus library supports (AMD's, by amdsmi), where it is installed: ``pip install "isthmus[zeus]"``.
#
# ``zeus.device.get_gpus()`` gives the GPUs that this process may use, in torch's order;
# ``get_total_energy_consumption(index)`` is in millijoules.


class ZeusMeter:
    """The energy counter of one GPU, through zeus."""

    scope: Scope = "gpu"
    period_s = 0.1

    def __init__(self, gpus: Any, index: int) -> None:
        self.name = f"zeus GPU {index}"
        self.domain = f"GPU {index}"
        self.unit = str(index)
        self._gpus = gpus
        self._index = index
        self.read()

    def read(self) -> float:
        try:
            return float(self._gpus.get_total_energy_consumption(self._index)) / 1e3
        except Exception as error:  # each vendor's library has errors of its own
            raise MeterUnavailable(f"{self.name}: {error}") from error


def find_zeus(machine: Machine) -> list[Meter]:
    """Return one meter for each GPU with an energy counter."""
    try:
        zeus = importlib.import_module("zeus.device") if machine.zeus is None else machine.zeus
    except ImportError as error:
        raise Absent("not installed") from error
    if machine.is_jetson:
        raise Absent("not asked on a Jetson")
    try:
        gpus = zeus.get_gpus()
        count = len(gpus)
        counting = [index for index in range(count) if gpus.supports_get_total_energy_consumption(index)]
    except Exception as error:
        raise MeterUnavailable(str(error)[:100] or type(error).__name__) from error
    if not count:
        raise Absent("no GPU")
    if not counting:
        raise MeterUnavailable("no GPU that counts its energy")
    return [ZeusMeter(gpus, index) for index in counting]


PERIOD_S = 0.1


class NvmlCounter:
    """The energy counter of one GPU, through NVML."""

    scope: Scope = "gpu"
    period_s = PERIOD_S

    def __init__(self, nvml: Any, handle: Any, index: int, unit: str) -> None:
        self.name = f"NVML GPU {index}"
        self.domain = f"GPU {index}"
        self.unit = unit
        self._nvml = nvml
        self._handle = handle
        self.read()

    def read(self) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError as error:
            raise MeterUnavailable(f"{self.name}: {error}") from error


def find_nvml(machine: Machine) -> list[Meter]:
    """Return one meter per GPU with an energy counter or power reading. Raises MeterUnavailable if there are none."""
    nvml = load(machine)
    found: list[Meter] = []
    reasons: list[str] = []
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise MeterUnavailable(f"{error}") from error
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(_meter(nvml, handle, index, _text(nvml.nvmlDeviceGetUUID(handle)), machine))
        except nvml.NVMLError as error:
            reasons.append(f"GPU {index}: {error}")
        except MeterUnavailable as error:
            reasons.append(str(error))
    if not found:
        raise MeterUnavailable("; ".join(dict.fromkeys(reasons)) or "no GPU")
    return found


def load(machine: Machine) -> Any:
    """Load and initialise NVML. Raises MeterUnavailable."""
    if machine.is_jetson:
        raise Absent("not asked on a Jetson")
    nvml = machine.nvml
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise Absent("nvidia-ml-py is not installed") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # no NVIDIA driver means no usable NVIDIA GPU
        absent = error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        raise (Absent if absent else MeterUnavailable)(str(error)) from error
    return nvml


class NvmlUtilisation:
    """Return the per cent of time in which the GPU ran kernels, as last averaged by the driver. Raises
    MeterUnavailable.
    """

    name = "NVML GPU utilisation"
    period_s = PERIOD_S

    def __init__(self, machine: Machine, gpu: Gpu) -> None:
        self._nvml = load(machine)
        try:
            self._handle = (
                self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                if gpu.uuid
                else self._nvml.nvmlDeviceGetHandleByIndex(gpu.index)
            )
        except self._nvml.NVMLError as error:
            raise MeterUnavailable(f"{self.name}: {error}") from error
        self.read()

    def read(self) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError as error:
            raise MeterUnavailable(f"{self.name}: {error}") from error


def _meter(nvml: Any, handle: Any, index: int, unit: str, machine: Machine) -> Meter:
    try:
        counter: Meter = NvmlCounter(nvml, handle, index, unit)
        return counter
    except MeterUnavailable:
        pass

    def watts() -> float:
        try:
            return float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3
        except nvml.NVMLError as error:
            raise MeterUnavailable(f"NVML GPU {index}: {error}") from error

    meter = Integrated(
        f"NVML GPU {index} power", f"GPU {index}", "gpu", watts, period_s=PERIOD_S, unit=unit, now=machine.now
    )
    meter.read()
    return meter


def _text(value: Any) -> str:
    """Return text; older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
