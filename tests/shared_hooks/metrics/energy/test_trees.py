"""Every backend against machines as their kernels show them, whole and broken."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared_hooks.metrics import energy
from shared_hooks.metrics.energy import (
    Absent,
    Gpu,
    Integrated,
    Machine,
    Meters,
    MeterUnavailable,
    boards,
    find_meters,
)
from shared_hooks.metrics.energy.meter import read_text

TREES = Path(__file__).parent / "trees"


class Clock:
    """Time that passes on command."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class NoNvml:
    """The library of a machine without NVIDIA's driver."""

    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_DRIVER_NOT_LOADED = 9

    class NVMLError(Exception):
        def __init__(self, value: int, text: str) -> None:
            super().__init__(text)
            self.value = value

    def nvmlInit(self) -> None:
        raise self.NVMLError(12, "NVML Shared Library Not Found")


class Nvml(NoNvml):
    """GPUs as a list of what they answer: millijoules, milliwatts, per cent; None = "Not Supported"."""

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = gpus
        self.asked = 0

    def nvmlInit(self) -> None:
        self.asked += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        return next(gpu for gpu in self.gpus if gpu["uuid"] == uuid)

    def nvmlDeviceGetUUID(self, gpu: dict[str, Any]) -> str | bytes:
        return gpu["uuid"]

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: dict[str, Any]) -> int:
        return self._answer(gpu, "mJ")

    def nvmlDeviceGetPowerUsage(self, gpu: dict[str, Any]) -> int:
        return self._answer(gpu, "mW")

    def nvmlDeviceGetUtilizationRates(self, gpu: dict[str, Any]) -> Any:
        return SimpleNamespace(gpu=self._answer(gpu, "%"))

    def _answer(self, gpu: dict[str, Any], what: str) -> int:
        if gpu.get(what) is None:
            raise self.NVMLError(3, "Not Supported")
        return gpu[what]


def no_zeus() -> Any:
    return SimpleNamespace()  # an unrelated package of that name


def machine(root: Path, clock: Clock | None = None, **more: Any) -> Machine:
    """A tree as a machine; commands answer from its files."""

    def run(command: Sequence[str]) -> str:
        file = root / f"{'-'.join(command)}.txt"
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "not installed", command[0])
        return file.read_text()

    more = {"run": run, "nvml": NoNvml(), "zeus": no_zeus(), **more}
    return Machine(root, now=clock or Clock(), **more)


def copy(tree: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(TREES / tree, tmp_path / tree))


def domains(meters: Sequence[energy.Meter]) -> list[str]:
    return [meter.domain for meter in meters]


# -- RAPL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ("intel-laptop", ["package-0"]),  # neither its parts, nor psys around it, nor the same by MMIO
        ("xeon-two-sockets", ["package-0", "dram of package-0", "package-1", "dram of package-1"]),
        ("amd-ryzen", ["package-0"]),
    ],
)
def test_rapl_counts_nothing_twice(tree: str, expected: list[str]) -> None:
    found = boards.find_rapl(machine(TREES / tree))
    assert domains(found) == expected
    assert [meter.read() for meter in found] == [0.0] * len(expected)
    assert domains(Meters(tuple(found)).total()) == expected


def test_rapl_reads_joules(tmp_path: Path) -> None:
    root = copy("amd-ryzen", tmp_path)
    (meter,) = boards.find_rapl(machine(root))
    counter = root / boards.POWERCAP / "intel-rapl:0" / "energy_uj"
    counter.write_text("43500000\n")
    assert meter.read() == pytest.approx(2.5)
    assert meter.read() == pytest.approx(2.5)


def test_rapl_counters_start_again_at_zero(tmp_path: Path) -> None:
    root = copy("amd-ryzen", tmp_path)
    counter = root / boards.POWERCAP / "intel-rapl:0" / "energy_uj"
    counter.write_text("65532000000\n")
    (meter,) = boards.find_rapl(machine(root))
    counter.write_text("1389013\n")
    assert meter.read() == pytest.approx((65532610987 - 65532000000 + 1389013) / 1e6)
    counter.write_text("2389013\n")
    assert meter.read() == pytest.approx((65532610987 - 65532000000 + 2389013) / 1e6)


