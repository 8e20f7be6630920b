"""Room for requests between head and answer."""

from __future__ import annotations

import threading
import time

from edge_client import ConnectionOptions
from edge_client.request.sending import Reservation, Reservations
from tests.edge_client import small_models
from tests.edge_client.test_client import image, pair

MAX_CONCURRENT = 100


def now(reservations: Reservations, cut: str = "cut", most: int = MAX_CONCURRENT) -> Reservation | None:
    return reservations.take(cut, most, 0.0)


def taken(reservations: Reservations, nbytes: int, cut: str = "cut") -> Reservation:
    reservation = now(reservations, cut)
    assert reservation is not None
    reservation.weigh(nbytes)
    return reservation


def test_bytes_in_flight_are_bounded() -> None:
    reservations = Reservations(100)
    first, second = taken(reservations, 40), taken(reservations, 40)
    assert now(reservations) is None, "a third of that cut would not fit"
    first.release()
    first.release()
    third = taken(reservations, 60)
    assert now(reservations) is None
    second.release()
    third.release()
    assert now(reservations) is not None


def test_oversized_request_goes_alone() -> None:
    reservations = Reservations(100)
    large = taken(reservations, 500)
    assert now(reservations) is None
    large.release()
    assert taken(reservations, 500)


def test_a_cut_is_expected_to_send_what_it_sent_and_a_new_one_as_much_as_any() -> None:
    reservations = Reservations(100)
    taken(reservations, 70, "large").release()
    taken(reservations, 10, "small").release()
    held = taken(reservations, 50, "third")
    assert now(reservations, "new") is None and now(reservations, "large") is None
    small = now(reservations, "small")
    assert small is not None
    small.release()
    held.release()


def test_numbers_are_bounded_for_each_caller() -> None:
    reservations = Reservations(1000)
    taken(reservations, 1)
    taken(reservations, 1)
    assert now(reservations, most=2) is None
    assert now(reservations, most=3) is not None


def test_freed_reservation_goes_to_the_waiter() -> None:
    reservations = Reservations(100)
    first = taken(reservations, 80)
    found: list[Reservation | None] = []
    waiting = threading.Thread(
        target=lambda: found.append(reservations.take("cut", MAX_CONCURRENT, time.monotonic() + 30))
    )
    waiting.start()
    first.release()
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
