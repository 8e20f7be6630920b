"""How many decoding sessions there are, what they hold, and which give way. The caller locks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cloud_server.limits import Limits
from cloud_server.models import Engine, EngineSession
from shared_hooks.errors import ServerUnavailable
from shared_hooks.sharing import Holding, Party, Shares, giving_way

Key = tuple[str, str, int]
"""(account, client id, session id): what makes a session unique, and nobody else's."""


@dataclass(eq=False, slots=True)
class Session:
    """One decoding session. ``busy``: somebody steps or copies it. ``handle``: None until it is opened."""

    key: Key
    engine: Engine
    cut: str
    nbytes: int = 0
    steps: int = 0
    busy: bool = True
    dropped: bool = False
    handle: EngineSession | None = None
    is_new: bool = True
    """Its client has heard nothing of it."""
    used: float = field(default_factory=time.monotonic)

    @property
    def party(self) -> Party:
        return Party(*self.key[:2])

    @property
    def idle_seconds(self) -> float:
        """Since its last step; 0 while it has one."""
        return 0.0 if self.busy else time.monotonic() - self.used

    def __str__(self) -> str:
        return f"decoding session {self.key[2]}"


class Books:
    """Sessions and bytes, by account and client."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.number = Shares(limits.max_sessions)
        self.memory = Shares(limits.max_sessions_bytes)

    def add(self, session: Session) -> None:
        self.number.add(session.party, 1)
        self.memory.add(session.party, session.nbytes)

    def remove(self, session: Session) -> None:
        self.number.remove(session.party, 1)
        self.memory.remove(session.party, session.nbytes)

    def resize(self, session: Session, nbytes: int) -> None:
        """It holds so many bytes now."""
        self.memory.remove(session.party, session.nbytes)
        self.memory.add(session.party, nbytes)
        session.nbytes = nbytes

    def room(self, party: Party, number: int, nbytes: int, others: Iterable[Session]) -> dict[Session, str]:
        """Which of ``others`` have to go, each with the bound, so that ``party`` can have so much more.

        Raises ServerUnavailable, naming the bound, where nobody gives way.
        """
        gone: dict[Session, str] = {}
        for bound, shares, amount, of_memory in self._bounds(party, number, nbytes):
            if shares.has_room(amount):
                continue
            holdings = [self._holding(one, one.nbytes if of_memory else 1, party) for one in others]
            give = giving_way(shares, party, amount, holdings)
            if give is None:
                raise ServerUnavailable(
                    f"no room for decoding sessions: {shares.total} {'bytes' if of_memory else 'of them'} are held, "
                    f"{shares.account(party.account)} by this account; {bound} is {shares.limit}"
                )
            gone |= dict.fromkeys(give, f"{bound} is {shares.limit}")
        return gone

    def _bounds(self, party: Party, number: int, nbytes: int) -> Iterator[tuple[str, Shares, int, bool]]:
        """Name, who holds how much, what is asked for, and whether that is bytes."""
        limits, account = self._limits, party.account
        if number:
            own = self.number.of(account, limits.max_sessions_per_account)
            yield "max_sessions_per_account", own, number, False
            yield "max_sessions", self.number, number, False
        own = self.memory.of(account, limits.max_sessions_bytes_per_account)
        yield "max_sessions_bytes_per_account", own, nbytes, True
        yield "max_sessions_bytes", self.memory, nbytes, True

    def _holding(self, session: Session, amount: int, newcomer: Party) -> Holding[Session]:
        """The least useful is the one whose last step is longest ago. To who needs room its own are idle as soon as
        they have no step; those of the account's other clients, who would only build them again, when they rest.
        """
        is_idle = not session.busy and (session.party == newcomer or session.idle_seconds > self._limits.idle_seconds)
        return Holding(session, session.party, amount, None if session.busy else (session.used,), is_idle)
