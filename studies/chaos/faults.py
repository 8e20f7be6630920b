"""What is done to the server, the path and the clients. Each fault returns when it is over, with the moment from which
everybody could have been served again: the client's own detection and way back begin there, or before.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from studies.chaos.crowd import Crowd
from studies.chaos.served import Served
from studies.experiments.relay import Relay


@dataclass
class World:
    """All that may be hurt."""

    served: Served
    relay: Relay
    crowd: Crowd
    draw: Random
    reported: list[float] = field(default_factory=list)
    """Seconds until everybody had heard of other weights."""


Fault = Callable[[World], float]


def sigkill(world: World) -> float:
    world.served.end(signal.SIGKILL)
    world.served.start()
    return time.monotonic()


def sigterm(world: World) -> float:
    world.served.end(signal.SIGTERM)
    world.served.start()
    return time.monotonic()


def rolled(world: World) -> float:
    """A new server beside the old one, which then drains: nobody should notice."""
    reported = world.served.roll()
    if world.served.statuses[-1] != 0:
        raise RuntimeError(f"the server that was rolled away ended with status {world.served.statuses[-1]}")
    return reported


def sigstop(world: World) -> float:
    world.served.send(signal.SIGSTOP)
    time.sleep(10)
    world.served.send(signal.SIGCONT)
    return time.monotonic()


def reset(world: World) -> float:
    world.relay.reset()
    return time.monotonic()


def ended(world: World) -> float:
    world.relay.end()
    return time.monotonic()


def refused(world: World) -> float:
    world.relay.refuse()
    time.sleep(world.draw.uniform(1, 6))
    world.relay.accept()
    return time.monotonic()


def stall(world: World) -> float:
    world.relay.moving.clear()
    time.sleep(world.draw.choice((1, 3, 8)))
    world.relay.moving.set()
    return time.monotonic()


def blackhole(world: World) -> float:
    world.relay.vanishing = True
    world.relay.vanish()
    time.sleep(12)
    world.relay.vanishing = False
    return time.monotonic()


def lost(world: World) -> float:
    """The connections of now carry nothing any more; new ones do."""
    world.relay.vanish()
    return time.monotonic()


def half_open(world: World) -> float:
    world.relay.halve()
    return time.monotonic()


def sliced(world: World) -> float:
    world.relay.slices = world.draw.choice((7, 100, 1000))
    time.sleep(5)
    world.relay.slices = 0
    return time.monotonic()


def slow(world: World) -> float:
    world.relay.rate = 200e3
    time.sleep(15)
    world.relay.rate = 0
    return time.monotonic()


def late(world: World) -> float:
    world.relay.delay = world.draw.choice((0.05, 0.3))
    time.sleep(5)
    world.relay.delay = 0.0
    return time.monotonic()


def other_weights(world: World) -> float:
    """For as long as it takes everybody to hear so; then those of before."""
    world.served.end(signal.SIGTERM)
    world.served.start(seed=1)
    began = time.monotonic()
    world.crowd.all_heard(began)
    world.reported.append(time.monotonic() - began)
    return sigterm(world)


def client_killed(world: World) -> float:
    world.crowd.kill(world.draw.choice(world.crowd.members))
    return time.monotonic()


def worker_killed(world: World) -> float:
    """One of those that compute."""
    os.kill(world.draw.choice(world.served.workers()), signal.SIGKILL)
    return time.monotonic()


WORKER: Final = "a worker killed"
"""Only where the server computes in processes of their own."""
OTHER_WEIGHTS: Final = "other weights, and back"
FAULTS: Final[dict[str, Fault]] = {
    "SIGKILL, restart": sigkill,
    "SIGTERM, restart": sigterm,
    "rolling update": rolled,
    "SIGSTOP 10 s": sigstop,
    "reset": reset,
    "ended in the middle": ended,
    "refused 1 to 6 s": refused,
    "stall 1 to 8 s": stall,
    "blackhole 12 s": blackhole,
    "connections lost": lost,
    "half open": half_open,
    "slices of 7 to 1,000 B": sliced,
    "200 kB/s for 15 s": slow,
    "50 or 300 ms more, 5 s": late,
    OTHER_WEIGHTS: other_weights,
    "a client killed": client_killed,
    WORKER: worker_killed,
}
