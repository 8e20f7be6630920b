"""Who is evicted where weights do not fit: by a clock of the test's own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from cloud_server.fleet.hosts import STAYS, Resident, room_for

LOAD = 2.0
"""Seconds that each load takes."""


@dataclass
class Model:
    nbytes: int
    users: dict[str, float] = field(default_factory=dict)
    arrived: float = 0.0


class Machine:
    """Models in memory, one loaded at a time, as `Fleet` does it; one tick is a tenth of a second."""

    def __init__(self, limit: int, models: dict[str, Model], turn: float = 20.0) -> None:
        self.limit, self.models, self.turn = limit, models, turn
        self.now, self.loading, self.idle_at = 0.0, 0.0, 0.0
        self.resident: set[str] = set()
        self.served: Counter[str] = Counter()
        """Questions that were answered at once, by account."""

    def ask(self, account: str, name: str) -> None:
        model = self.models[name]
        model.users[account] = self.now
        if name in self.resident:
            self.served[account] += 1
        elif self.now >= self.idle_at:
            found = [
                Resident(
                    one, {"cpu": self.models[one].nbytes}, dict(self.models[one].users), self.models[one].arrived, LOAD
                )
                for one in sorted(self.resident)
            ]
            gone = room_for(account, {"cpu": model.nbytes}, found, self.limit, self.turn, self.now)
            if gone is not None:
                self.resident -= set(gone)
                self.resident.add(name)
                model.arrived, self.idle_at = self.now + LOAD, self.now + 2 * LOAD
                self.loading += LOAD
        assert sum(self.models[one].nbytes for one in self.resident) <= self.limit


def of_sizes(**sizes: int) -> dict[str, Model]:
    return {name: Model(nbytes) for name, nbytes in sizes.items()}


def test_least_recently_used_model_is_evicted_first() -> None:
    machine = Machine(3, of_sizes(a=1, b=1, c=1, d=1))
    for name in "abc":
        machine.now += 10
        machine.ask("alice", name)
    machine.now += 61
    machine.ask("alice", "b")
    machine.now += 1
    machine.ask("bob", "d")
    assert machine.resident == {"b", "c", "d"}


def test_account_that_loads_many_models_evicts_its_own() -> None:
    """An honest client's one model stays, whatever a hostile one asks for, and how often it touches that one, too."""
    machine = Machine(2, of_sizes(mine=1, c=1, d=1, e=1))
    machine.ask("honest", "mine")
    for tick in range(3000):
        machine.now += 0.1
        machine.ask("honest", "mine")
        machine.ask("hostile", "cde"[tick % 3])
        machine.ask("hostile", "mine")
        assert "mine" in machine.resident
    assert machine.loading < machine.now / (1 + STAYS) + 2 * LOAD


def test_equals_take_turns() -> None:
    """Where there is room for one, each of three has a third of the time, and loading takes a small part of it."""
    machine = Machine(1, of_sizes(a=1, b=1, c=1))
    for _ in range(9000):
        machine.now += 0.1
        for account in sorted(machine.models, key=machine.served.__getitem__):  # whose loads took least is first
            machine.ask(account, account)
    assert min(machine.served.values()) > 0.25 * sum(machine.served.values())
    assert machine.loading < 0.15 * machine.now


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("abcd"), st.floats(0, 5)), max_size=60),
)
def test_memory_and_loading_are_bounded(limit: int, asked: list[tuple[str, str, float]]) -> None:
    machine = Machine(limit, of_sizes(a=1, b=1, c=1, d=1))
    for account, name, seconds in asked:
        machine.now += seconds
        machine.ask(account, name)
    assert machine.loading <= machine.now / 2 + LOAD
