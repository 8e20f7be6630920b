"""One case on a fresh server: three honest clients without, beside, and after the hostile one."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from studies.siege.cases import Case
from studies.siege.limits import SMALL, most
from studies.siege.material import Material
from studies.siege.models import FACTORY, WIDE
from studies.siege.processes import Child, Server, shipped
from studies.siege.stranger import Stranger, StreamEnded

HONEST = 3
RATIO = 2.0
MEMORY = 1.2
LOG_BYTES = 256 << 10
"""Most bytes of log during an attack of some ten seconds."""
BEFORE, DURING, AFTER = "before", "during", "after"
WARM_UP = 1.0
"""Seconds in which honest clients ask and nothing is counted."""
NEWCOMER = 10.0
"""Seconds."""


@dataclass(frozen=True)
class Phase:
    """What three honest clients saw together; milliseconds."""

    asked: int = 0
    p50: float = 0.0
    p99: float = 0.0
    most: float = 0.0
    wrong: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, reported: Sequence[dict[str, Any]]) -> Phase:
        seconds = sorted(one for each in reported for one in each.get("seconds", ()))
        errors: Counter[str] = Counter()
        for each in reported:
            errors.update(each.get("errors", {}))
        if not seconds:
            return cls(errors=dict(errors))
        at = [seconds[min(len(seconds) - 1, int(share * len(seconds)))] for share in (0.5, 0.99, 1.0)]
        wrong = sum(each.get("wrong", 0) for each in reported)
        return cls(len(seconds), *(round(1000 * one, 1) for one in at), wrong, dict(errors))


@dataclass
class Outcome:
    """The outcome of one case. Memory in MiB: ``rest`` before the attack, ``peak`` from its beginning on, ``allowed``
    by the limits. ``faults``: what falls short of what is promised.
    """

    case: str
    does: str
    who: str
    phases: dict[str, Phase] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    reported: list[tuple[str, int]] = field(default_factory=list)
    rest: float = 0.0
    peak: float = 0.0
    last: float = 0.0
    allowed: float = 0.0
    log_bytes: int = 0
    forged: list[str] = field(default_factory=list)
    welcomes: list[float | None] = field(default_factory=list)
    """Seconds until newcomers were welcomed during the attack; None where they were not within `NEWCOMER`."""
    health_seconds: float | None = None
    status: int | None = None
    drain_seconds: float = 0.0
    seconds: float = 0.0
    killed: bool = False
    bound: str = ""

    def ratio(self, name: str, phase: str = DURING) -> float:
        """How many times as long as before."""
        return round(getattr(self.phases[phase], name) / max(getattr(self.phases[BEFORE], name), 0.1), 2)

    @property
    def faults(self) -> list[str]:
        found = []
        phases = [DURING] if self.killed else [DURING, AFTER]
        for phase in phases:
            seen = self.phases[phase]
            if seen.wrong:
                found.append(f"{seen.wrong} wrong answers {phase}")
            if seen.errors and not self.killed:  # else the server goes away while they ask
                text, count = max(seen.errors.items(), key=lambda item: item[1])
                found.append(f"{sum(seen.errors.values())} honest errors {phase}, as {count} x {text}")
            if not seen.asked:
                found.append(f"no honest request was begun {phase}")
            elif self.ratio("p99", phase) > RATIO:
                found.append(f"p99 {phase} {self.ratio('p99', phase)} times that before")
        if self.peak > MEMORY * self.allowed:
            found.append(f"{self.peak:.0f} MiB where the limits allow {self.allowed:.0f}")
        if self.log_bytes > LOG_BYTES:
            found.append(f"{self.log_bytes} bytes of log")
        if self.forged:
            found.append(f"{len(self.forged)} forged lines, as {self.forged[0][:80]!r}")
        if self.bound and not any(re.search(self.bound, text) for text, _ in self.reported):
            found.append("no bound was reported")
        if not self.killed and (self.health_seconds is None or self.health_seconds > 2):
            found.append(f"health after {self.health_seconds} s")
        if None in self.welcomes:
            found.append(f"a newcomer was not welcomed within {NEWCOMER:g} s during")
        if self.status != 0:
            found.append(f"exit status {self.status} after {self.drain_seconds:.1f} s")
        return found

    def json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ratios": {} if BEFORE not in self.phases else {name: self.ratio(name) for name in ("p50", "p99")},
            "faults": self.faults,
        }


@dataclass(frozen=True)
class Who:
    """Whom the hostile client is to the server. ``tables``: of the server's configuration; ``honest``: tokens."""

    name: str
    source: str = ""
    token: str = ""
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    honest: tuple[str, ...] = ("",) * HONEST


SAME = Who("same address")
OTHER = Who("other address", source="127.0.0.2")


def with_tokens(folder: Path, honest: int, weight: float = 1.0) -> Who:
    """From the same address, everybody with a token and an identity of their own. ``weight``: the hostile one's share
    where several wait, the others' is 1.
    """
    tokens = [secrets.token_urlsafe(32) for _ in range(honest + 1)]
    names = [f"honest-{number}" for number in range(honest)] + ["hostile"]
    entries = [
        f'[[tokens]]\nidentity = "{name}"\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        for name, token in zip(names, tokens, strict=True)
    ]
    file = folder / f"identities-{honest}.toml"
    file.write_text("\n".join([*entries, f"[identities.hostile]\nweight = {weight}\n"]))
    access = {"access": {"identities": str(file)}}
    return Who("own identity", token=tokens[-1], tables=access, honest=tuple(tokens[:-1]))


