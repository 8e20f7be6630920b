"""Memory of messages that arrive and leave in one piece: who is evicted."""

from __future__ import annotations

import pytest

from cloud_server.inference import HeldBytes
from shared_hooks.errors import ServerUnavailable, TooLarge
from shared_hooks.sharing import Owner


def test_largest_holder_is_evicted() -> None:
    held, gone = HeldBytes(100), []
    alice, bob = Owner("alice", "1"), Owner("bob", "1")
    with (
        held.hold(alice, lambda: gone.append("first")) as first,
        held.hold(alice, lambda: gone.append("second")) as two,
    ):
        first.more(50)
        two.more(40)
        with held.hold(bob, lambda: gone.append("bob")) as own:
            own.more(30)
            assert gone == ["first"] and held.nbytes == 70
            with pytest.raises(ServerUnavailable, match="max_inference_bytes is 100"):
                own.more(60)
            with pytest.raises(TooLarge):
                own.more(101)
            assert gone == ["first"]
        assert held.nbytes == 40
    assert held.nbytes == 0
