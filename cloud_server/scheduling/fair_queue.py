"""A fair queue of tasks for the workers. Accounts share the workers' time by weight, the clients of an account share
its part equally, and the tasks of one client run in the order in which they came.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

# Picks the next job so that every waiting account gets an equal share of the time: start-time fair queueing.
#
# Each flow has a tag, the virtual time at which its next job may start: the time of its jobs divided by its weight,
# so the lowest tag has had the least. A returning flow starts at the clock, however long it was idle: time is not
# saved up. The clock is the greatest tag that was served, and advances a little with every job, so that flows that
# are new all the time overtake a waiting one only for a bounded time (P. Goyal et al., Start-time Fair Queueing,
# SIGCOMM 1996). The time of a job is known only afterwards: it is estimated when the job starts and corrected when it
# ends.
#
# A flow that asks for more than its share is rejected, and is charged for that: at most as much again as for its
# completed work, so its share shrinks to half while it continues, and the others get the rest.


Name = TypeVar("Name", bound=Hashable)

STRIDE_SECONDS = 0.1
"""The virtual clock advances by at most this much for one job, so that a long job of one flow does not delay others."""
FINE_SECONDS = 1.0
"""The most seconds of refused jobs that a flow is charged for at once."""
KEPT = 256
"""How many idle flows are remembered with the service they received."""


class _Flow:
    __slots__ = ("finable", "number", "running", "tag", "waits", "weight")

    def __init__(self, weight: float, tag: float) -> None:
        self.weight = weight
        self.tag = tag
        self.finable = 0.0
        """Seconds of service that refused jobs may still be charged against."""
        self.number = 0
        """When it began to wait; breaks ties."""
        self.running = 0
        self.waits = False


class Flows(Generic[Name]):
    """A virtual-time fair queue of named flows (accounts, or the clients of one).

    Each call costs O(log n), amortised. Not thread-safe.
    """

    def __init__(self) -> None:
        self._flows: dict[Name, _Flow] = {}
        self._line: list[tuple[float, int, Name]] = []
        """A heap of (tag, number, name); entries of flows that have moved on are skipped."""
        self._waiting = 0
        self._weight = 0.0
        """The sum of the weights of all flows that wait or run."""
        self._clock = 0.0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def weight(self) -> float:
        """The sum of the weights of all flows that wait or run."""
        return self._weight

    def active(self, name: Name) -> bool:
        """Return whether the flow waits or runs."""
        flow = self._flows.get(name)
        return flow is not None and (flow.waits or flow.running > 0)

    def wait(self, name: Name, weight: float = 1.0) -> None:
        """Mark the flow as having a waiting job. Idempotent."""
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
        """Mark the flow as having no waiting job."""
        flow = self._flows.get(name)
        if flow is not None and flow.waits:
            flow.waits = False
            self._waiting -= 1
            self._rest(flow)

    def first(self) -> Name | None:
        """Return the waiting flow that has received the least service, or None."""
        while self._line:
            tag, number, name = self._line[0]
            flow = self._flows.get(name)
            if flow is not None and flow.waits and (flow.tag, flow.number) == (tag, number):
                return name
            heapq.heappop(self._line)
        return None

    def place(self, name: Name) -> tuple[float, int]:
        """Return the sort key of a waiting flow: the one with the least service comes first."""
        flow = self._flows[name]
        return flow.tag, flow.number

    def precedes(self, name: Name) -> bool:
        """Return whether another waiting flow has received no more service than this running one."""
        first = self.first()
        return first is not None and first != name and self._flows[first].tag <= self._flows[name].tag

    def start(self, name: Name, seconds: float) -> None:
        """Start a job of the flow, which is charged the expected ``seconds`` at once."""
        flow = self._flows[name]
        self._clock = max(self._clock, flow.tag)
        flow.running += 1
        self._charge(name, flow, seconds)

    def charge(self, name: Name, seconds: float) -> None:
        """Charge the flow for ``seconds`` that a running job took beyond what was expected."""
        self._charge(name, self._flows[name], seconds)

    def fine(self, name: Name, seconds: float) -> None:
        """Charge the flow for a job of ``seconds`` that was refused."""
        flow = self._flows.get(name)
        if flow is not None:
            seconds = min(seconds, flow.finable)
            flow.finable -= seconds
            self._pay(name, flow, seconds)

    def end(self, name: Name, guessed: float, seconds: float) -> None:
        """End a job of the flow; ``guessed`` is what `start` was given, ``seconds`` what it took."""
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
        """Forget idle flows if there are too many: first those whose tag is past, then those with the least service."""
        if len(self._flows) < 2 * KEPT + self._waiting:
            return
        resting = [(flow.tag, name) for name, flow in self._flows.items() if not flow.waits and not flow.running]
        resting.sort(key=lambda one: one[0])
        for number, (tag, name) in enumerate(resting):
            if tag <= self._clock or len(resting) - number > KEPT:
                del self._flows[name]


Waiting = Callable[[Hashable], int]
"""The number of existing rows for a batch key."""


@dataclass(frozen=True)
class Payer:
    """The client that a task is charged to, and its account.

    ``weight``: the account's share of the workers relative to others; 2 gets twice what 1 gets.
    """

    account: str
    client: str = ""
    weight: float = 1.0


@dataclass(eq=False, slots=True)
class Task:
    """A unit of work for a worker."""

    work: Any
    """For the executor: a request, or a callable that returns whether its duration predicts that of the next one."""
    payer: Payer
    batch_key: Hashable = None
    """Tasks with equal keys may be computed together; None: it is computed alone."""
    rows: int = 1
    """The rows that it adds to a batch."""
    wanted_rows: int = 0
    """The rows that its client sends at once, including this task's."""
    nbytes: int = 0
    """The bytes of memory that computing it takes."""
    compatible_keys: Callable[[Hashable, Waiting, int], Collection[Hashable]] | None = None
    """Other batch keys that may be combined with a key, given that key, the rows of each key, and the largest batch."""
    seconds_left: Callable[[], float] | None = None
    """Seconds until the client's deadline; None without one."""
    guess: float = 0.0
    """The expected duration in seconds; set by the queue."""
    number: int = field(default=-1)
    """The order of arrival; set by the queue."""


