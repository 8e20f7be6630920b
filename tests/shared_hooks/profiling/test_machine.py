"""A machine is described by what its files say, under an id that gives away no serial number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shared_hooks.profiling.machine import cpu_quota, describe

SERIAL = "1421023049876"
JETSON = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "proc/device-tree/serial-number": SERIAL + "\0",
    "proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd42\n\nprocessor\t: 1\n"
    "CPU implementer\t: 0x41\nCPU part\t: 0xd42\n",
    "proc/meminfo": "MemTotal:        7802512 kB\nMemFree: 1 kB\n",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic",
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
    "var/lib/nvpmodel/status": "pmode:0002",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq": "729600\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1510400\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_min_freq": "729600\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_max_freq": "1728000\n",
}
BOX = {
    "etc/machine-id": SERIAL + "\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9354 32-Core Processor\n",
    "sys/class/dmi/id/board_vendor": "Supermicro\n",
    "sys/class/dmi/id/product_name": "AS-2015\n",
}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_jetson(tmp_path: Path) -> None:
    found = describe("cpu", tree(tmp_path, JETSON))
    assert found["board"] == "NVIDIA Jetson Orin Nano Developer Kit"
    assert found["cpu"] == "implementer 0x41, part 0xd42"
    assert found["cores"] == 2
    assert found["cpu_mhz"] == {"min": 729.6, "max": 1728.0}
    assert found["memory_bytes"] == 7802512 * 1024
    assert found["os"] == "Ubuntu 22.04.5 LTS, L4T R36.4.3"
    assert found["power_mode"] == "pmode:0002"


def test_a_box(tmp_path: Path) -> None:
    found = describe("cpu", tree(tmp_path, BOX))
    assert found["board"] == "Supermicro AS-2015"
    assert found["cpu"] == "AMD EPYC 9354 32-Core Processor"
    assert found["id_from"] == "serial numbers"


@pytest.mark.parametrize("files", [JETSON, BOX], ids=["jetson", "box"])
def test_the_serial_number_stays_home(tmp_path: Path, files: dict[str, str]) -> None:
    assert SERIAL not in json.dumps(describe("cpu", tree(tmp_path, files)))


def test_the_id_is_the_machines(tmp_path: Path) -> None:
    first = describe("cpu", tree(tmp_path / "a", BOX))["id"]
    assert describe("cpu", tree(tmp_path / "b", BOX))["id"] == first
    assert describe("cpu", tree(tmp_path / "c", {**BOX, "etc/machine-id": "another"}))["id"] != first
    assert describe("cuda:0", tree(tmp_path / "d", BOX))["id"] != first
    assert describe("cpu", tree(tmp_path / "e", {**BOX, "proc/cpuinfo": "model name : other\n"}))["id"] != first


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    found = describe("cpu", tmp_path)
    assert found["id_from"] == "host name"
    for key in ("board", "cpu", "cores", "cpu_mhz", "cpu_quota", "memory_bytes", "power_mode"):
        assert found[key] is None


def test_this_machine_as_json() -> None:
    found = describe(torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["threads"] == torch.get_num_threads()
    assert found["torch"] == torch.__version__


V1 = {"proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/edge/quarter\n1:memory:/m\n"}
V2 = {"proc/self/cgroup": "0::/user.slice/edge\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({**V2, "sys/fs/cgroup/user.slice/edge/cpu.max": "25000 100000\n"}, 0.25),
        ({**V2, "sys/fs/cgroup/user.slice/edge/cpu.max": "max 100000\n"}, None),
        ({**V2, "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                **V2,
                "sys/fs/cgroup/user.slice/cpu.max": "50000 100000\n",
                "sys/fs/cgroup/user.slice/edge/cpu.max": "max 100000",
            },
            0.5,
        ),
        ({"proc/self/cgroup": "0::/../../other\n", "sys/fs/cgroup/cpu.max": "20000 100000"}, 0.2),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/edge/quarter/cpu.cfs_quota_us": "2500",
                "sys/fs/cgroup/cpu,cpuacct/edge/quarter/cpu.cfs_period_us": "10000",
            },
            0.25,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/edge\n0::/\n",
                "sys/fs/cgroup/cpu/edge/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/edge/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({**V1, "sys/fs/cgroup/cpu,cpuacct/edge/cpu.cfs_quota_us": "2500"}, None),
        ({**V2, "sys/fs/cgroup/user.slice/edge/cpu.max": "rubbish here"}, None),
        ({"proc/self/cgroup": "nonsense"}, None),
        ({}, None),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(tree(tmp_path, files)) == quota
