"""What one may use in a minute, and what it has used: an identity's requests and bytes (`Policy.requests_per_minute`,
`bytes_per_minute`), and of everybody what is bounded for each account.

A quota fills up evenly (a token bucket): what is saved up is at most `BURST_SECONDS` of it, so in no minute does an
identity get more than that beyond its quota.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from cloud_server.access.identities import Caller
from shared_hooks.errors import QuotaExceeded

BURST_SECONDS = 10.0
KEPT = 4096
"""Accounts that are remembered."""


class Bucket:
    """So many tokens a second, of which ``most`` are kept. What is larger than all that it keeps is taken when it is
    full, and paid for afterwards. One thread at a time.
    """

    def __init__(self, per_second: float, most: float, now: float) -> None:
        self._rate = per_second
        self._most = most
        self._tokens = most
        self._at = now

    def wait(self, tokens: float, now: float) -> float:
        """Seconds until so many may be taken; 0 = now."""
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now
        missing = min(tokens, self._most) - self._tokens
        return missing / self._rate if missing > 1e-9 else 0.0

    def take(self, tokens: float) -> None:
        self._tokens -= tokens


class Quotas:
    """The quotas of all accounts. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._used: OrderedDict[tuple[str, str, int], Bucket] = OrderedDict()

    def spend(self, caller: Caller, nbytes: int) -> None:
        """One request of so many bytes. Raises QuotaExceeded, and then nothing is spent."""
        policy = caller.policy
        wanted = [
            ("requests", policy.requests_per_minute, 1),
            ("bytes", policy.bytes_per_minute, nbytes),
        ]
        self.take(caller, [(what, quota, count) for what, quota, count in wanted if quota])

    def take(self, caller: Caller, wanted: list[tuple[str, int, int]], burst_seconds: float = BURST_SECONDS) -> None:
        """(what, how many a minute, how many of it now), all or nothing. Raises QuotaExceeded, which says when there is
        more. ``burst_seconds``: how much is saved up; always the same for one thing.
        """
        if not wanted:
            return
        with self._lock:
            now = self._clock()
            buckets = [self._bucket(caller.account, what, quota, burst_seconds, now) for what, quota, _ in wanted]
            for bucket, (what, quota, count) in zip(buckets, wanted, strict=True):
                wait = bucket.wait(count, now)
                if wait > 0:
                    error = QuotaExceeded(
                        f"{caller.account} has used up its {quota} {what} a minute; {count} more in {wait:.1f} s"
                    )
                    error.retry_after_seconds = wait
                    raise error
            for bucket, (_, _, count) in zip(buckets, wanted, strict=True):
                bucket.take(count)

    def _bucket(self, account: str, what: str, quota: int, burst_seconds: float, now: float) -> Bucket:
        """A changed quota begins with a bucket of its own."""
        key = account, what, quota
        found = self._used.get(key)
        if found is None:
            rate = quota / 60
            found = self._used[key] = Bucket(rate, max(1.0, rate * burst_seconds), now)
            if len(self._used) > KEPT:
                self._used.popitem(last=False)
        self._used.move_to_end(key)
        return found
