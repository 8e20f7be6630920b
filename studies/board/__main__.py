"""``python -m studies.board DISKS PAGE``: a page of docs/jobs typed on an emulated board, and what came of it.

The page's own commands are typed, block by block, between checks: that the service is up after a restart, answers a
camera, is started again by each watchdog, keeps its log's bound; that cuts of power leave whole files and an update
that was cut off leaves the old version. Results are written after each step (``--json``).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge_client.model_choice import ModelChoice
from edge_client.process import local_server
from studies.board.emulated import Board, Failed

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- not run: studies/board [^>]*\((\w+)\) -->\n```sh\n(.*?)```", re.DOTALL)
CPUS = {"raspberry-pi": "cortex-a72", "jetson": "cortex-a76"}
"""A Raspberry Pi 4's, and what is nearest to an Orin's Cortex-A78AE among those that qemu 7.2 has."""
PICTURES = 40
CHECK = """
import json, pathlib
lines = [json.loads(line) for line in open("journal")][1:]
names = [line["input"][0] for line in lines]
pictures = sorted(map(str, pathlib.Path("pictures").resolve().iterdir()))
outputs = [json.loads(file.read_text()) for file in pathlib.Path("outputs").glob("*.json")]
left = [str(file) for file in pathlib.Path(".").rglob("*") if file.is_file() and not file.stat().st_size]
print(json.dumps({"answered": len(names), "twice": len(names) - len(set(names)),
    "missing": len(set(pictures) - set(names)), "outputs": len(outputs), "empty files": left,
    "result": json.load(open("result.json"))["exit_status"] if pathlib.Path("result.json").exists() else None}))
