"""The queue of tasks for the workers: accounts share the time, in each of them its clients do, and one client's tasks
are done in their order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

# Who is next, so that everybody who waits gets an equal share of the time: start-time fair queueing.
#
# Each flow has a tag, the virtual time at which its next job may start: what its jobs took, divided by its weight, so
# the least tag has had least. A flow that comes back starts at the clock, however long it was away: nobody saves up.
# The clock is the greatest tag that was served, and advances a little with every job, so that flows that are new all
# the time pass only so long before one that waits (P. Goyal et al., Start-time Fair Queueing, SIGCOMM 1996). What a
# job takes is known only afterwards: it is guessed when it starts and corrected when it ends.
#
# Who asks for more than its share is turned away, and pays for that, too: at most as much again as for what was done,
# so its share shrinks to half while it continues, and the others have the rest.


Name = TypeVar("Name", bound=Hashable)

STRIDE_SECONDS = 0.1
"""The clock advances by no more than this for one job: a long job of one flow sends no other to the back."""
FINE_SECONDS = 1.0
"""Most seconds of refused jobs that are paid for at once."""
KEPT = 256
"""Flows that neither wait nor run, and are remembered for what they took."""


class _Flow:
    __slots__ = ("finable", "number", "running", "tag", "waits", "weight")

    def __init__(self, weight: float, tag: float) -> None:
        self.weight = weight
        self.tag = tag
        self.finable = 0.0
        """Seconds that were done, and not paid for twice yet."""
        self.number = 0
        """When it began to wait: settles ties."""
        self.running = 0
        self.waits = False


class Flows(Generic[Name]):
    """Flows by name. Every call costs O(log n), on the average over calls. One thread at a time."""

    def __init__(self) -> None:
        self._flows: dict[Name, _Flow] = {}
        self._line: list[tuple[float, int, Name]] = []
        """A heap of (tag, number, name); those whose flow has moved on are skipped."""
        self._waiting = 0
        self._weight = 0.0
        """The weight of all flows that wait or run."""
        self._clock = 0.0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def weight(self) -> float:
        """The weight of all flows that wait or run, together."""
        return self._weight

    def active(self, name: Name) -> bool:
        """Whether it waits or runs."""
        flow = self._flows.get(name)
        return flow is not None and (flow.waits or flow.running > 0)

    def wait(self, name: Name, weight: float = 1.0) -> None:
        """It has a job that waits; may be said again."""
        flow = self._flows.get(name)
        if flow is None:
            self._forget()
            flow = self._flows[name] = _Flow(weight, self._clock)
        if flow.waits:
            return
        if not flow.running:
            flow.weight = weight
            flow.tag = max(flow.tag, self._clock)
            self._weight += weight
        flow.waits = True
        flow.number = next(self._numbers)
        self._waiting += 1
        self._push(name, flow)

    def leave(self, name: Name) -> None:
        """It has no job that waits any more."""
        flow = self._flows.get(name)
        if flow is not None and flow.waits:
            flow.waits = False
            self._waiting -= 1
            self._rest(flow)

    def first(self) -> Name | None:
        """The one that waits and has had least; None when nobody waits."""
        while self._line:
            tag, number, name = self._line[0]
            flow = self._flows.get(name)
            if flow is not None and flow.waits and (flow.tag, flow.number) == (tag, number):
                return name
            heapq.heappop(self._line)
        return None

    def place(self, name: Name) -> tuple[float, int]:
        """The place of a flow that waits: whoever has the least is first."""
        flow = self._flows[name]
        return flow.tag, flow.number

    def precedes(self, name: Name) -> bool:
        """Whether another one that waits has had no more than this one, which runs."""
        first = self.first()
        return first is not None and first != name and self._flows[first].tag <= self._flows[name].tag

    def start(self, name: Name, seconds: float) -> None:
        """A job of it starts, and will take about so long."""
        flow = self._flows[name]
        self._clock = max(self._clock, flow.tag)
        flow.running += 1
        self._charge(name, flow, seconds)

    def charge(self, name: Name, seconds: float) -> None:
        """A job of it that runs has taken so long beyond what was said."""
        self._charge(name, self._flows[name], seconds)

    def fine(self, name: Name, seconds: float) -> None:
        """A job that would have taken so long was turned away."""
        flow = self._flows.get(name)
        if flow is not None:
            seconds = min(seconds, flow.finable)
            flow.finable -= seconds
            self._pay(name, flow, seconds)

    def end(self, name: Name, guessed: float, seconds: float) -> None:
        """A job of it is over; ``guessed`` is what `start` was given."""
        flow = self._flows[name]
        self._clock += min(seconds, STRIDE_SECONDS) / (self._weight + flow.weight)
        flow.running -= 1
        self._charge(name, flow, seconds - guessed)
        self._rest(flow)

    def _charge(self, name: Name, flow: _Flow, seconds: float) -> None:
        flow.finable = min(max(flow.finable + seconds, 0.0), FINE_SECONDS)
        self._pay(name, flow, seconds)

    def _pay(self, name: Name, flow: _Flow, seconds: float) -> None:
        flow.tag += seconds / flow.weight
        if flow.waits:
            self._push(name, flow)

    def _rest(self, flow: _Flow) -> None:
        if not flow.waits and not flow.running:
            self._weight -= flow.weight

    def _push(self, name: Name, flow: _Flow) -> None:
        heapq.heappush(self._line, (flow.tag, flow.number, name))
        if len(self._line) > 2 * self._waiting + 64:
            self._line = [(flow.tag, flow.number, name) for name, flow in self._flows.items() if flow.waits]
            heapq.heapify(self._line)

    def _forget(self) -> None:
        """Where too many rest: those whose tag is past, and if that is not enough, those who took least."""
        if len(self._flows) < 2 * KEPT + self._waiting:
            return
        resting = [(flow.tag, name) for name, flow in self._flows.items() if not flow.waits and not flow.running]
        resting.sort(key=lambda one: one[0])
        for number, (tag, name) in enumerate(resting):
            if tag <= self._clock or len(resting) - number > KEPT:
                del self._flows[name]


Waiting = Callable[[Hashable], int]
"""Rows that there are of a batch key."""


@dataclass(frozen=True)
class Payer:
    """The account that a task is charged to, and within it the client.

    ``weight``: the account's share of the workers beside others'; 2 gets twice what 1 gets.
    """

    account: str
    client: str = ""
    weight: float = 1.0


@dataclass(eq=False, slots=True)
class Task:
    """One thing for a worker to do."""

    work: Any
    """For the executor: a request, or what is called and gives whether its time says something of the next one's."""
    payer: Payer
    batch_key: Hashable = None
    """Equal for tasks that may be computed together; None: it is computed alone."""
    rows: int = 1
    """Its size in a batch."""
    wanted_rows: int = 0
    """Rows that its client sends at once, this task's included."""
    nbytes: int = 0
    """What it takes in memory while it is computed."""
    compatible_keys: Callable[[Hashable, Waiting, int], Collection[Hashable]] | None = None
    """Other batch keys worth computing with a given one: the key, the rows there are of any, the most of a batch."""
    seconds_left: Callable[[], float] | None = None
    """Until the deadline that its client set; None without one."""
    guess: float = 0.0
    """Seconds that it is thought to take; set by the queue."""
    number: int = field(default=-1)
    """When it came; set by the queue."""


