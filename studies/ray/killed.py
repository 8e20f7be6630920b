"""Something dies, or is replaced, under load: what is lost, what is wrong, how long nobody answers.

The clients are those of `studies.chaos`: they compare every answer bit for bit and know nothing of Ray.
"""

from __future__ import annotations

import random
import signal
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from studies.chaos.crowd import Crowd
from studies.chaos.model import NAME
from studies.chaos.model import spec as chaos_spec
from studies.ray.cluster import Nodes, Server, processes

KINDS: Final = ("small", "small", "mixed", "large")
FRONT: Final = "front"
BACK_SECONDS: Final = 120.0
CALM_SECONDS: Final = 2.0


@dataclass
class World:
    """What there is to break, and what there is when nothing is broken."""

    nodes: Nodes
    server: Server
    model: Path
    draw: random.Random
    replicas: int
    fronts: int
    metrics: int
    """The port of the fronts' page."""

    def pids(self) -> set[int]:
        return set(processes(NAME)) | set(processes(FRONT))

    @property
    def whole(self) -> bool:
        """Whether everybody is there, and answers a front."""
        if len(processes(NAME)) < self.replicas or len(processes(FRONT)) < self.fronts:
            return False
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=5) as page:
                return page.read().count(b"isthmus_sessions{replica=") >= self.replicas
        except OSError:
            return False


def _kill(deployment: str, world: World) -> set[int]:
    """One process; those that are to be replaced."""
    pid = world.draw.choice(sorted(processes(deployment)))
    processes(deployment)[pid].send_signal(signal.SIGKILL)
    return {pid}


def _update(world: World) -> set[int]:
    """The model's file is another one, with the same model in it."""
    before = set(processes(NAME))
    world.model.write_text(f"# {world.draw.random()}\n{world.model.read_text()}")
    world.server.deploy_again()
    return before


def _node(world: World) -> set[int]:
    before = world.pids()
    world.nodes.kill()
    world.nodes.add()
    eventually = time.monotonic() + 10
    while not (gone := before - world.pids()) and time.monotonic() < eventually:
        time.sleep(0.02)
    return gone


REPLICA: Final = "a replica killed"
FAULTS: Final[dict[str, Callable[[World], set[int]]]] = {
    REPLICA: lambda world: _kill(NAME, world),
    "a front killed": lambda world: _kill(FRONT, world),
    "rolling update": _update,
    "a node killed": _node,
}


def run(folder: Path, world: World, times: int, faults: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each fault, which happens so many times under load, with clients of its own."""
    rows = []
    for fault in faults:
        sub = folder / f"{fault.replace(' ', '-')}-{world.replicas}"
        sub.mkdir()
        spec = sub / "model.toml"
        spec.write_text(chaos_spec(), encoding="utf-8")
        crowd = Crowd(sub, world.server.address, spec, KINDS, ["--pause", "0.02", "--patience", "120"])
        without: list[float] = []
        back: list[float] = []
        try:
            crowd.all_served(0.0)
            for _ in range(times):
                time.sleep(CALM_SECONDS)
                began = time.monotonic()
                going = FAULTS[fault](world)
                while not (world.whole and not going & world.pids()):
                    if time.monotonic() > began + BACK_SECONDS:
                        raise RuntimeError(f"{fault}: not whole again after {BACK_SECONDS:g} s")
                    time.sleep(0.1)
                back.append(time.monotonic() - began)
                crowd.all_served(time.monotonic())
                time.sleep(CALM_SECONDS)
                without += [_longest(member.look(), began, time.monotonic()) for member in crowd.members]
        finally:
            crowd.close()
        known = crowd.known
        lost = [one for one in known if one["came"] not in ("ok", "wrong")]
        rows.append(
            {
                "fault": fault,
                "replicas": world.replicas,
                "fronts": world.fronts,
                "times": times,
                "asked": len(known),
                "lost": len(lost),
                "wrong": sum(one["came"] == "wrong" for one in known),
                "sent_again": sum(one.get("sends", 1) > 1 for one in known),
                "without_service_median": round(statistics.median(without), 2),
                "without_service_max": round(max(without), 2),
                "whole_again_max": round(max(back), 2),
                "why": [one.get("why") for one in lost[:3]],
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _longest(known: list[dict[str, Any]], began: float, over: float) -> float:
    """Seconds between two answers of one client, the longest that touch this time."""
    times = sorted(one["answered"] for one in known if one["came"] == "ok")
    gaps = [later - sooner for sooner, later in pairwise(times) if later > began and sooner < over]
    return max(gaps, default=float("inf"))
