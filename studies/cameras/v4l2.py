"""A camera behind the kernel's own V4L2: Debian's kernel with its test driver vivid, in a virtual machine (emulated).

The machine sees this one's files read-only and runs the same interpreter. It needs qemu-system-x86, busybox-static,
cpio and kmod.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from shared_hooks.errors import SpecError
from studies.cameras.cases import ROOT, Outcome

SECONDS: Final = 900
"""For the machine: it is emulated, and loads torch."""
MODULES: Final = ("virtio_pci", "9pnet_virtio", "9p", "vivid")
MARK: Final = "outcome: "
SIZES: Final = ((640, 360), (320, 180), (1280, 720), (333, 111))
FORMS: Final = (None, "yuyv422", "rgb24", "gray")
SLOW: Final = 8
"""Frames that a slow taker takes."""
FRAMES: Final = 5
"""Frames in the run."""

INIT: Final = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc p /proc; mount -t devtmpfs d /dev
for module in $(cat /modules/order); do
  case $module in vivid.ko) insmod /modules/$module n_devs=1 node_types=0x1;; *) insmod /modules/$module;; esac
done
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=500000 host /new
mount -t proc p /new/proc; mount -t sysfs s /new/sys; mount --bind /dev /new/dev; mount -t tmpfs t /new/tmp
cp /inside.py /new/tmp/inside.py
cd /new && chroot /new /usr/bin/env -C ROOT PYTHONPATH=ROOT OMP_NUM_THREADS=1 HOME=/tmp PYTHONDONTWRITEBYTECODE=1 \
  PATH=/usr/local/bin:/usr/bin:/bin PYTHON /tmp/inside.py
echo "outcome: [\\"the process in the machine\\", $?]"
poweroff -f
"""

INSIDE: Final = (
    f"SIZES, FORMS, SLOW, FRAMES = {SIZES!r}, {FORMS!r}, {SLOW}, {FRAMES}"
    + """
import json, os, time
from edge_client import sources
from edge_client.__main__ import main

def tell(case, found): print("outcome: " + json.dumps([case, found]), flush=True)

def opened(case, *words, **more):
    try:
        with sources.camera(*words, **more) as camera:
            tell(case, list(camera.first().pixels.shape))
    except Exception as error:
        tell(case, f"{type(error).__name__}: {error}")

with sources.camera("/dev/video0", queue=2) as camera:
    opened("a second program", "/dev/video0")
    seen = []
    for frame in camera:
        seen.append(frame.id.index)
        time.sleep(0.5)
        if len(seen) == SLOW:
            break
    tell("a slow taker: frames", seen)
    tell("a slow taker: taken, dropped", [camera.taken, camera.dropped])
for size in SIZES:
    for form in FORMS:
        opened(f"{size[0]}x{size[1]} {form or ''}".strip(), "/dev/video0", size=size, pixel_format=form)
opened("a format that there is not", "/dev/video0", pixel_format="nonsense")
opened("a device that there is not", "/dev/video7")
words = ["run", "--split", "edge-only", "--threads", "1", "--no-progress", "--input", "/dev/video0"]
status = main([*words, "--frames", str(FRAMES), "--json", "/tmp/run.json"])
tell("edge-client run --input /dev/video0", [status, json.load(open("/tmp/run.json"))["source"]])
os.setuid(65534)
opened("another user", "/dev/video0")
"""
)

RUN: Final = "edge-client run --input /dev/video0"
TAKEN: Final = "a slow taker: frames"
COUNTED: Final = "a slow taker: taken, dropped"
PICTURES: Final = {f"{w}x{h} {form or ''}".strip(): [h, w, 3] for w, h in SIZES for form in FORMS}
"""Height, width and colours of the picture that a case must give."""
EXPECTED: Final = {
    "a second program": "InputMismatch: /dev/video0: Device or resource busy; another program holds it",
    "a format that there is not": "InputMismatch: /dev/video0: Invalid argument; it may not have this size, rate or",
    "a device that there is not": "InputMismatch: no such camera: /dev/video7 (No such file or directory); there are",
    "another user": "InputMismatch: /dev/video0: Permission denied; on most systems the group video may read cameras",
    "the process in the machine": "0",
}
"""How the outcome begins, as text."""
CASES: Final = (*EXPECTED, *PICTURES, TAKEN, COUNTED, RUN)