# What a task takes, guessed from the last ones of the same kind.

LAST = 16
FAIR_QUEUE_KEPT = 1024
ENOUGH = 3
"""Tasks after which a guess may be used to turn somebody away."""


class Costs:
    """Seconds by name, of the names used last. The longest of the last tasks does not count: it may have been the first
    at its cut, whose tail had to be worked out. One thread at a time.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, deque[float]] = OrderedDict()
        self._guess: dict[Hashable, float] = {}

    def add(self, name: Hashable, seconds: float) -> None:
        seen = self._seen.get(name)
        if seen is None:
            seen = self._seen[name] = deque(maxlen=LAST)
            if len(self._seen) > FAIR_QUEUE_KEPT:
                del self._guess[self._seen.popitem(last=False)[0]]
        self._seen.move_to_end(name)
        seen.append(seconds)
        self._guess[name] = (sum(seen) - max(seen)) / (len(seen) - 1) if len(seen) > 1 else seconds

    def guess(self, name: Hashable) -> float | None:
        """None for one that nothing is known of."""
        return self._guess.get(name)

    def knows(self, name: Hashable) -> bool:
        """Whether enough tasks of it are known."""
        return len(self._seen.get(name, ())) >= ENOUGH


EVERYBODY = None
"""Under this name `Costs` knows what all tasks take."""


@dataclass(frozen=True)
class Forecast:
    """What to expect of a task put now: seconds that it would wait for a worker, and then take."""

    wait: float = 0.0
    takes: float = 0.0

    def late(self, left: float) -> float:
        """By how much it would miss its end, ``left`` seconds from now; 0 = it would not, or nobody can say.

        Without a wait it is never late, nor for what it takes if that alone is too long: what was measured may have
        been a bad moment, and only another task shows.
        """
        takes = self.takes if self.takes < left else 0.0
        return max(0.0, self.wait + takes - left) if self.wait > 0 else 0.0


class _Waiting:
    """One client's tasks that wait."""

    __slots__ = ("seconds", "tasks")

    def __init__(self) -> None:
        self.tasks: OrderedDict[int, Task] = OrderedDict()
        self.seconds = 0.0


