"""Copies to and from a CUDA device, and how much they pin. Without a GPU: the bound, and that nothing changes."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from shared_hooks.tensors import staging
from shared_hooks.tensors.staging import LEAST_PINNED, PinnedMemory

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Counted(PinnedMemory):
    """Ordinary memory in place of pinned memory; fails on command."""

    fails = False

    def _made(self, nbytes: int) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)


def test_no_more_is_pinned_than_the_bound_and_it_comes_back_with_the_last_view() -> None:
    pinned = Counted(3 * LEAST_PINNED)
    first = pinned.room(2 * LEAST_PINNED)
    assert first is not None and first.nbytes == 2 * LEAST_PINNED
    assert pinned.room(2 * LEAST_PINNED) is None
    view = first.view(torch.float32).as_strided((4,), (1,))
    shown = memoryview(first.numpy())  # type: ignore[arg-type]
    del first
    gc.collect()
    assert pinned.nbytes == 2 * LEAST_PINNED, "its memory is still in use"
    del shown
    gc.collect()
    assert pinned.room(2 * LEAST_PINNED) is None
    assert view.shape == (4,)
    del view
    gc.collect()
    assert pinned.nbytes == 0
    assert pinned.room(3 * LEAST_PINNED) is not None


def test_little_is_not_pinned_and_a_system_without_more_costs_nothing() -> None:
    pinned = Counted(10 * LEAST_PINNED)
    assert pinned.room(LEAST_PINNED - 1) is None
    pinned.fails = True
    assert pinned.room(LEAST_PINNED) is None
    assert pinned.nbytes == 0


def test_threads_do_not_pass_the_bound_together() -> None:
    pinned = Counted(5 * LEAST_PINNED)
    found: list[torch.Tensor | None] = []
    threads = [threading.Thread(target=lambda: found.append(pinned.room(LEAST_PINNED))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one is not None for one in found) == 5


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.randn(LEAST_PINNED)
    assert staging.to_host(tensor).data_ptr() == tensor.data_ptr() == staging.to_device(tensor, CPU).data_ptr()
    assert staging.room(LEAST_PINNED, CPU).nbytes == LEAST_PINNED and staging.PINNED.nbytes == 0
    staging.wait(CPU)


@needs_gpu
def test_there_and_back_bit_for_bit() -> None:
    device = torch.device("cuda")
    for shape in ((8, LEAST_PINNED), (3,), ()):
        for tensor in (torch.randn(shape), torch.randn(shape, dtype=torch.complex64)):
            memory = staging.room(tensor.nbytes, device)
            pinned = memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            moved = staging.to_device(pinned, device)
            assert torch.equal(staging.to_host(moved), tensor)
            assert torch.equal(staging.to_host(2 * moved), 2 * tensor)
            assert torch.equal(staging.to_host(moved.conj()), tensor.conj())
    matrix = torch.randn(512, 256, device=device)
    assert torch.equal(staging.to_host(matrix.T), matrix.T.cpu())


@needs_gpu
def test_a_copy_does_not_wait_for_another_stream() -> None:
    device, other, own = torch.device("cuda"), torch.cuda.Stream(), torch.cuda.Stream()
    small = torch.randn(LEAST_PINNED, device=device)
    large = torch.randn(4096, 4096, device=device)
    staging.to_host(small)  # what is made once is made
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(500):
            large = large @ large
        late = torch.cuda.Event()
        late.record()
    with torch.cuda.stream(own):  # the legacy stream waits for all others
        found = staging.to_host(small)
        staging.wait(device)
    assert not late.query(), "the other stream is still at work"
    assert torch.equal(found, small.cpu())
