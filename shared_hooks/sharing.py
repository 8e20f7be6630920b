"""Share a bounded resource fairly, and decide who is evicted at the bound.

While there is room, all get what they request. At the bound max-min fairness decides: the largest holder is evicted for
one who would hold less, including the request. It is applied twice: between *accounts*, then between the *clients* of
one account, which choose their own names. Nothing here locks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")

MAX_USERS = 8
"""Maximum clients that an entry counts for: its earlier users may still use it, but no longer hold it."""


class Owner(NamedTuple):
    """A holder. ``client`` is its self-chosen name, of which it may have many; ``account`` its authenticated
    identity.
    """

    account: str = ""
    client: str = ""


class Shares:
    """The holdings of all parties, against one bound."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.total = 0
        self._of: dict[str, dict[str, int]] = {}
        self._sums: dict[str, int] = {}

    def add(self, owner: Owner, amount: int) -> None:
        """Add ``amount``, which may be negative, to a owner's holding. Does not check the bound; see `has_room`."""
        if amount < 0:
            self.remove(owner, -amount)
        elif amount:
            account, client = owner
            clients = self._of.setdefault(account, {})
            clients[client] = clients.get(client, 0) + amount
            self._sums[account] = self._sums.get(account, 0) + amount
            self.total += amount

    def remove(self, owner: Owner, amount: int) -> None:
        """Reduce a owner's holding; a owner without any is forgotten. Raises ValueError below 0."""
        if not amount:
            return
        account, client = owner
        clients = self._of.get(account, {})
        held = clients.get(client, 0) - amount
        if held < 0:
            raise ValueError(f"{owner} gives back {amount} and holds {held + amount}")
        self.total -= amount
        self._sums[account] -= amount
        if held:
            clients[client] = held
            return
        del clients[client]
        if not clients:
            del self._of[account], self._sums[account]

    def has_room(self, amount: float = 0) -> bool:
        return self.total + amount <= self.limit

    def account(self, account: str) -> int:
        """Return the sum over all clients of an account."""
        return self._sums.get(account, 0)

    def of(self, account: str, limit: float) -> Shares:
        """Return a copy of one account's holdings, against a limit of its own."""
        own = Shares(limit)
        for client, amount in self._of.get(account, {}).items():
            own.add(Owner(account, client), amount)
        return own

    def client(self, owner: Owner) -> int:
        return self._of.get(owner.account, {}).get(owner.client, 0)

    def fullest(self) -> Owner | None:
        """Return the largest client of the largest account; None without holdings."""
        if not self._sums:
            return None
        account = max(self._sums, key=self._sums.__getitem__)
        clients = self._of[account]
        return Owner(account, max(clients, key=clients.__getitem__))

    def parties(self) -> Iterator[tuple[Owner, int]]:
        for account, clients in self._of.items():
            for client, amount in clients.items():
                yield Owner(account, client), amount


@dataclass(frozen=True)
class Holding(Generic[T]):
    """An evictable holding.

    ``usefulness``: of a owner's holdings the least useful is evicted first; None: it cannot be evicted. ``is_idle``: it
    waits for its client, which is inactive.
    """

    thing: T
    owner: Owner
    amount: int
    usefulness: tuple[float, ...] | None
    is_idle: bool = False


def evictions(shares: Shares, newcomer: Owner, amount: int, holdings: Iterable[Holding[T]]) -> list[T] | None:
    """Return what to evict so that ``newcomer`` can have ``amount``; None if it is denied, and nothing is evicted.

    First what is idle in the newcomer's own account; then holdings of the largest account, while the newcomer's is
    smaller including the request; then the same between the clients of the newcomer's own account.
    """
    left = sorted((one for one in holdings if one.usefulness is not None and one.amount), key=_least_useful)
    accounts: Counter[str] = Counter()
    clients: Counter[Owner] = Counter()
    """Evictions, by client."""
    gone: list[T] = []

    def heavy(one: Holding[T]) -> tuple[int, int, int] | None:
        """Return how much this one's side holds; None if it need not be evicted."""
        account = shares.account(one.owner.account) - accounts[one.owner.account]
        client = shares.client(one.owner) - clients[one.owner]
        if one.owner.account != newcomer.account:
            own = shares.account(newcomer.account) - accounts[newcomer.account] + amount
            return (1, account, client) if account > own else None
        if one.is_idle:
            return (2, 0, 0)
        alone = shares.client(newcomer) - clients[newcomer] + amount
        return (0, 0, client) if client > alone else None

    short = shares.total + amount - shares.limit
    while short > 0:
        # of equals the first, which is the least useful
        best = max(((heavy(one) or (-1, 0, 0), -at) for at, one in enumerate(left)), default=((-1, 0, 0), 0))
        if best[0][0] < 0:
            return None
        one = left.pop(-best[1])
        gone.append(one.thing)
        accounts[one.owner.account] += one.amount
        clients[one.owner] += one.amount
        short -= one.amount
    return gone


