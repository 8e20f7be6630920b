"""Namespaces, token buckets and the share of a core; skipped where they are not permitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from studies.experiments import core, images, needs, network


def _skip_unless(check: object) -> None:
    try:
        check()  # type: ignore[operator]
    except needs.Missing as missing:
        pytest.skip(str(missing))


def test_a_network_has_both_ends_changes_its_rate_and_leaves_nothing() -> None:
    _skip_unless(needs.check_network)
    if _namespaces() & {network.EDGE, network.CLOUD}:
        pytest.skip("an experiment is running, or one crashed")
    with network.Network() as made:
        for mbits in (100, 1):
            made.rate(mbits)
            for name in (network.EDGE, network.CLOUD):
                shown = subprocess.run(
                    ["tc", "-n", name, "qdisc", "show", "dev", network.VETH], capture_output=True, text=True, check=True
                ).stdout
                assert "tbf" in shown and f"rate {mbits}Mbit" in shown
        listening = (
            "import socket; door = socket.create_server(('10.213.77.2', 0)); print(door.getsockname()[1], flush=True);"
            "print(door.accept()[0].recv(9))"
        )
        with subprocess.Popen(
            network.inside(network.CLOUD, sys.executable, "-c", listening), stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            saying = f"import socket; socket.create_connection(('10.213.77.2', {port})).sendall(b'hello')"
            subprocess.run(network.inside(network.EDGE, sys.executable, "-c", saying), check=True)
            assert server.stdout.readline() == "b'hello'\n"
    assert not _namespaces() & {network.EDGE, network.CLOUD}


def test_a_held_process_is_in_its_group_and_the_group_goes() -> None:
    _skip_unless(needs.check_core)
    controller = core.find()
    assert controller is not None
    name = f"test-{os.getpid()}"
    group = controller.root / f"isthmus-experiment-{name}"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with core.Core(name, min(os.sched_getaffinity(0)), 0.25) as held:
            held.hold(process.pid)
            assert str(process.pid) in (group / "cgroup.procs").read_text().split()
            assert os.sched_getaffinity(process.pid) == {min(os.sched_getaffinity(0))}
        assert not group.exists()
        assert process.poll() is None, "it is let go, not ended"
        process.communicate(b"\n")


def test_missing_requirement_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(needs.Missing, match="root") as missing:
        needs.check()
    assert "\n" not in str(missing.value)


def test_images_are_the_same_for_a_seed_and_compress_like_photographs(tmp_path: Path) -> None:
    first, second = images.write(tmp_path, 2)
    assert images.draw(0).tobytes() == images.draw(0).tobytes()
    assert first.read_bytes() != second.read_bytes()
    bits = [8 * file.stat().st_size / (images.WIDTH * images.HEIGHT) for file in (first, second)]
    assert all(0.5 < each < 4 for each in bits), f"{bits} bits per pixel"


def _namespaces() -> set[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return {line.split()[0] for line in shown.splitlines() if line.strip()}