def test_rapl_without_permission_names_the_file() -> None:
    def read(path: Path) -> str:
        if path.name == "energy_uj":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_text(path)

    here = machine(TREES / "intel-laptop", read=read)
    with pytest.raises(
        MeterUnavailable, match="no permission to read /sys/class/powercap/intel-rapl:0/energy_uj"
    ) as caught:
        boards.find_rapl(here)
    assert not isinstance(caught.value, Absent)
    meters = find_meters(machine=here)
    assert meters.found == ()
    with pytest.raises(MeterUnavailable, match=r"^no energy meter: RAPL: no permission to read .*energy_uj"):
        meters.total()


def test_rapl_one_package_that_cannot_be_read_spoils_the_sum() -> None:
    def read(path: Path) -> str:
        if path.parent.name == "intel-rapl:1":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_text(path)

    with pytest.raises(MeterUnavailable, match="intel-rapl:1"):
        boards.find_rapl(machine(TREES / "xeon-two-sockets", read=read))


@pytest.mark.parametrize("content", ["", "garbage\n", "-5\n", "12.5\n", "0x10\n", "\0\0"])
def test_rapl_with_garbage_is_no_meter(tmp_path: Path, content: str) -> None:
    root = copy("amd-ryzen", tmp_path)
    (root / boards.POWERCAP / "intel-rapl:0" / "energy_uj").write_text(content)
    with pytest.raises(MeterUnavailable, match="energy_uj holds .* not a number"):
        boards.find_rapl(machine(root))


def test_rapl_file_that_vanishes(tmp_path: Path) -> None:
    root = copy("amd-ryzen", tmp_path)
    (meter,) = boards.find_rapl(machine(root))
    (root / boards.POWERCAP / "intel-rapl:0" / "energy_uj").unlink()
    with pytest.raises(MeterUnavailable, match="energy_uj: No such file"):
        meter.read()


# -- INA3221 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "domain", "watts"),
    [
        ("jetson-orin-nano", "VDD_IN", 5.064 * 0.992),
        ("jetson-agx-orin", "VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0", 19.152 * (0.208 + 0.056) + 5.024 * 0.728),
        ("jetson-nano", "POM_5V_IN", 1.910),
        ("jetson-agx-xavier", "GPU + CPU + SOC + CV + VDDRQ + SYS5V", 19.12 * 0.176 + 5.04 * 0.4),
    ],
)
def test_a_jetson_counts_what_supplies_the_board(tree: str, domain: str, watts: float) -> None:
    clock = Clock()
    meters = find_meters(machine=machine(TREES / tree, clock, nvml=Nvml({"uuid": "GPU-0", "mJ": 1})))
    (meter,) = meters.total(Gpu(0, "GPU-0"))
    assert (meter.domain, meter.scope) == (domain, "board")
    assert meter.read() == 0
    clock.now += 2
    assert meter.read() == pytest.approx(2 * watts)


def test_a_jetson_is_not_asked_by_nvml() -> None:
    library = Nvml({"uuid": "GPU-0", "mJ": None, "mW": None})
    meters = find_meters(machine=machine(TREES / "jetson-orin-nano", nvml=library))
    assert library.asked == 0
    assert ("NVML", "not asked on a Jetson") in meters.absent


def test_rails_of_an_unknown_board_are_not_added_up(tmp_path: Path) -> None:
    root = copy("jetson-orin-nano", tmp_path)
    (root / "sys/class/hwmon/hwmon1/in1_label").write_text("VDD_NEW\n")
    with pytest.raises(MeterUnavailable, match="no rail known to supply the board among VDD_CPU_GPU_CV, VDD_NEW"):
        boards.find_ina3221(machine(root))