class _Account:
    """One account's."""

    __slots__ = ("clients", "flows", "running", "seconds")

    def __init__(self) -> None:
        self.flows: Flows[str] = Flows()
        self.clients: dict[str, _Waiting] = {}
        self.seconds = 0.0
        """Seconds of work that waits, as it is guessed."""
        self.running = 0


class FairQueue:
    """Every call costs O(log n), `take_alike` as much as there are clients that wait. One thread at a time."""

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers
        self._numbers = itertools.count()
        self._flows: Flows[str] = Flows()
        self._accounts: dict[str, _Account] = {}
        """Those with a task that waits or runs, and those whose clients' flows are still remembered."""
        self._costs = Costs()
        self._batch_keys: Counter[Hashable] = Counter()
        """Rows that wait of each."""
        self._seconds = 0.0
        self._length = 0

    def __len__(self) -> int:
        """Tasks that wait."""
        return self._length

    def put(self, task: Task) -> Task:
        """The task waits behind the others of its client; the result is the task."""
        payer = task.payer
        task.number, task.guess = next(self._numbers), self.cost(payer)
        account = self._accounts.get(payer.account)
        if account is None:
            account = self._accounts[payer.account] = _Account()
        waiting = account.clients.get(payer.client)
        if waiting is None:
            waiting = account.clients[payer.client] = _Waiting()
        waiting.tasks[task.number] = task
        account.flows.wait(payer.client)
        self._flows.wait(payer.account, payer.weight)
        if task.batch_key is not None:
            self._batch_keys[task.batch_key] += task.rows
        self._length += 1
        self._weigh(account, waiting, task.guess)
        return task

    def remove(self, task: Task) -> None:
        """It no longer waits; one that a worker has, or had, is not in the line."""
        account = self._accounts.get(task.payer.account)
        waiting = account.clients.get(task.payer.client) if account else None
        if account is None or waiting is None or waiting.tasks.pop(task.number, None) is None:
            return
        self._left(account, waiting, task)

    def take(self) -> Task | None:
        """The next task, for a worker; None when none waits."""
        name = self._flows.first()
        if name is None:
            return None
        account = self._accounts[name]
        client = account.flows.first()
        assert client is not None, "an account waits without a client that does"
        return self._taken(name, client)

    def take_alike(self, keys: Collection[Hashable], most: int, most_bytes: float = math.inf) -> list[Task]:
        """Tasks of up to ``most`` rows and ``most_bytes`` of these batch keys, for a worker that has one of them: each
        is the next of its client, and clients that have had least come first.
        """
        found: list[Task] = []
        while any(self._batch_keys.get(one) for one in keys) and most > 0:
            candidates = [
                (self._flows.place(name), account.flows.place(client), name, client)
                for name, account in self._accounts.items()
                for client, waiting in account.clients.items()
                if (first := next(iter(waiting.tasks.values()))).batch_key in keys
                and first.rows <= most
                and first.nbytes <= most_bytes
            ]
            if not candidates:
                break
            *_, name, client = min(candidates)
            found.append(self._taken(name, client))
            most -= found[-1].rows
            most_bytes -= found[-1].nbytes
        return found

    def waiting(self, batch_key: Hashable) -> int:
        """Rows that wait with this batch key."""
        return self._batch_keys.get(batch_key, 0)

    def _taken(self, name: str, client: str) -> Task:
        """A worker has the next task of this client."""
        account = self._accounts[name]
        waiting = account.clients[client]
        _, task = waiting.tasks.popitem(last=False)
        account.running += 1
        self._flows.start(name, task.guess)
        account.flows.start(client, task.guess)
        self._left(account, waiting, task)
        return task

    def charge(self, payer: Payer, seconds: float) -> None:
        """A task of this client runs, and has taken so long so far, or since the last time."""
        self._accounts[payer.account].flows.charge(payer.client, seconds)
        self._flows.charge(payer.account, seconds)

    def turned_away(self, payer: Payer) -> None:
        """A task of it was refused for want of a place or of time."""
        account, cost = self._accounts.get(payer.account), self.cost(payer)
        if account is not None:
            account.flows.fine(payer.client, cost)
        self._flows.fine(payer.account, cost)

    def done(self, task: Task, seconds: float, counts: bool = True) -> None:
        """A worker is through with it, after so many seconds: of tasks done together, each its part. ``counts``: it is
        like the next one of its client.
        """
        payer = task.payer
        account = self._accounts[payer.account]
        account.running -= 1
        account.flows.end(payer.client, task.guess, seconds)
        self._flows.end(payer.account, task.guess, seconds)
        if counts:
            for name in ((payer.account, payer.client), payer.account, EVERYBODY):
                self._costs.add(name, seconds)
        self._tidy(payer.account, account)

    def cost(self, payer: Payer) -> float:
        """Seconds that a task of this client may take, going by its last ones, else by its account's, else by all."""
        for name in ((payer.account, payer.client), payer.account, EVERYBODY):
            guess = self._costs.guess(name)
            if guess is not None:
                return guess
        return 0.0

    def forecast(self, payer: Payer) -> Forecast:
        """What to expect of a task put now; nothing where its client has had too few."""
        if not self._costs.knows((payer.account, payer.client)):
            return Forecast()
        return Forecast(self.wait(payer), self.cost(payer))

    def takes(self, payer: Payer) -> float:
        """Seconds that a task of this client takes, going by its last ones; 0 where it has had too few."""
        return self.cost(payer) if self._costs.knows((payer.account, payer.client)) else 0.0

    def wait(self, payer: Payer) -> float:
        """Seconds that a task put now may wait, going by what waits already and what such tasks took.

        A client's own tasks, this one too, take turns with those of others of its account, and these with other
        accounts'; but it waits for no more than there is.
        """
        account = self._accounts.get(payer.account)
        own = account.clients.get(payer.client) if account else None
        if account is None or own is None:
            return 0.0
        cost = self.cost(payer)
        of_account = min(account.seconds + cost, (own.seconds + cost) * account.flows.weight)
        of_all = min(self._seconds + cost, of_account * self._flows.weight / payer.weight)
        return (of_all - cost) / self._workers

    def ahead(self, payer: Payer) -> bool:
        """Whether somebody who waits has had less than this client, of whom a task runs: another account, or another
        client of its own.
        """
        if self._flows.first() != payer.account:
            return self._flows.precedes(payer.account)
        return self._accounts[payer.account].flows.precedes(payer.client)

    def _left(self, account: _Account, waiting: _Waiting, task: Task) -> None:
        """One task fewer waits; it was taken out of its client's already."""
        self._length -= 1
        if task.batch_key is not None:
            self._batch_keys[task.batch_key] -= task.rows
            if not self._batch_keys[task.batch_key]:
                del self._batch_keys[task.batch_key]
        self._weigh(account, waiting, -task.guess)
        if waiting.tasks:
            return
        del account.clients[task.payer.client]
        account.flows.leave(task.payer.client)
        if not account.clients:
            account.seconds = 0.0  # sums of what came and went drift
            self._flows.leave(task.payer.account)
            self._tidy(task.payer.account, account)
        if not self._length:
            self._seconds = 0.0

    def _weigh(self, account: _Account, waiting: _Waiting, seconds: float) -> None:
        waiting.seconds += seconds
        account.seconds += seconds
        self._seconds += seconds

    def _tidy(self, name: str, account: _Account) -> None:
        """Nobody of the account waits or runs: its clients are forgotten, and start again as equals."""
        if not account.clients and not account.running:
            del self._accounts[name]
