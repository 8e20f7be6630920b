"""Quotas per minute: how much, when there is more, and what the client hears."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_server.access import BURST_SECONDS, KEPT, Caller, Policy, Quotas
from cloud_server.core import Core
from shared_hooks.errors import QuotaExceeded
from tests.cloud_server.fakes import CoreClient, FakeEngine
from tests.cloud_server.small import SMALL


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def caller(**quotas: int) -> Caller:
    return Caller("ipv4:127.0.0.1:5", "alice", Policy(**quotas))  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(
    quota=st.integers(1, 600),
    asked=st.lists(st.floats(0, 5), min_size=1, max_size=300),
)
def test_rate_never_exceeds_quota_and_burst(quota: int, asked: list[float]) -> None:
    clock, taken = Clock(), list[float]()
    quotas = Quotas(clock)
    for pause in asked:
        clock.now += pause
        try:
            quotas.spend(caller(requests_per_minute=quota), 0)
            taken.append(clock.now)
        except QuotaExceeded as error:
            assert error.retry_after_seconds is not None and 0 < error.retry_after_seconds <= 60 / quota + 1e-6
    most = quota + max(1, quota * BURST_SECONDS / 60)
    for begin in taken:
        assert sum(begin <= at < begin + 60 for at in taken) <= most + 1e-6


def test_quota_is_available_after_the_reported_time() -> None:
    clock = Clock()
    quotas, alice = Quotas(clock), caller(requests_per_minute=60)
    for _ in range(10):
        quotas.spend(alice, 10)
    with pytest.raises(QuotaExceeded, match=r"identity alice has used up its 60 requests a minute; 1 more in 1.0 s"):
        quotas.spend(alice, 10)
    clock.now += 1.0
    quotas.spend(alice, 10)


def test_bytes_and_requests_are_spent_together_or_not_at_all() -> None:
    clock = Clock()
    quotas, alice = Quotas(clock), caller(requests_per_minute=12, bytes_per_minute=600)
    quotas.spend(alice, 60)
    for _ in range(5):
        with pytest.raises(QuotaExceeded, match="600 bytes a minute"):
            quotas.spend(alice, 60)
    quotas.spend(alice, 40)


def test_request_larger_than_the_balance_is_accepted_and_paid_later() -> None:
    clock = Clock()
    quotas, alice = Quotas(clock), caller(bytes_per_minute=600)
    quotas.spend(alice, 400)
    clock.now += 20.0
    with pytest.raises(QuotaExceeded):
        quotas.spend(alice, 50)
    clock.now += 20.0
    quotas.spend(alice, 50)


def test_quotas_are_per_identity_and_their_memory_is_bounded() -> None:
    quotas = Quotas(Clock())
    for number in range(KEPT + 100):
        quotas.spend(Caller("a", f"identity {number}", Policy(requests_per_minute=6)), 0)
    assert len(quotas._used) == KEPT
    quotas.spend(caller(), 1 << 40)
    assert len(quotas._used) == KEPT, "who has no quota is not remembered"


def test_quota_refusal_reaches_the_client_without_allocation() -> None:
    with Core([FakeEngine()], SMALL) as core:
        client = CoreClient(core, caller=caller(requests_per_minute=12))
        for id in range(3):
            client.ask(id, b"abc")
        assert all(client.answer(id).reply for id in range(2))
        failed = client.answer(2).failed
        assert failed is not None and failed.error == "QuotaExceeded" and not failed.retry
        assert "12 requests a minute" in failed.message and 0 < failed.retry_after_ms <= 5000
        other = CoreClient(core, client_id="bob", caller=Caller("b", "bob"))
        other.ask(1, b"abc")
        assert other.answer(1).reply


def test_resent_request_does_not_use_quota_twice() -> None:
    with Core([FakeEngine()], SMALL) as core:
        for _ in range(4):
            client = CoreClient(core, caller=caller(requests_per_minute=6))
            client.ask(1, b"abc")
            assert client.answer(1).reply
            client.leave()
