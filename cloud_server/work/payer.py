"""On whose behalf a worker works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Payer:
    """Who pays for a job: an account, and within it one of its clients.

    ``weight``: the account's share of the workers beside others'; 2 gets twice what 1 gets.
    """

    account: str
    client: str = ""
    weight: float = 1.0