"""


class Following:
    """One page on one board; each step's outcome and seconds are kept in ``file``."""

    def __init__(self, board: Board, page: Path, server: str, file: Path) -> None:
        self.board, self.file, self.server = board, file, server
        self.blocks = {name: text.replace("HOST:PORT", server) for name, text in BLOCK.findall(page.read_text())}
        self.found: dict[str, Any] = {"page": page.name, "cpu": board.cpu, "memory MiB": board.memory_mib, "steps": {}}

    def step(self, name: str, do: Callable[[], object]) -> None:
        """What came of it, or how it failed: the next steps are tried all the same."""
        began = time.monotonic()
        try:
            outcome, good = do(), True
        except (Failed, AssertionError) as error:
            outcome, good = f"{type(error).__name__}: {error}", False
        kept = {"good": good, "outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
        self.found["steps"][name] = kept
        self.file.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"{'ok' if good else 'FAILED':6} {kept['seconds']:7.1f} s  {name}: {outcome}", flush=True)

    def block(self, name: str, version: str = "0.2.0", timeout: float = 1800.0) -> str:
        """A block of the page, typed. Raises KeyError where it has none of that name."""
        environment = {"ISTHMUS": f"isthmus[video]=={version}", "TORCH": "torch==2.4.1"}
        text = "cd /media/packages\n" + self.blocks[name]
        return self.board.type(text, timeout=timeout, environment=environment).splitlines()[-1]

    def answering(self, seconds: float = 900.0) -> str:
        """The status once the service is ready and has answered. Raises AssertionError where that takes longer."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            shown = self.board.type("systemctl show edge-client -p ActiveState,StatusText,NRestarts,MainPID || true")
            about = dict(line.partition("=")[::2] for line in shown.splitlines() if "=" in line)
            if about.get("ActiveState") == "active" and "answered" in about.get("StatusText", ""):
                return shown.replace("\n", ", ")
            time.sleep(3)
        log = self.board.type("journalctl --namespace=isthmus -u edge-client -n 20 --no-pager || true")
        raise AssertionError(f"not answering after {seconds:g} s: {shown}\n{log}")

    def restart(self) -> str:
        """As `systemctl reboot`, until the service answers again."""
        self.board.begin("systemctl reboot")
        self.board.wait_for_login()
        return self.answering()


def follow(one: Following, cuts: int, seed: int, only_light: bool) -> None:
    """Every step, or only those of an edge without PyTorch."""
    board, draw = one.board, random.Random(seed)
    camera = "tcp" if "tcp://" in one.blocks["service"] else "vivid"

    def prepared() -> str:
        board.type("mount -o remount,rw /")
        prepare = "echo vivid > /etc/modules-load.d/vivid.conf"
        if camera == "tcp":
            prepare = (
                "cp /media/packages/sender.service /etc/systemd/system/ && systemctl enable sender.service 2>/dev/null"
            )
        network = "[Match]\\nName=en* eth*\\n[Network]\\nAddress=10.0.2.15/24\\nGateway=10.0.2.2\\n"
        board.type(f"printf '{network}' > /etc/systemd/network/a.network; systemctl enable systemd-networkd; {prepare}")
        return board.type("uname -mr; nproc; free -m | sed -n 2p").replace("\n", ", ")

    one.step("the system is made writable", prepared)
    if only_light:
        one.step("the network", lambda: (board.begin("systemctl reboot"), board.wait_for_login())[1])
        one.step("an edge without PyTorch", lambda: light(board, one.server))
        return
    one.step("install", lambda: one.block("install", timeout=3600))
    one.step("service", lambda: one.block("service"))
    one.step("restart: read-only, and answering", lambda: f"{one.restart()}; / is {root_is(board)}")
    one.step("memory", lambda: memory(board))
    one.step("an edge without PyTorch", lambda: light(board, one.server))

    def frozen() -> str:
        before = one.answering()
        board.type("kill -STOP $(systemctl show edge-client -p MainPID --value)")
        time.sleep(95)  # WatchdogSec, then SIGABRT is not heard, then TimeoutStopSec
        after = one.answering()
        assert after.split("MainPID=")[1] != before.split("MainPID=")[1], after
        return after

    one.step("a process that hangs is started again", frozen)

    def crashed() -> str:
        board.begin("echo 0 > /proc/sys/kernel/panic; echo c > /proc/sysrq-trigger")
        board.wait_for_login()
        return one.answering()

    one.step("a kernel that hangs is started again by the board's watchdog", crashed)
    one.step("log", lambda: one.block("log"))

    def flooded() -> str:
        board.type(
            "systemd-run --quiet --wait -p LogNamespace=isthmus sh -c 'head -c 24M /dev/urandom | base64 -w 120'",
            timeout=1200,
        )
        shown = board.type("journalctl --namespace=isthmus --disk-usage")
        assert float(re.findall(r"([\d.]+)M", shown)[0]) <= 8.0, shown
        return shown

    one.step("log after 32 MB were written to it", flooded)

    if "power" in one.blocks:
        board.type("systemctl stop edge-client; cp -r /media/packages/pictures /var/lib/isthmus/", timeout=180)

        def cut() -> list[object]:
            seen: list[object] = []
            for number in range(1, cuts + 1):
                board.type("cat > /tmp/block.sh <<'END-OF-BLOCK'\n" + one.blocks["power"] + "\nEND-OF-BLOCK")
                board.type("systemctl stop edge-client; nohup bash /tmp/block.sh > /tmp/said 2>&1 &", timeout=180)
                answered(board, at_least=number * PICTURES // (cuts + 2))
                time.sleep(draw.uniform(0, 1))
                board.unplug()
                board.on()
                seen.append(checked(board))
            return seen

        def finished() -> object:
            board.type("systemctl stop edge-client\n" + one.blocks["power"], timeout=1200)
            shown = checked(board)
            assert shown["missing"] == shown["twice"] == shown["result"] == 0 and not shown["empty files"], shown
            assert shown["answered"] == shown["outputs"] == PICTURES, shown
            return shown

        one.step(f"the power is cut {cuts} times while pictures are answered", cut)
        one.step("the same command finishes", finished)

    if "update" in one.blocks:

        def half() -> str:
            board.begin("mount -o remount,rw / && cd /media/packages && python3 -m venv /opt/isthmus/0.2.1 && "
                        "/opt/isthmus/0.2.1/bin/pip install isthmus[edge]==0.2.1")  # fmt: skip
            time.sleep(draw.uniform(40, 80))
            board.unplug()
            board.on()
            return f"{one.answering()}; {version(board)}"

        one.step("the power is cut in an update", half)
        one.step("update", lambda: one.block("update", "0.2.1", timeout=3600))
        one.step("after the update", lambda: f"{one.answering()}; {version(board)}")
        one.step("and after a restart", lambda: f"{one.restart()}; {version(board)}; / is {root_is(board)}")


def answered(board: Board, at_least: int, seconds: float = 300.0) -> None:
    """Wait until the journal holds ``at_least`` pictures. Raises AssertionError after ``seconds``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if int(board.type("cat /var/lib/isthmus/journal 2> /dev/null | wc -l").split()[-1]) > at_least:
            return
    raise AssertionError(f"{at_least} pictures are not answered after {seconds:g} s")