def test_a_rail_that_vanishes(tmp_path: Path) -> None:
    root = copy("jetson-orin-nano", tmp_path)
    (meter,) = boards.find_ina3221(machine(root))
    (root / "sys/class/hwmon/hwmon1/curr1_input").write_text("lots\n")
    with pytest.raises(MeterUnavailable, match="curr1_input holds 'lots'"):
        meter.read()
    shutil.rmtree(root / "sys")
    with pytest.raises(MeterUnavailable, match="in1_input: No such file"):
        meter.read()


# -- Raspberry Pi -------------------------------------------------------------------------------------------------

PI_WATTS = (
    0.1 * 3.7 + 0.11 * 3.3 + 0.15 * 1.8 + 0.006 * 1.1 + 0.25 * 1.1 + 0.3 * 0.8 + 1.5 * 0.9 + 6e-5 * 3.3
    + 0.0035 * 0.8 + 0.02 * 5.1
)  # fmt: skip


def test_a_pi_5_adds_up_the_rails_of_its_power_chip() -> None:
    clock = Clock()
    meters = find_meters(machine=machine(TREES / "raspberry-pi-5", clock))
    (meter,) = meters.total()
    assert meter.scope == "board"
    clock.now += 10
    assert meter.read() == pytest.approx(10 * PI_WATTS, rel=1e-6)


def test_a_pi_4_has_no_such_chip() -> None:
    with pytest.raises(MeterUnavailable, match="Command not registered"):
        boards.find_vcgencmd(machine(TREES / "raspberry-pi-4"))


def _raises(error: Exception) -> Callable[[Sequence[str]], str]:
    def run(command: Sequence[str]) -> str:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(2, "no"), "vcgencmd is not installed"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (subprocess.CalledProcessError(255, "vcgencmd"), "exit status 255"),
        (subprocess.TimeoutExpired("vcgencmd", 2), "no answer in time"),
    ],
)
def test_a_pi_whose_command_fails(error: Exception, text: str) -> None:
    with pytest.raises(MeterUnavailable, match=text):
        boards.find_vcgencmd(machine(TREES / "raspberry-pi-5", run=_raises(error)))


@pytest.mark.parametrize("printed", ["", "VDD_CORE_A current(7)=x\n", "VDD_CORE_A current(7)=1.0A\n", "\0\xff" * 50])
def test_a_pi_that_prints_something_else(printed: str) -> None:
    with pytest.raises(MeterUnavailable, match="shows no rails"):
        boards.find_vcgencmd(machine(TREES / "raspberry-pi-5", run=lambda command: printed))


def test_commands_are_not_tried_on_other_machines(tmp_path: Path) -> None:
    with pytest.raises(Absent):
        boards.find_vcgencmd(machine(tmp_path, run=_raises(AssertionError())))


# -- GPUs ---------------------------------------------------------------------------------------------------------


def test_nvml_counts_millijoules(tmp_path: Path) -> None:
    gpu = {"uuid": b"GPU-aa", "mJ": 5000}
    (meter,) = boards.find_nvml(machine(tmp_path, nvml=Nvml(gpu)))
    gpu["mJ"] = 7500
    assert (meter.read(), meter.scope, meter.unit) == (7.5, "gpu", "GPU-aa")


def test_nvml_samples_power_where_there_is_no_counter(tmp_path: Path) -> None:
    clock = Clock()
    gpu = {"uuid": "GPU-aa", "mW": 100_000}
    (meter,) = boards.find_nvml(machine(tmp_path, clock, nvml=Nvml(gpu)))
    clock.now += 0.5
    gpu["mW"] = 200_000
    assert meter.read() == pytest.approx(75.0)


def test_nvml_that_supports_nothing_is_no_meter(tmp_path: Path) -> None:
    with pytest.raises(MeterUnavailable, match="GPU 0: Not Supported"):
        boards.find_nvml(machine(tmp_path, nvml=Nvml({"uuid": "GPU-aa"})))


