"""Who is evicted at a bound: sums that always agree with what is held, and nobody pushed out by who holds more."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared_hooks.sharing import MAX_USERS, Holding, Owner, SharedCache, Shares, evictions

PARTIES = st.builds(Owner, st.sampled_from("abc"), st.sampled_from("xyz"))


HOLDINGS = st.lists(
    st.builds(
        Holding,
        st.integers(0, 1 << 30),
        PARTIES,
        st.integers(0, 9),
        st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda one: one.thing,
)


def shares_of(holdings: list[Holding[int]], limit: int) -> Shares:
    shares = Shares(limit)
    for one in holdings:
        shares.add(one.owner, one.amount)
    return shares


@given(HOLDINGS, PARTIES, st.integers(0, 12), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_which_holding_is_evicted(holdings: list[Holding[int]], newcomer: Owner, amount: int, limit: int) -> None:
    shares, by_thing = shares_of(holdings, limit), {one.thing: one for one in holdings}
    gone = evictions(shares, newcomer, amount, holdings)
    if gone is None:
        return  # nothing goes
    assert len(set(gone)) == len(gone)
    for one in map(by_thing.__getitem__, gone):  # each for a reason, as it was when it was chosen
        own, alone = shares.account(newcomer.account) + amount, shares.client(newcomer) + amount
        assert one.usefulness is not None and not shares.has_room(amount)
        if one.owner.account != newcomer.account:
            assert shares.account(one.owner.account) > own
        else:
            assert one.is_idle or shares.client(one.owner) > alone
        shares.remove(one.owner, one.amount)
    assert shares.has_room(amount)


def test_two_that_hold_as_much_do_not_take_from_each_other() -> None:
    ann, bob = Owner("a"), Owner("b")
    equal = [Holding(1, ann, 1, (0,)), Holding(2, bob, 1, (0,))]
    assert evictions(shares_of(equal, 2), bob, 1, equal) is None
    more = [Holding(number, ann, 1, (-number,)) for number in range(3)]
    assert evictions(shares_of(more, 3), bob, 1, more) == [2]  # the least useful


def test_idle_holdings_are_evicted_for_active_ones() -> None:
    ann = Owner("a", "1")
    idle, busy = Holding(1, ann, 4, (0,), is_idle=True), Holding(2, ann, 4, (1,))
    assert evictions(shares_of([idle, busy], 8), ann, 4, [busy, idle]) == [1]
    assert evictions(shares_of([busy], 4), ann, 4, [busy]) is None


class Books(RuleBasedStateMachine):
    """Against a list of all that is held."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares(100)
        self.held: Counter[Owner] = Counter()

    @rule(owner=PARTIES, amount=st.integers(0, 30))
    def add(self, owner: Owner, amount: int) -> None:
        self.shares.add(owner, amount)
        self.held[owner] += amount

    @rule(owner=PARTIES, amount=st.integers(0, 30))
    def remove(self, owner: Owner, amount: int) -> None:
        if amount > self.held[owner]:
            with pytest.raises(ValueError, match="gives back"):
                self.shares.remove(owner, amount)
        else:
            self.shares.remove(owner, amount)
            self.held[owner] -= amount

    @invariant()
    def agrees(self) -> None:
        assert self.shares.total == sum(self.held.values())
        assert dict(self.shares.parties()) == {owner: held for owner, held in self.held.items() if held}
        for account in "abc":
            assert self.shares.account(account) == sum(n for owner, n in self.held.items() if owner.account == account)
        fullest = self.shares.fullest()
        assert (fullest is None) == (self.shares.total == 0)
        if fullest is not None:
            assert all(self.shares.account(fullest.account) >= self.shares.account(account) for account in "abc")

    def teardown(self) -> None:
        for owner, amount in list(self.held.items()):
            self.shares.remove(owner, amount)
        assert self.shares.total == 0 and not self.shares._of and not self.shares._sums  # nothing is remembered


Books.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestBooks = Books.TestCase


class Caches(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache: SharedCache[int, str] = SharedCache(4, 20)

    @rule(key=st.integers(0, 9), size=st.integers(0, 25), owner=PARTIES)
    def put(self, key: int, size: int, owner: Owner) -> None:
        self.cache.put(key, str(key), size, owner)
        assert key in self.cache

    @rule(key=st.integers(0, 9), owner=PARTIES)
    def get(self, key: int, owner: Owner) -> None:
        assert self.cache.get(key, owner) == (str(key) if key in self.cache else None)

    @rule(key=st.integers(0, 9))
    def drop(self, key: int) -> None:
        self.cache.drop(key)
        assert key not in self.cache

    @invariant()
    def is_within_its_bounds(self) -> None:
        cache = self.cache
        assert len(cache) <= 4 and (cache.nbytes <= 20 or len(cache) == 1)
        assert cache.nbytes == sum(size for _, size in cache._kept.values())
        claims = {(key, owner) for owner, keys in cache._used.items() for key in keys}
        assert claims == {(key, owner) for key, parties in cache._users.items() for owner in parties}
        assert cache._numbers.total == len(claims) and cache._users.keys() == cache._kept.keys()
        assert cache._sizes.total == sum(cache._kept[key][1] for key, _ in claims)
        assert all(0 < len(parties) <= MAX_USERS for parties in cache._users.values())

    def teardown(self) -> None:
        self.cache.clear()
        assert not self.cache._used and self.cache.nbytes == self.cache._sizes.total == self.cache._numbers.total == 0


Caches.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestCaches = Caches.TestCase


def test_client_with_many_holdings_evicts_its_own() -> None:
    cache: SharedCache[int, int] = SharedCache(10, 1000)
    honest, churner, other = Owner("a", "honest"), Owner("a", "churner"), Owner("b")
    cache.put(0, 0, 1, honest)
    cache.put(1, 1, 1, other)
    for number in range(2, 500):
        cache.put(number, number, 1, churner)
    assert cache.get(0, honest) == 0 and cache.get(1, other) == 1 and len(cache) == 10


def test_a_thing_used_by_many_outlives_the_one_who_brought_it() -> None:
    cache: SharedCache[int, int] = SharedCache(10, 1000)
    honest, churner = Owner("a"), Owner("b")
    cache.put(0, 0, 1, churner)
    cache.get(0, honest)
    for number in range(1, 500):
        cache.put(number, number, 1, churner)
        for name in range(20):  # nor do names push it out, which cost nothing
            cache.get(number, Owner("b", str(name)))
    assert cache.get(0, honest) == 0
