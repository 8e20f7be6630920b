"""Whether there is room for one more request, and which others make some."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from cloud_server.limits import Limits
from cloud_server.requests.request import Request, State
from shared_hooks.errors import ServerUnavailable
from shared_hooks.sharing import Holding, Party, Shares, giving_way


class Room:
    """Places and bytes of the requests on their way, by account and client. The caller locks."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.places = Shares(limits.max_pending)
        self.memory = Shares(limits.max_pending_bytes)

    def take(self, request: Request) -> None:
        self.places.add(request.party, 1)
        self.memory.add(request.party, request.held_bytes)

    def give_back(self, request: Request) -> None:
        self.places.remove(request.party, 1)
        self.memory.remove(request.party, request.held_bytes)

    def check_client(self, party: Party, undelivered: int) -> None:
        """Raises ServerUnavailable where a client has no place left of its own. ``undelivered``: answers of its stream
        that it has not begun to fetch.
        """
        most = self._limits.max_in_flight
        if self.places.client(party) + undelivered >= most:
            raise ServerUnavailable(
                f"this client has {most} requests in flight, which is the limit (max_in_flight); answers that it has "
                "not fetched count, too"
            )

    def make(self, request: Request, undelivered: int, live: Iterable[Request]) -> dict[Request, str]:
        """The requests that have to give way to this one, each with the reason. Raises ServerUnavailable, naming the
        bound, where nobody gives way. ``undelivered``: see `check_client`.
        """
        self.check_client(request.party, undelivered)
        gone: dict[Request, str] = {}
        for bound, shares, unit, weigh in self._bounds(request):
            amount = weigh(request)
            if shares.has_room(amount) or not shares.total:
                continue
            give = giving_way(shares, request.party, amount, [self._holding(one, weigh(one)) for one in live])
            if give is None:
                raise ServerUnavailable(
                    f"the server has no room: {shares.total} {unit} are on their way, "
                    f"{shares.account(request.party.account)} of them of this account; {bound} is {shares.limit}"
                )
            gone |= dict.fromkeys(give, f"its place was needed ({bound} is {shares.limit})")
        return gone

    def _bounds(self, request: Request) -> Iterator[tuple[str, Shares, str, Callable[[Request], int]]]:
        """Name, who holds how much, of what, and what one request needs of it."""
        policy, account = request.caller.policy, request.party.account
        places, memory = ("requests", _one), ("bytes of requests", _size)
        if policy.max_in_flight:
            yield "max_in_flight of this identity", self.places.of(account, policy.max_in_flight), *places
        if policy.max_bytes:
            yield "max_bytes of this identity", self.memory.of(account, policy.max_bytes), *memory
        yield "max_pending", self.places, *places
        yield "max_pending_bytes", self.memory, *memory

    def _holding(self, request: Request, amount: int) -> Holding[Request]:
        """The least useful: uploads that wait for their client, the longest first; then others, the newest first; then
        what waits for a worker.
        """
        limits = self._limits
        since = request.waiting_since_ns(limits.deadline_seconds)
        is_idle = since is not None and time.perf_counter_ns() - since > limits.idle_seconds * 1e9
        usefulness: tuple[float, ...] | None
        if since is not None:
            usefulness = (0, since) if is_idle else (1, -request.began_ns)
        elif request.state is State.QUEUED:
            usefulness = (2, -request.complete_ns)
        else:
            usefulness = None
        return Holding(request, request.party, amount, usefulness, is_idle)


def _one(_: Request) -> int:
    return 1


def _size(request: Request) -> int:
    return request.held_bytes
