"""The power chip of the Raspberry Pi 5 and similar ones, by ``vcgencmd pmic_read_adc``.

It prints a line for each rail's current, ``VDD_CORE_A current(7)=1.42880000A``, and one for its voltage, ``VDD_CORE_V
volt(15)=0.90659250V``. Rails with both are multiplied and added up. That is what the chip's own rails deliver: the
losses of its converters, and what hangs on the 5 V input directly (USB, fan, HATs), are not in it, since the input's
current is not measured. Older boards answer "Command not registered".
"""

from __future__ import annotations

import re
import subprocess

from shared_hooks.metrics.energy.meter import Absent, Integrated, Machine, Meter, MeterUnavailable

LINE = re.compile(r"^\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=([0-9]+(?:\.[0-9]+)?)[AV]\s*$", re.MULTILINE)
PERIOD_S = 0.25
"""Each reading starts a process."""


def find(machine: Machine) -> list[Meter]:
    """One meter: the board's, as far as its rails are measured."""
    if "Raspberry Pi" not in machine.board:
        raise Absent("not a Raspberry Pi")
    meter = Integrated(
        "PMIC rails (without 5 V input losses)",
        "PMIC rails",
        "board",
        lambda: watts(machine),
        period_s=PERIOD_S,
        now=machine.now,
    )
    meter.read()
    return [meter]


def watts(machine: Machine) -> float:
    """The sum over all rails of which current and voltage are printed."""
    try:
        printed = machine.run(["vcgencmd", "pmic_read_adc"])
    except FileNotFoundError as error:
        raise MeterUnavailable("vcgencmd is not installed") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise MeterUnavailable(f"vcgencmd pmic_read_adc: {_short(error)}") from error
    found: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for rail, what, value in LINE.findall(printed):
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
