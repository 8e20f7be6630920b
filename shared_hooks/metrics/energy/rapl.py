"""Intel's and AMD's running average power limit counters, by the kernel's powercap tree.

Each zone ``intel-rapl:N`` counts microjoules in ``energy_uj`` up to ``max_energy_range_uj``, then starts again at 0
(Linux, Documentation/power/powercap/powercap.rst). A package's sub-zones ``core`` and ``uncore`` are parts of it;
``dram`` is not: it counts the memory beside it. ``psys`` holds everything, packages included, where the maker wired it.
``intel-rapl-mmio`` counts the same packages a second time and is left out. AMD's zones carry Intel's name. Since Linux
5.10 only root may read the counters.
"""

from __future__ import annotations

from pathlib import Path

from shared_hooks.metrics.energy.meter import Absent, Machine, Meter, MeterUnavailable, Scope

TREE = "sys/class/powercap"


class RaplMeter:
    """One zone."""

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


def find(machine: Machine) -> list[Meter]:
    """One meter a package, and one for each one's memory. All or none: a sum with parts missing is no sum."""
    tree = machine.path(TREE)
    zones = sorted(tree.glob("intel-rapl:*"))
    if not zones:
        raise Absent(f"no /{TREE}/intel-rapl:*")
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
        raise MeterUnavailable(f"/{TREE} has no package")
    return found