def in_a_machine(package: Path) -> list[Outcome]:
    """Boots the kernel of a Debian package and runs `INSIDE` there. Raises SpecError for what is missing."""
    for program in ("qemu-system-x86_64", "busybox", "cpio", "modprobe", "depmod", "dpkg"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/sbin:/usr/sbin") is None:
            raise SpecError(f"{program} is missing")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["dpkg", "-x", package, folder], check=True)
        (kernel,) = (folder / "boot").glob("vmlinuz-*")
        image = _initial(folder, kernel.name.removeprefix("vmlinuz-"))
        shared = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
        words = ["-accel", "tcg", "-cpu", "max", "-m", "3G", "-nic", "none", "-nographic", "-no-reboot"]
        words += ["-kernel", str(kernel), "-initrd", str(image), "-append", "console=ttyS0 quiet panic=-1"]
        done = subprocess.run(
            ["timeout", str(SECONDS), "qemu-system-x86_64", *words, "-virtfs", shared],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
    return outcomes(done.stdout)


def outcomes(text: str) -> list[Outcome]:
    """What the machine's console reported; a case that it did not tell has failed."""
    found, seen = [], set()
    lines = [line.partition(MARK)[2] for line in text.splitlines() if MARK in line]
    for case, reported in map(json.loads, lines):
        seen.add(case)
        status, source = reported if case == RUN else (0, {})
        found.append(Outcome(f"V4L2: {case}", status, source, "" if source else str(reported), _fault(case, reported)))
    found += [Outcome(f"V4L2: {case}", 1, {}, "", "it was not reported") for case in CASES if case not in seen]
    if "the process in the machine" not in seen:
        found.append(Outcome("V4L2", 1, {}, text[-300:], "the machine did not come to its end"))
    return found


def _fault(case: str, reported: Any) -> str:
    """What falls short in it; "" if nothing does."""
    if case in EXPECTED:
        return "" if str(reported).startswith(EXPECTED[case]) else f"expected {EXPECTED[case]}"
    if case in PICTURES:
        return "" if reported == PICTURES[case] else f"expected a picture of {PICTURES[case]}"
    if case == TAKEN:
        return (
            ""
            if len(reported) == SLOW and reported == sorted(set(reported))
            else f"expected {SLOW} frames in their order"
        )
    if case == COUNTED:
        taken, dropped = reported
        return "" if taken == SLOW and dropped > 0 else f"expected {SLOW} taken, some dropped"
    if case == RUN:
        status, source = reported
        right = status == 0 and source.get("taken") == source.get("answered") == FRAMES
        return "" if right else f"expected status 0, {FRAMES} taken and answered"
    return "unknown"


def _initial(folder: Path, version: str) -> Path:
    """The first file system: busybox, the modules in their order, what is to be run."""
    tree = folder / "initial"
    for name in ("bin", "modules", "proc", "dev", "new"):
        (tree / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", tree / "bin" / "busybox")
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/sbin:/usr/sbin"}
    subprocess.run(["depmod", "-b", folder, version], check=True, env=environment)
    order: dict[str, Path] = {}
    for module in MODULES:
        command = ["modprobe", "-d", str(folder), "-S", version, "--show-depends", module]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        for line in shown.splitlines():
            if line.startswith("insmod"):
                file = Path(line.split()[1])
                order[file.name] = file
    for name, file in order.items():
        shutil.copy(file, tree / "modules" / name)
    (tree / "modules" / "order").write_text("\n".join(order))
    (tree / "init").write_text(INIT.replace("ROOT", str(ROOT)).replace("PYTHON ", f"{sys.executable} "))
    (tree / "init").chmod(0o755)
    (tree / "inside.py").write_text(INSIDE)
    image = folder / "initial.img"
    names = "\n".join([".", *sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))])
    with image.open("wb") as file_out:
        subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"], cwd=tree, input=names.encode(), stdout=file_out, check=True
        )
    return image
