"""A short part of ``make attacks``, the same each time: in one process, between guard pages."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest
import torch

from cloud_server.scheduling.scheduler import Overtime, Watchdog
from shared_hooks.crossing import generators
from shared_hooks.errors import BadFrame
from shared_hooks.forward.foresight import interruptible
from shared_hooks.forward.session import Placeholder, PlaceholderRead
from shared_hooks.tail.recipe import guarded
from shared_hooks.tensors.trees import classes_of, unflatten
from studies.attacks.bulk import Target
from studies.attacks.byhand import FAMILIES
from studies.attacks.corpus import KEEPER, READER, Recording, record
from studies.attacks.families import Attack
from studies.attacks.models import Options
from studies.attacks.volleys import Gunner, Volley

NAMED = {
    "answer", "BadFrame", "TooLarge", "CutRefused", "Disagreement", "PlanMismatch", "PlaceholderRead", "ModelFailed",
    "HookRefused", "ObserverRefused", "ServerUnavailable", "welcome", "UnknownModel", "DeadlineExceeded",
    "InputMismatch", "Cancelled",
}  # fmt: skip


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return [*record(KEEPER, 1), *record(READER, 1, 4)]


@pytest.fixture
def target() -> Iterator[Target]:
    with guarded():
        made = Target((KEEPER, READER))
        yield made
        made.core.close()


def check(target: Target, recordings: list[Recording]) -> None:
    for number, recording in enumerate(recordings):
        assert target.honest(recording, (1 << 42) + number) == ""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda module: module.__name__.split(".")[-1])
def test_by_hand(family: object, target: Target, recordings: list[Recording]) -> None:
    attacks: list[Attack] = list(family.attacks(recordings[::2]))  # type: ignore[attr-defined]
    until = time.monotonic() + 2.5
    for number, attack in enumerate(attacks[:: 1 + len(attacks) // 120]):
        if attack.model_id not in target.identities:
            continue
        if "2^40" in attack.name or "10^38" in attack.name or time.monotonic() > until:
            continue
        for reported in target.fire(Volley.of(attack, number + 1))[0]:
            assert reported.removeprefix("stream ended: ") in NAMED, (attack.name, reported, target.said)
    check(target, recordings)


# an interruption (`Overtime`) that falls into a destructor is lost there, and comes again a second later
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_mutated(target: Target, recordings: list[Recording]) -> None:
    until = time.monotonic() + 2.5
    gunner = Gunner(recordings, 1)
    for number in range(100):
        volley = gunner.volley(number)
        if volley.model_id not in target.identities:
            continue  # files are read by a model that is not here
        for reported in target.fire(volley)[0]:
            assert reported.removeprefix("stream ended: ") in NAMED, (number, reported, target.said)
        if time.monotonic() > until:
            break
    check(target, recordings)


def test_a_state_that_reads_beyond_its_words_is_none() -> None:
    state = bytearray(torch.get_rng_state().numpy().tobytes())
    struct.pack_into("<i", state, 8, 624)
    struct.pack_into("<Q", state, 16, 624)
    with generators.kept(generators.ALL), pytest.raises(BadFrame, match="torch's random number generator"):
        generators.restore(("torch",), (torch.frombuffer(state, dtype=torch.uint8),))


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 625, 2000])
def test_every_real_state_is_one(drawn: int) -> None:
    with generators.kept(generators.ALL):
        torch.manual_seed(5)
        torch.randint(0, 1 << 31, (drawn,))
        state = generators.now(generators.ALL)
        wanted = torch.rand(3)
        generators.restore(generators.ALL, state)
        assert torch.equal(torch.rand(3), wanted)


def test_a_class_is_found_by_its_own_name_and_made_as_what_it_is() -> None:
    find = classes_of({Options.__module__})
    name = f"{Options.__module__}:Options"
    assert find(name) is Options and find(f"{Options.__module__}:dataclass") is None
    assert find("studies.attacks.models:torch.utils.data.Sampler") is None
    for structure in (
        ["named", name, []],
        ["map", name, []],
        ["enum", name, "scale"],
        ["data", name, [["__class__", ["v", 1]]]],
    ):
        with pytest.raises(BadFrame):
            unflatten(structure, [], find)


def test_a_placeholder_has_no_address() -> None:
    with pytest.raises(PlaceholderRead):
        Placeholder((2,), (1,), torch.float32, torch.device("cpu")).data_ptr()


def test_overlong_attack_is_ended() -> None:
    watch = Watchdog(0.1)
    try:
        with pytest.raises(Overtime), watch.limited(), interruptible():
            while True:
                try:
                    time.sleep(0.01)
                except Exception:
                    continue
        for _ in range(20):
            with watch.limited(), interruptible():
                time.sleep(0.001)
        time.sleep(0.3)
    finally:
        watch.close()
