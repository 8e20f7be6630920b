"""On whom a call counts."""

from __future__ import annotations

import pytest

from cloud_server.access import Caller


@pytest.mark.parametrize(
    ("peer", "account"),
    [
        ("ipv4:192.0.2.7:50000", "address ipv4:192.0.2.7"),
        ("ipv6:%5B2001:db8:0:1::7%5D:50000", "address ipv6:2001:db8:0:1::/64"),
        ("ipv6:%5B2001:db8:0:1:ffff::8%5D:50001", "address ipv6:2001:db8:0:1::/64"),
        ("ipv6:[2001:db8:0:2::7]:50000", "address ipv6:2001:db8:0:2::/64"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:50000", "address ipv4:192.0.2.7"),
        ("ipv6:%5B::1%5D:50000", "address ipv6:[::1]"),
        ("ipv6:%5Bfe80::1%25eth0%5D:50000", "address ipv6:[fe80::1%eth0]"),
        ("unix:", "address unix"),
        ("ipv6:nonsense:1", "address ipv6:nonsense"),
    ],
)
def test_a_stranger_is_its_address_and_of_ipv6_its_network(peer: str, account: str) -> None:
    assert Caller(peer).account == account