def _least_useful(one: Holding[T]) -> tuple[float, ...]:
    return one.usefulness or ()


class SharedCache(Generic[K, V]):
    """A cache bounded by number and total size.

    Each entry counts for its latest users. Beyond a bound, the largest holder loses its least recently used entry; an
    entry without holders is dropped. So a owner with ever new entries evicts its own.
    """

    def __init__(self, most: int, most_bytes: float) -> None:
        """``most_bytes``: of the sizes passed to `put`, in any unit."""
        self._kept: dict[K, tuple[V, int]] = {}
        self._users: dict[K, list[Owner]] = {}
        self._used: dict[Owner, OrderedDict[K, None]] = {}
        self._most, self._most_bytes = most, most_bytes
        self._numbers, self._sizes = Shares(most), Shares(most_bytes)
        self.nbytes = 0
        """Total size of all entries, each counted once."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def get(self, key: K, owner: Owner) -> V | None:
        """Return the entry of this key, which then counts for ``owner``, too."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._claim(key, owner)
        return found[0]

    def put(self, key: K, value: V, size: int, owner: Owner) -> None:
        """Keep an entry, replacing the key's old one; at least until the next call."""
        self.drop(key)
        self._kept[key] = value, size
        self._users[key] = []
        self.nbytes += size
        self._claim(key, owner)
        while len(self._kept) > 1 and (len(self._kept) > self._most or self.nbytes > self._most_bytes):
            shares = self._numbers if len(self._kept) > self._most else self._sizes
            fullest = shares.fullest()
            if fullest is None or self._oldest(fullest) == key:  # the newest is not evicted for older ones
                others = (owner for owner in self._used if self._oldest(owner) != key)
                fullest = max(others, key=lambda owner: (shares.account(owner.account), shares.client(owner)))
            self._disclaim(self._oldest(fullest), fullest)

    def drop(self, key: K) -> None:
        """Drop an entry; an unknown key is ignored."""
        for owner in list(self._users.get(key, ())):
            self._disclaim(key, owner)

    def keys(self) -> list[K]:
        return list(self._kept)

    def values(self) -> list[V]:
        return [value for value, _ in self._kept.values()]

    def clear(self) -> None:
        for key in self.keys():
            self.drop(key)

    def _oldest(self, owner: Owner) -> K:
        return next(iter(self._used[owner]))

    def _claim(self, key: K, owner: Owner) -> None:
        users = self._users[key]
        mine = self._used.setdefault(owner, OrderedDict())
        if key not in mine:
            mine[key] = None
            users.append(owner)
            self._count(key, owner, add=True)
            if len(users) > MAX_USERS:
                self._disclaim(key, users[0])
        elif users[-1] != owner:
            users.remove(owner)
            users.append(owner)
        mine.move_to_end(key)

    def _disclaim(self, key: K, owner: Owner) -> None:
        self._count(key, owner, add=False)
        mine = self._used[owner]
        del mine[key]
        if not mine:
            del self._used[owner]
        self._users[key].remove(owner)
        if not self._users[key]:
            del self._users[key]
            self.nbytes -= self._kept.pop(key)[1]

    def _count(self, key: K, owner: Owner, add: bool) -> None:
        size = self._kept[key][1]
        for shares, amount in ((self._numbers, 1), (self._sizes, size)):
            (shares.add if add else shares.remove)(owner, amount)