def test_a_gpu_that_falls_off_the_bus(tmp_path: Path) -> None:
    gpu: dict[str, Any] = {"uuid": "GPU-aa", "mJ": 5000}
    (meter,) = boards.find_nvml(machine(tmp_path, nvml=Nvml(gpu)))
    gpu["mJ"] = None
    with pytest.raises(MeterUnavailable, match="NVML GPU 0"):
        meter.read()


def test_a_models_own_gpu_is_added_to_the_processor() -> None:
    library = Nvml({"uuid": "GPU-aa", "mJ": 1}, {"uuid": "GPU-bb", "mJ": 1})
    meters = find_meters(machine=machine(TREES / "amd-ryzen", nvml=library))
    assert domains(meters.total()) == ["package-0"]
    assert domains(meters.total(Gpu(0, "GPU-bb"))) == ["package-0", "GPU 1"]
    with pytest.raises(MeterUnavailable):
        meters.total(Gpu(0, "GPU-cc"))


def test_without_uuids_an_index_counts_unless_gpus_were_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    meters = find_meters(machine=machine(TREES / "amd-ryzen", nvml=Nvml({"uuid": "GPU-aa", "mJ": 1})))
    assert domains(meters.total(Gpu(0))) == ["package-0", "GPU 0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(MeterUnavailable):
        meters.total(Gpu(0))


class Zeus:
    """What `zeus.device.get_gpus` gives."""

    def __init__(self, *millijoules: int | None) -> None:
        self.millijoules = list(millijoules)

    def get_gpus(self) -> Zeus:
        return self

    def __len__(self) -> int:
        return len(self.millijoules)

    def supports_get_total_energy_consumption(self, index: int) -> bool:
        return self.millijoules[index] is not None

    def get_total_energy_consumption(self, index: int) -> int:
        value = self.millijoules[index]
        if value is None:
            raise RuntimeError("amdsmi: gone")
        return value


def test_zeus_counts_gpus_that_nvml_does_not_know(tmp_path: Path) -> None:
    zeus = Zeus(2000, None)
    meters = find_meters(machine=machine(tmp_path, zeus=zeus))
    (meter,) = meters.total(Gpu(0, "GPU-of-amd"))
    assert (meter.name, meter.read()) == ("zeus GPU 0", 2.0)
    zeus.millijoules[0] = None
    with pytest.raises(MeterUnavailable, match="gone"):
        meter.read()


def test_another_package_called_zeus_is_no_meter(tmp_path: Path) -> None:
    with pytest.raises(MeterUnavailable, match="get_gpus"):
        boards.find_zeus(machine(tmp_path))


# -- together -----------------------------------------------------------------------------------------------------


def test_a_machine_with_nothing_says_so_once(tmp_path: Path) -> None:
    meters = find_meters(machine=machine(tmp_path, zeus=Zeus()))
    assert meters.found == ()
    with pytest.raises(MeterUnavailable) as caught:
        meters.total()
    assert str(caught.value) == "no energy meter among NVML, RAPL, INA3221, vcgencmd, zeus"
    assert {name for name, _ in (*meters.missing, *meters.absent)} == {name for name, _ in energy.BACKENDS}


def test_a_backend_that_breaks_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(here: Machine) -> list[energy.Meter]:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(energy, "BACKENDS", (("broken", broken), *energy.BACKENDS))
    meters = find_meters(machine=machine(TREES / "amd-ryzen"))
    assert ("broken", "ZeroDivisionError: oops") in meters.missing
    assert domains(meters.total()) == ["package-0"]


def test_the_machine_the_tests_run_on_can_be_asked() -> None:
    meters = find_meters()
    assert len(meters.missing) + len(meters.absent) + len(meters.found) >= 1


def test_power_is_integrated_by_trapezoids() -> None:
    clock, watts = Clock(), iter([10.0, 20.0, 0.0])
    meter = Integrated("x", "x", "board", lambda: next(watts), period_s=0.1, now=clock)
    assert meter.read() == 0
    clock.now += 1
    assert meter.read() == pytest.approx(15)
    clock.now -= 5  # a clock that steps back takes nothing away
    assert meter.read() == pytest.approx(15)