def checked(board: Board) -> dict[str, Any]:
    """What a power cut left in /var/lib/isthmus."""
    typed = "cd /var/lib/isthmus\n[ -s journal ] || { echo '{}'; exit 0; }\n"
    typed += f"python3 - <<'END-OF-CHECK'{CHECK}\nEND-OF-CHECK"
    found: dict[str, Any] = json.loads(board.type(typed).splitlines()[-1])
    return found


def light(board: Board, server: str) -> list[str]:
    """Exported heads in onnxruntime, in an environment without torch; answers are the pictures' own labels."""
    installed = """cd /media/packages
mount -o remount,rw /
python3 -m venv /opt/isthmus/light
/opt/isthmus/light/bin/pip install --quiet "isthmus[light]==0.2.0"
sync
mount -o remount,ro /"""
    board.type(installed, timeout=1800)
    found = []
    for cut in ("stem.2", "stage2.0.conv2"):
        for codec in ("raw", "int8"):
            program = "/opt/isthmus/light/bin/edge-client run --heads heads --input pictures"
            shown = board.type(
                f"cd /media/packages\n{program} --split {cut} --codec {codec} --server {server}", timeout=900
            )
            lines = [line.split() for line in shown.splitlines() if "label" in line]
            right = sum(line[0].partition("label")[2][:1] == line[1] for line in lines)
            assert right == PICTURES, shown
            found.append(f"{cut}, {codec}: {right} of {PICTURES} right; {shown.splitlines()[-2]}")
    return found


def root_is(board: Board) -> str:
    """How / is mounted. Raises AssertionError where it may be written."""
    shown = board.type("findmnt --noheadings --output OPTIONS /")
    assert shown.startswith("ro"), shown
    return shown.partition(",")[0]


def version(board: Board) -> str:
    """Which one is in use."""
    return board.type("readlink /opt/isthmus/current")


def memory(board: Board) -> str:
    """The most the service has taken, by its control group."""
    peak = board.type("cat /sys/fs/cgroup/system.slice/edge-client.service/memory.peak")
    return f"{int(peak) / 2**20:.0f} MiB at most, {board.type('free -m | sed -n 2p')}"


@contextmanager
def serving() -> Iterator[str]:
    """A server on this machine, by its address as an emulated board sees it."""
    with local_server(ModelChoice("digits"), arguments=["--tails", "all"]) as address:
        yield f"10.0.2.2:{address.rpartition(':')[2]}"


def main() -> int:
    """Exit status 1 where a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("disks", type=Path, help="what studies/board/image.sh made")
    parser.add_argument("page", type=Path)
    parser.add_argument("--memory", type=int, default=2048, metavar="MIB")
    parser.add_argument("--cuts", type=int, default=5, metavar="N", help="of power")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--light", action="store_true", help="only the steps of an edge without PyTorch")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="board-", dir=options.disks) as work, serving() as server:
        board = Board(options.disks, Path(work), cpu=CPUS[options.page.stem], memory_mib=options.memory)
        one = Following(board, options.page, server, options.json)
        try:
            one.step("power", lambda: f"{board.on():.0f} s to a console")
            follow(one, options.cuts, options.seed, options.light)
        finally:
            board.unplug()
    return 0 if all(step["good"] for step in one.found["steps"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
