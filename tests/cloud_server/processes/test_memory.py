"""The shared memory: blocks are nobody else's while somebody refers to them, and are used again afterwards."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Iterator

import pytest

from cloud_server.processes.channel import KEPT_BYTES, Mapping, Ranges, SharedMemory
from shared_hooks.errors import ServerUnavailable

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(16 * PAGE)
    yield memory
    memory.close()


@pytest.mark.parametrize("seed", range(5))
def test_ranges_never_overlap_and_grow_together_again(seed: int) -> None:
    draw, ranges, taken = random.Random(seed), Ranges(1000), {}
    for _ in range(2000):
        if taken and draw.random() < 0.5:
            start = draw.choice(list(taken))
            ranges.give(start, taken.pop(start))
        else:
            length = draw.randint(1, 90)
            start = ranges.take(length)
            used = sorted((*taken.items(), (1000, 0)))
            gaps = [after - (before + size) for (before, size), (after, _) in zip([(0, 0), *used], used, strict=False)]
            assert (start is not None) == (max(gaps) >= length)
            if start is not None:
                assert all(start + length <= other or other + size <= start for other, size in taken.items())
                taken[start] = length
    for start, length in taken.items():
        ranges.give(start, length)
    assert ranges.take(1000) == 0


def test_a_block_lives_as_long_as_a_view_of_it(memory: SharedMemory) -> None:
    block = memory.allocate(PAGE + 1)
    start = memory.mapping.offset(block)
    piece = block[100:200].cast("B")
    del block
    assert memory.used_bytes == 2 * PAGE
    other = memory.allocate(10)
    assert memory.mapping.offset(other) == start + 2 * PAGE
    del piece
    assert memory.used_bytes == PAGE
    assert memory.mapping.offset(memory.allocate(10)) == start, "the lowest free place is used first"


def test_shared_block_is_visible_to_both_processes(memory: SharedMemory) -> None:
    theirs = Mapping(memory.fd, memory.nbytes)
    block = memory.allocate(1000)
    block[:3] = b"abc"
    seen = theirs.array(memory.mapping.offset(block), 1000)
    assert bytes(seen[:3]) == b"abc"
    seen[0] = ord("x")
    assert bytes(block[:3]) == b"xbc"
    assert theirs.offset(memoryview(seen[5:])) == memory.mapping.offset(block) + 5
    for start, nbytes in ((-1, 10), (0, memory.nbytes + 1), (memory.nbytes, 1)):
        with pytest.raises(ValueError, match="bytes at"):
            theirs.array(start, nbytes)


def test_no_room_is_reported(memory: SharedMemory) -> None:
    blocks = [memory.allocate(1) for _ in range(16)]
    with pytest.raises(ServerUnavailable, match=f"{16 * PAGE} of {16 * PAGE} bytes of shared memory"):
        memory.allocate(1)
    del blocks[7]
    memory.allocate(1)


def test_blocks_in_cycles_come_back_in_the_middle_of_an_allocation(memory: SharedMemory) -> None:
    """The collector runs wherever it likes, also while the lock is held."""
    for _ in range(4):
        with memory._lock:
            circle: list[object] = [memory.mapping]
            circle.append(circle)
        block = memory.allocate(1)
        circle.append(block)
        del block, circle
        with memory._lock:
            gc.collect()
        memory.allocate(1)
    assert memory.used_bytes == 0


def test_many_threads(memory: SharedMemory) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            block = memory.allocate(64)
            block[:] = bytes([number]) * 64
            if bytes(block) != bytes([number]) * 64:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and memory.used_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages stay")
def test_freed_memory_returns_to_the_system() -> None:
    memory = SharedMemory(KEPT_BYTES + 64 * PAGE)
    try:
        block = memory.allocate(KEPT_BYTES + 64 * PAGE)
        block[0], block[KEPT_BYTES + PAGE] = 1, 2
        del block
        assert os.fstat(memory.fd).st_blocks * 512 <= 2 * PAGE  # of a sparse file that is what was touched
        block = memory.allocate(KEPT_BYTES + 64 * PAGE)
        assert block[KEPT_BYTES + PAGE] == 0
    finally:
        memory.close()