class Siege:
    """Honest processes that are used again, and the folder of the material. Use as a context manager."""

    def __init__(self, folder: Path, material: Path, workers: int = 1, honest: int = HONEST) -> None:
        self.folder = folder
        self.material = material
        self.workers = workers
        self.honest: list[Child] = []
        self._honest = honest

    def __enter__(self) -> Siege:
        self.honest = [Child("studies.siege.honest", str(number)) for number in range(self._honest)]
        for child in self.honest:
            child.heard()
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.honest:
            child.close()

    def all(self, reported: Any) -> list[Any]:
        """Says the same to every honest client, and hears them."""
        for child in self.honest:
            child.say(reported)
        return [child.heard() for child in self.honest]

    def begin(self, address: str, who: Who, clients: list[dict[str, Any]]) -> list[str]:
        """Honest clients connect and ask; their client ids."""
        for child, token in zip(self.honest, who.honest, strict=False):
            child.say({"begin": address, "token": token, "clients": clients})
        return [one for child in self.honest for one in child.heard()]

    def hostile(self, case: str, address: str, who: Who, seconds: float, *more: str) -> Child:
        """The hostile process, ready to go."""
        arguments = [case, address, str(self.material), str(seconds)]
        arguments += ["--token", who.token] if who.token else []
        arguments += ["--source", who.source] if who.source else []
        child = Child("studies.siege.hostile", *arguments, *more)
        child.line()
        return child

    def tables(self, who: Who, changed: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The server's configuration."""
        first = {"listen": "127.0.0.1:0", "threads": 1, "workers": self.workers}
        wide = {"factory": FACTORY, "example": "studies.siege.models:example"}
        tables = {"": first, "models": {WIDE: wide}, "models.digits": shipped(), "limits": {**SMALL, **changed}}
        for name, table in who.tables.items():
            tables[name] = {**tables.get(name, {}), **table}
        return tables

    def run(self, case: Case, who: Who = OTHER, seconds: float = 8.0) -> Outcome:
        """Without, with and after the attack, ``seconds`` each."""
        began = time.monotonic()
        server = Server(self.folder / case.name, self.tables(who, case.limits), who.options)
        outcome = Outcome(case.name, case.does, who.name, killed=case.killed, bound=case.reported)
        hostile: Child | None = None
        try:
            victims = self.begin(server.address, who, [{}])
            hostile = self.hostile(case.name, server.address, who, seconds, "--victims", *victims)
            time.sleep(WARM_UP)
            self.all({"phase": BEFORE})
            time.sleep(seconds)
            outcome.rest, logged = server.resident(), server.log_bytes
            outcome.allowed = outcome.rest + most({**SMALL, **case.limits}, self.workers)
            self.all({"phase": DURING})
            started = time.monotonic()
            hostile.say("go")
            for _ in range(2):
                time.sleep(seconds / 3)
                outcome.welcomes.append(self.welcome(server.address, who))
            if case.killed:
                self._kill(hostile, server, outcome)
            else:
                self._wait(hostile, outcome, seconds)
                self.all({"phase": AFTER})
                outcome.health_seconds = health(server.address)
                time.sleep(seconds)
            reports = [report for each in self.all({"end": True}) for report in each]
            names = (BEFORE, DURING, AFTER)
            outcome.phases = {name: Phase.of([report.get(name, {}) for report in reports]) for name in names}
            outcome.log_bytes = server.log_bytes - logged
            outcome.peak = round(server.peak(started), 1)
            if server.process.poll() is None:
                outcome.last = round(server.resident(), 1)
                outcome.status, outcome.drain_seconds = server.drain()
            elif not case.killed:
                outcome.status = server.process.returncode
            log = server.log.read_bytes().decode(errors="replace")
            outcome.forged = [line for line in re.split("[\n\r]", log) if case.forged and line.startswith(case.forged)]
        finally:
            if hostile is not None:
                hostile.kill()
            server.drain(5)
        outcome.seconds = round(time.monotonic() - began, 1)
        return outcome

    def welcome(self, address: str, who: Who) -> float | None:
        """Seconds until an honest newcomer is welcomed; it tries again, as clients do."""
        newcomer = Stranger(address, Material.read(self.material), NEWCOMER, who.honest[0])
        began = time.monotonic()
        try:
            while not newcomer.over:
                try:
                    stream = newcomer.stream()
                except (grpc.RpcError, StreamEnded):
                    continue
                stream.welcomed.wait(NEWCOMER)
                if stream.greeted:
                    return round(time.monotonic() - began, 2)
                newcomer.rest(0.2)
        finally:
            newcomer.close()
        return None

    def _wait(self, hostile: Child, outcome: Outcome, seconds: float) -> None:
        """For the hostile process's report, a little beyond its time."""
        heard: list[Any] = []
        thread = threading.Thread(target=lambda: heard.append(hostile.heard()), daemon=True)
        thread.start()
        thread.join(seconds + 15)
        hostile.kill()
        thread.join(5)
        if heard:
            outcome.sent, outcome.reported = heard[0]["sent"], [tuple(each) for each in heard[0]["reported"]]

    def _kill(self, hostile: Child, server: Server, outcome: Outcome) -> None:
        hostile.kill()
        self.all({"phase": AFTER})
        outcome.status, outcome.drain_seconds = server.drain(45)


def health(address: str) -> float | None:
    """Seconds until a new connection is welcomed by the server; None where it is not within ten."""
    began = time.monotonic()
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True
            )
        except grpc.RpcError:
            return None
    return round(time.monotonic() - began, 2) if reply.status == health_pb2.HealthCheckResponse.SERVING else None
