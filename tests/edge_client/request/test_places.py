"""Room for requests between head and answer."""

from __future__ import annotations

import threading
import time

from edge_client import ConnectionOptions
from edge_client.request.sending import Place, Places
from tests.edge_client import small_models
from tests.edge_client.test_client import image, pair

AT_ONCE = 100


def now(places: Places, cut: str = "cut", most: int = AT_ONCE) -> Place | None:
    return places.take(cut, most, 0.0)


def taken(places: Places, nbytes: int, cut: str = "cut") -> Place:
    place = now(places, cut)
    assert place is not None
    place.weigh(nbytes)
    return place


def test_no_more_bytes_than_allowed_and_again_when_one_leaves() -> None:
    places = Places(100)
    first, second = taken(places, 40), taken(places, 40)
    assert now(places) is None, "a third of that cut would not fit"
    first.leave()
    first.leave()
    third = taken(places, 60)
    assert now(places) is None
    second.leave()
    third.leave()
    assert now(places) is not None


def test_one_that_is_too_large_for_all_goes_alone() -> None:
    places = Places(100)
    large = taken(places, 500)
    assert now(places) is None
    large.leave()
    assert taken(places, 500)


def test_a_cut_is_expected_to_send_what_it_sent_and_a_new_one_as_much_as_any() -> None:
    places = Places(100)
    taken(places, 70, "large").leave()
    taken(places, 10, "small").leave()
    held = taken(places, 50, "third")
    assert now(places, "new") is None and now(places, "large") is None
    small = now(places, "small")
    assert small is not None
    small.leave()
    held.leave()


def test_numbers_are_bounded_for_each_who_asks() -> None:
    places = Places(1000)
    taken(places, 1)
    taken(places, 1)
    assert now(places, most=2) is None
    assert now(places, most=3) is not None


def test_who_waits_gets_the_place_that_is_left() -> None:
    places = Places(100)
    first = taken(places, 80)
    found: list[Place | None] = []
    waiting = threading.Thread(target=lambda: found.append(places.take("cut", AT_ONCE, time.monotonic() + 30)))
    waiting.start()
    first.leave()
    waiting.join(30)
    assert found and found[0] is not None


def test_a_run_of_many_keeps_to_the_bytes() -> None:
    with pair(
        small_models.Residual,
        "stem",
        connection=ConnectionOptions(max_in_flight_bytes=1),
        delay=lambda number: 0.01,
    ) as (client, server):
        assert len(list(client.infer_many(image(seed) for seed in range(6)))) == 6
        assert server.seen.most_in_flight == 1
