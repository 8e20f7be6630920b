"""A board in qemu: its serial console is typed to, and killing the emulator is pulling the plug."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pexpect

PROMPT = "isthmus-board> "
BOOT_SECONDS = 600.0
MARK = re.compile(r"ISTHMUS-STATUS (\d+)\s")
SLOW = "throttling.iops-total=250,throttling.bps-total=10485760"
"""A card of the slower kind: 10 MB/s, 250 operations a second."""


class Failed(Exception):
    """A command on the board ended with another status than 0; the message is what it printed."""


class Board:
    """``disks``: what image.sh made, left as it is; ``work``: what this board writes. `on` switches it on."""

    def __init__(self, disks: Path, work: Path, *, cpu: str, memory_mib: int) -> None:
        self.disks, self.work, self.cpu, self.memory_mib = disks, work, cpu, memory_mib
        work.mkdir(parents=True, exist_ok=True)
        base = ("-b", str((disks / "root.img").resolve()), "-F", "raw")
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *base, str(work / "root.qcow2")], check=True)
        with (work / "data.img").open("wb") as file:
            file.truncate(512 << 20)
        subprocess.run(["mkfs.ext4", "-q", str(work / "data.img")], check=True)
        self._console: Any = None

    def on(self) -> float:
        """Power; seconds until somebody is logged in on its console."""
        began = time.monotonic()
        drives = []
        for name, file, options in (
            ("root", self.work / "root.qcow2", f"format=qcow2,{SLOW}"),
            ("packages", self.disks / "packages.img", "format=raw,readonly=on"),
            ("data", self.work / "data.img", f"format=raw,{SLOW}"),
        ):
            drives += ["-drive", f"if=none,id={name},file={file},{options}", "-device", f"virtio-blk-pci,drive={name}"]
        self._console = pexpect.spawn(
            "qemu-system-aarch64",
            [
                *("-M", "virt", "-cpu", self.cpu, "-smp", "2", "-m", str(self.memory_mib)),
                *("-display", "none", "-monitor", "none", "-serial", "stdio"),
                *("-kernel", str(self.disks / "vmlinuz"), "-initrd", str(self.disks / "initrd.img")),
                *("-append", "root=/dev/vda ro console=ttyAMA0 quiet systemd.show_status=0"),
                *drives,
                *("-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net"),
                *("-device", "i6300esb", "-action", "watchdog=reset"),
            ],
            encoding="utf-8",
            codec_errors="replace",
            timeout=BOOT_SECONDS,
            dimensions=(50, 500),
        )
        self._console.logfile_read = (self.work / "console.log").open("a", encoding="utf-8", buffering=1)
        self.wait_for_login()
        return time.monotonic() - began

    def wait_for_login(self) -> None:
        """Until the console answers: after power, after a restart, after a watchdog."""
        self._console.expect(r"root@[\w-]+:[^\r\n]*# ", timeout=BOOT_SECONDS)
        self._console.sendline(f"stty -echo cols 500; unset PROMPT_COMMAND; PS1='{PROMPT}'; PS2=''")
        self._console.expect(rf"\n{PROMPT}", timeout=60)

    def type(self, script: str, *, timeout: float = 600.0, environment: dict[str, str] | None = None) -> str:
        """Run lines of bash, and return what they print. Raises Failed, and pexpect's own for no answer in time."""
        lines = [f"export {name}='{value}'" for name, value in (environment or {}).items()]
        text = "\n".join([*lines, "set -e", script])
        self._console.sendline(f"cat > /tmp/typed <<'ISTHMUS-END'\n{text}\nISTHMUS-END")
        self._console.expect(PROMPT, timeout=60)
        self._console.sendline("bash /tmp/typed < /dev/null 2>&1; echo ISTHMUS-STATUS $?")
        self._console.expect(MARK, timeout=timeout)
        printed, status = self._console.before.replace("\r", ""), int(self._console.match[1])
        self._console.expect(PROMPT, timeout=60)
        if status:
            raise Failed(f"exit status {status}: {printed[-2000:]}")
        return str(printed.strip())

    def begin(self, command: str) -> None:
        """Type a line and do not wait for it; the power is cut, or the board hangs, meanwhile."""
        self._console.sendline(command)

    def unplug(self) -> None:
        """No power, at once: what the board has not handed to its disks is gone."""
        self._console.close(force=True)

    def off(self) -> None:
        """As a person does it."""
        self._console.sendline("systemctl poweroff")
        self._console.expect(pexpect.EOF, timeout=180)
        self._console.close(force=True)