# The time of a task, estimated from the last ones of the same kind.

LAST = 16
FAIR_QUEUE_KEPT = 1024
ENOUGH = 3
"""The number of tasks from which an estimate may be used to refuse one."""


class Costs:
    """Estimates of a task's duration by name, from the most recent tasks.

    The longest recent task is left out: it may have been the first at its cut, whose tail had to be prepared. Only
    names used recently are kept. Not thread-safe.
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
        """Return the estimate in seconds, or None for an unknown name."""
        return self._guess.get(name)

    def knows(self, name: Hashable) -> bool:
        """Return whether enough tasks of this name have been seen for `guess` to refuse one."""
        return len(self._seen.get(name, ())) >= ENOUGH


ALL_ACCOUNTS = None
"""The name under which `Costs` keeps all tasks."""


@dataclass(frozen=True)
class Forecast:
    """The expected wait and duration, in seconds, of a task that is put now."""

    wait: float = 0.0
    takes: float = 0.0

    def late(self, left: float) -> float:
        """Return by how many seconds the task would miss a deadline ``left`` seconds from now; 0 if it would not, or if
        unknown.

        A task that need not wait is never late, and its own duration does not count if that alone exceeds ``left``: the
        measurement may have been an outlier, and only another run can show that.
        """
        takes = self.takes if self.takes < left else 0.0
        return max(0.0, self.wait + takes - left) if self.wait > 0 else 0.0


class _Waiting:
    """The waiting tasks of one client."""

    __slots__ = ("seconds", "tasks")

    def __init__(self) -> None:
        self.tasks: OrderedDict[int, Task] = OrderedDict()
        self.seconds = 0.0


class _Account:
    """The clients of one account."""

    __slots__ = ("clients", "flows", "running", "seconds")

    def __init__(self) -> None:
        self.flows: Flows[str] = Flows()
        self.clients: dict[str, _Waiting] = {}
        self.seconds = 0.0
        """The expected duration of all waiting work, in seconds."""
        self.running = 0


class FairQueue:
    """Tasks in the order in which workers take them.

    Each call costs O(log n); `take_batchable` is linear in the number of waiting clients. Not thread-safe.
    """

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers
        self._numbers = itertools.count()
        self._flows: Flows[str] = Flows()
        self._accounts: dict[str, _Account] = {}
        """Accounts with a task that waits or runs, and those whose clients' service is still remembered."""
        self._costs = Costs()
        self._batch_keys: Counter[Hashable] = Counter()
        """The number of waiting rows by batch key."""
        self._seconds = 0.0
        self._length = 0

    def __len__(self) -> int:
        """Return the number of waiting tasks."""
        return self._length

    def put(self, task: Task) -> Task:
        """Append ``task`` to its client's tasks, and return it."""
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
        """Take ``task`` out of the queue; no effect if it does not wait."""
        account = self._accounts.get(task.payer.account)
        waiting = account.clients.get(task.payer.client) if account else None
        if account is None or waiting is None or waiting.tasks.pop(task.number, None) is None:
            return
        self._left(account, waiting, task)

    def take(self) -> Task | None:
        """Take the next task, or None if none waits."""
        name = self._flows.first()
        if name is None:
            return None
        account = self._accounts[name]
        client = account.flows.first()
        assert client is not None, "an account waits without a client that does"
        return self._taken(name, client)

    def take_batchable(self, keys: Collection[Hashable], most: int, most_bytes: float = math.inf) -> list[Task]:
        """Take tasks that can share a batch with the given keys: up to ``most`` rows and ``most_bytes``.

        Only the next task of each client is considered; clients with the least service come first.
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
        """Return the number of waiting rows with this batch key."""
        return self._batch_keys.get(batch_key, 0)

    def _taken(self, name: str, client: str) -> Task:
        """Move the next task of this client from waiting to running."""
        account = self._accounts[name]
        waiting = account.clients[client]
        _, task = waiting.tasks.popitem(last=False)
        account.running += 1
        self._flows.start(name, task.guess)
        account.flows.start(client, task.guess)
        self._left(account, waiting, task)
        return task

    def charge(self, payer: Payer, seconds: float) -> None:
        """Charge the client for ``seconds`` that its running task took since the last charge."""
        self._accounts[payer.account].flows.charge(payer.client, seconds)
        self._flows.charge(payer.account, seconds)

    def turned_away(self, payer: Payer) -> None:
        """Charge the client for a task that was refused."""
        account, cost = self._accounts.get(payer.account), self.cost(payer)
        if account is not None:
            account.flows.fine(payer.client, cost)
        self._flows.fine(payer.account, cost)

    def done(self, task: Task, seconds: float, counts: bool = True) -> None:
        """End ``task`` after ``seconds`` (of a batch: its share). ``counts``: its duration predicts the client's next
        task.
        """
        payer = task.payer
        account = self._accounts[payer.account]
        account.running -= 1
        account.flows.end(payer.client, task.guess, seconds)
        self._flows.end(payer.account, task.guess, seconds)
        if counts:
            for name in ((payer.account, payer.client), payer.account, ALL_ACCOUNTS):
                self._costs.add(name, seconds)
        self._tidy(payer.account, account)

    def cost(self, payer: Payer) -> float:
        """Return the expected duration of a task of this client in seconds, from its own tasks, its account's
        or all.
        """
        for name in ((payer.account, payer.client), payer.account, ALL_ACCOUNTS):
            guess = self._costs.guess(name)
            if guess is not None:
                return guess
        return 0.0

    def forecast(self, payer: Payer) -> Forecast:
        """Forecast a task that is put now; zeros if the client has too few tasks to judge by."""
        if not self._costs.knows((payer.account, payer.client)):
            return Forecast()
        return Forecast(self.wait(payer), self.cost(payer))

    def takes(self, payer: Payer) -> float:
        """Return the expected duration in seconds, or 0 if the client has too few tasks to judge by."""
        return self.cost(payer) if self._costs.knows((payer.account, payer.client)) else 0.0

    def wait(self, payer: Payer) -> float:
        """Return the expected wait, in seconds, of a task that is put now.

        A client's own tasks, with this one, alternate with those of its account's other clients, and the account's with
        those of other accounts; the wait never exceeds the work that is queued.
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
        """Return whether another account, or another client of this account, that waits has received less service than
        this client.
        """
        if self._flows.first() != payer.account:
            return self._flows.precedes(payer.account)
        return self._accounts[payer.account].flows.precedes(payer.client)

    def _left(self, account: _Account, waiting: _Waiting, task: Task) -> None:
        """Account for a waiting task that was taken out of its client's."""
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
            account.seconds = 0.0  # repeated additions and subtractions drift
            self._flows.leave(task.payer.account)
            self._tidy(task.payer.account, account)
        if not self._length:
            self._seconds = 0.0

    def _weigh(self, account: _Account, waiting: _Waiting, seconds: float) -> None:
        waiting.seconds += seconds
        account.seconds += seconds
        self._seconds += seconds

    def _tidy(self, name: str, account: _Account) -> None:
        """Forget the clients of an account of which none waits or runs; they start again as equals."""
        if not account.clients and not account.running:
            del self._accounts[name]
