"""The fair line: shares of the time, no starvation, no credit for idling, the order within a client."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_server.scheduling.fair_queue import KEPT, FairQueue, Flows, Payer, Task
from tests.cloud_server.scheduling.simulation import Simulation

LENGTHS = st.sampled_from([0.01, 0.02, 0.05, 0.2])


def around(mean: float, seed: int) -> Iterator[float]:
    """Lengths from half to one and a half of ``mean``."""
    draw = random.Random(seed)
    while True:
        yield mean * draw.uniform(0.5, 1.5)


class TestFlows:
    @settings(max_examples=15, deadline=None)
    @given(means=st.lists(LENGTHS, min_size=2, max_size=10), workers=st.integers(1, 3), seed=st.integers(0, 999))
    def test_backlogged_clients_of_mixed_sizes_get_equal_time(
        self, means: list[float], workers: int, seed: int
    ) -> None:
        run = Simulation(min(workers, len(means) - 1))
        for number, mean in enumerate(means):
            run.backlogged(Payer(f"account {number}"), around(mean, seed + number))
        run.run(30 * max(means) * len(means))
        used = [run.used[f"account {number}"] for number in range(len(means))]
        assert max(used) <= 1.2 * min(used)

    @settings(max_examples=8, deadline=None)
    @given(weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=6), mean=LENGTHS)
    def test_weights(self, weights: list[float], mean: float) -> None:
        run = Simulation()
        for number, weight in enumerate(weights):
            run.backlogged(Payer(f"account {number}", weight=weight), around(mean, number))
        run.run(1000 * mean)
        shares = [run.used[f"account {number}"] / weight for number, weight in enumerate(weights)]
        assert max(shares) <= 1.2 * min(shares)

    @settings(max_examples=8, deadline=None)
    @given(clients=st.lists(LENGTHS, min_size=1, max_size=8), seed=st.integers(0, 999))
    def test_more_clients_are_no_more_than_one_account(self, clients: list[float], seed: int) -> None:
        run = Simulation()
        run.backlogged(Payer("one", "only"), around(0.02, seed))
        for number, mean in enumerate(clients):
            run.backlogged(Payer("many", f"client {number}"), around(mean, seed + number))
        run.run(60 * sum(clients) + 5)
        assert run.used["one"] == pytest.approx(run.used["many"], rel=0.2)
        used = [run.used[Payer("many", f"client {number}")] for number in range(len(clients))]
        assert max(used) <= 1.3 * min(used)

    def test_a_flood_of_small_ones_slows_only_its_own_account(self) -> None:
        run, flood = Simulation(), Payer("flood")
        for _ in range(8 * 32):
            run.put(flood, 0.002)
        honest = Payer("honest")
        for number in range(100):
            run.at(0.003 + 0.004 * number, lambda: void(run.put(honest, 0.002)))
        run.run(10)
        assert max(run.waits[honest]) <= 0.002 + 1e-9, "no more than the job that was running"
        assert max(run.waits[flood]) > 0.5


class TestTurnedAway:
    def flood(self, run: Simulation, until: float) -> dict[str, float]:
        """What three honest accounts and one that is turned away all the time have used."""
        flood = Payer("flood")
        for number in range(3):
            run.backlogged(Payer(f"honest {number}"), around(0.01, number))
        run.backlogged(flood, around(0.01, 9))
        for number in range(int(until / 0.002)):
            run.at(0.1 + 0.002 * number, lambda: run.line.turned_away(flood))
        return run.used

    def test_overloading_client_gets_half_its_share(self) -> None:
        run = Simulation()
        used = self.flood(run, 30)
        run.run(30)
        honest = [used[f"honest {number}"] for number in range(3)]
        assert used["flood"] == pytest.approx(sum(honest) / 6, rel=0.15)
        assert sum(honest) >= 0.8 * 30

    def test_client_gets_its_whole_share_later(self) -> None:
        run = Simulation()
        used = self.flood(run, 10)
        run.run(10 + 5)
        before = used["flood"]
        run.run(35)
        assert used["flood"] - before >= 0.23 * 20

    def test_lone_payer_is_not_slowed(self) -> None:
        run, flood = Simulation(), Payer("flood")
        run.backlogged(flood, around(0.01, 9))
        for number in range(1000):
            run.at(0.01 * number, lambda: run.line.turned_away(flood))
        run.run(10)
        assert run.used["flood"] >= 9.9

    def test_unknown_clients_are_allowed(self) -> None:
        line = FairQueue()
        line.turned_away(Payer("nobody"))
        line.put(Task(1, Payer("somebody")))
        line.turned_away(Payer("somebody", "another client"))
        assert line.take() is not None


class TestNobodyStarves:
    def test_share_beside_ever_new_clients(self) -> None:
        """Accounts that come once and never return, and together would take all the time there is."""
        run, old = Simulation(), Payer("old")
        run.backlogged(old, itertools.repeat(0.01))
        for number in range(1000):
            run.at(number * 0.01, lambda number=number: void(run.put(Payer(f"new {number}"), 0.01)))
        run.run(9)
        turns = [place for place, task in enumerate(run.order) if task.payer == old]
        assert len(turns) >= 9
        gaps = [after - before for before, after in itertools.pairwise(turns)]
        assert max(gaps) <= 100

    def test_a_job_that_took_long_unexpectedly_is_paid_for(self) -> None:
        run, late, others = Simulation(), Payer("late"), Payer("others")
        run.backlogged(late, itertools.chain([0.01] * 20, [5.0], itertools.repeat(0.01)))
        run.backlogged(others, itertools.repeat(0.01))
        run.run(30)
        assert run.used["late"] == pytest.approx(run.used["others"], rel=0.05)

    def test_a_newcomer_is_not_behind_the_rest_after_such_a_job(self) -> None:
        run, newcomer = Simulation(), Payer("newcomer")
        run.backlogged(Payer("late"), itertools.chain([50.0], itertools.repeat(0.01)))
        run.backlogged(Payer("tiny"), itertools.repeat(0.01))
        run.at(51, lambda: void(run.put(newcomer, 0.01)))
        run.run(60)
        assert run.waits[newcomer][0] < 0.5


class TestNoCredit:
    @settings(max_examples=8, deadline=None)
    @given(idle=st.floats(1, 1000), mean=LENGTHS)
    def test_for_having_idled(self, idle: float, mean: float) -> None:
        run, busy, back = Simulation(), Payer("busy"), Payer("back")
        run.backlogged(busy, itertools.repeat(mean))
        run.put(back, mean)
        run.at(idle * mean, lambda: run.backlogged(back, itertools.repeat(mean)))
        run.run(idle * mean)
        before = run.used["busy"]
        run.run((idle + 200) * mean)
        assert run.used["busy"] - before >= 0.9 * 100 * mean

    def test_overestimated_task_is_not_overcharged(self) -> None:
        line = FairQueue()
        for number in range(50):
            line.put(Task(number, Payer("a")))
            place = line.take()
            assert place is not None
            line.done(place, 1.0)
        line.put(Task(0, Payer("a")))
        place = line.take()
        assert place is not None
        line.done(place, 0.0, counts=False)
        assert line.cost(Payer("a")) == pytest.approx(1.0)


class TestOrder:
    @settings(max_examples=40, deadline=None)
    @given(
        puts=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), LENGTHS, st.booleans()), max_size=60),
        workers=st.integers(1, 3),
    )
    def test_order_within_a_client_and_completeness(
        self, puts: list[tuple[str, str, float, bool]], workers: int
    ) -> None:
        run = Simulation(workers)
        left = []
        for number, (account, client, seconds, leaves) in enumerate(puts):
            place = run.put(Payer(account, client), seconds)
            if leaves:
                run.at(number * 0.001, lambda place=place: run.line.remove(place))
                left.append(place)
        run.run(1000)
        assert len(run.line) == 0 and run.line._seconds == 0.0 and not run.line._accounts
        for payer in {task.payer for task in run.order}:
            numbers = [task.number for task in run.order if task.payer == payer]
            assert numbers == sorted(numbers) and len(numbers) == len(set(numbers))
        never = len(puts) - len(run.order)
        assert never <= len(left)

    def test_removed_task_may_be_removed_again(self) -> None:
        line = FairQueue()
        places = [line.put(Task(name, Payer("a", name))) for name in "abc"]
        line.remove(places[1])
        line.remove(places[1])
        taken = [place.work for place in iter(line.take, None)]
        assert taken == ["a", "c"]
        line.remove(places[0])
        assert len(line) == 0


class TestForecast:
    def test_a_client_waits_for_its_own_jobs_in_turn_with_others(self) -> None:
        line = FairQueue()
        a, b = Payer("a"), Payer("b")
        for payer in (a, b):
            for number in range(10):
                line.put(Task(number, payer))
                place = line.take()
                assert place is not None
                line.done(place, 0.1)
        for number in range(100):
            line.put(Task(number, b))
        assert line.wait(b) == pytest.approx(10) and line.wait(a) == 0.0
        for number in range(10):
            line.put(Task(number, a))
        assert line.wait(a) == pytest.approx(2.1), "its own second of work, and as much of the other's"
        assert line.wait(b) == pytest.approx(11), "never more than there is"

    def test_the_first_job_at_a_cut_does_not_count(self) -> None:
        line = FairQueue()
        for seconds in (5.0, 0.01, 0.01, 0.01):
            line.put(Task(0, Payer("a")))
            place = line.take()
            assert place is not None
            line.done(place, seconds)
        assert line.cost(Payer("a")) == pytest.approx(0.01)


class TestMemory:
    def test_short_lived_and_changing_flows(self) -> None:
        shares: Flows[int] = Flows()
        shares.wait(-1)
        for number in range(20_000):
            shares.wait(number)
            if number % 2:
                shares.leave(number)
            else:
                assert shares.first() is not None
                shares.start(number, 1.0)
                shares.leave(number)
                shares.end(number, 1.0, 1.0)
        assert len(shares) <= 2 * KEPT + 2 and len(shares._line) < 200
        assert shares.weight == 1.0


def void(_: object) -> None:
    """Discard the result of a call."""
