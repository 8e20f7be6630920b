"""Places in an area: no two overlap, what is freed is given again, and what lies there is what was written."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.transport.outbox import NONCE_BYTES, SendArea

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
NBYTES = 64 << 10

steps = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(1, NBYTES))), max_size=30)


@given(steps=steps)
def test_places_do_not_overlap(steps: list[tuple[int, int | None]]) -> None:
    area = SendArea.made(NBYTES)
    assert area is not None
    held: dict[int, tuple[int, int]] = {}
    for request_id, nbytes in steps:
        area.free(request_id)
        held.pop(request_id, None)
        if nbytes is not None and (start := area.take(request_id, nbytes)) is not None:
            assert start >= NONCE_BYTES
            assert start + nbytes <= NBYTES
            assert all(start >= end or start + nbytes <= begin for begin, end in held.values())
            held[request_id] = start, start + nbytes
    for request_id in held:
        area.free(request_id)
    assert area.take(99, NBYTES // 2) is not None
    area.close()


def test_area_is_readable_by_its_description() -> None:
    area = SendArea.made(NBYTES)
    assert area is not None
    reported = area.description()
    start = area.take(1, 7)
    assert start is not None
    area.write(start, [memoryview(b"abc"), memoryview(b""), memoryview(b"defg")])
    with open(f"/proc/{reported.pid}/fd/{reported.fd}", "rb") as file:
        assert os.pread(file.fileno(), NONCE_BYTES, 0) == reported.nonce
        assert os.pread(file.fileno(), 7, start) == b"abcdefg"
    area.close()


def test_no_area_where_none_is_wanted() -> None:
    assert SendArea.made(0) is None
