"""The families of attacks that were written by hand, all of them."""

from __future__ import annotations

from collections.abc import Iterator

from studies.attacks.corpus import DIGITS, KEEPER, READER, Recording, record
from studies.attacks.families import Attack, kept, literals, memory, places, wire
from studies.attacks.volleys import Volley

FAMILIES = (memory, places, literals, wire, kept)


def by_hand() -> Iterator[Volley]:
    """All families on recordings of all models."""
    recordings: list[Recording] = [*record(KEEPER, 1, 2), *record(READER, 3, 3), *record(DIGITS, 1, 24)]
    attacks: Iterator[Attack] = (attack for family in FAMILIES for attack in family.attacks(recordings))
    return (Volley.of(attack, number + 1) for number, attack in enumerate(attacks))
