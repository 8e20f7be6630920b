"""Several threads, one wrapped model, mixed cuts."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks import WrappedModel
from tests.shared_hooks.cutting import case_of, through_bytes
from tests.zoo.case import Draw
from tests.zoo.compare import same

THREADS = 8


@pytest.mark.parametrize("name", ["residual", "one_module_several_times", "hf_bert", "base_and_view_cross_then_write"])
def test_mixed_cuts_in_eight_threads(name: str) -> None:
    case = case_of(name)
    wrapped = WrappedModel(case.build())
    args, kwargs = case.inputs()
    wrapped.plan(*args, **kwargs)
    cuts: list[Any] = ["input", *(layer.layer_id for layer in wrapped.layers)]
    plain = case.build()
    expected = [case.run(plain, case.make(Draw(seed))) for seed in range(THREADS)]
    start = threading.Barrier(THREADS)

    def work(seed: int) -> list[str]:
        start.wait(30)
        wrong = []
        for turn in range(6):
            args, kwargs = case.make(Draw(seed))
            if turn % 3 == 2:
                got = wrapped.forward(*args, **kwargs)
                where = "whole"
            else:
                cut = cuts[(seed * 5 + turn * 3) % len(cuts)]
                where = str(cut)
                got = wrapped.forward(through_bytes(wrapped.forward(*args, end=cut, **kwargs)), start=cut)
            if not same(got, expected[seed]):
                wrong.append(f"thread {seed}, {where}")
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        wrong = [text for found in pool.map(work, range(THREADS)) for text in found]
    assert not wrong


def test_a_model_is_looked_at_while_another_thread_hooks_it() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):  # without the copies of what modules hold, 19 of 20 failed
            wrapped, start = WrappedModel(nn.Sequential(*[nn.Conv2d(2, 2, 1) for _ in range(12)])), threading.Barrier(6)

            def work(number: int, wrapped: WrappedModel = wrapped, start: threading.Barrier = start) -> Any:
                start.wait(30)
                return wrapped.forward(torch.full((1, 2, 4, 4), float(number)))

            with ThreadPoolExecutor(6) as pool:
                assert len(list(pool.map(work, range(6)))) == 6
    finally:
        sys.setswitchinterval(interval)


def test_first_use_by_many_threads_at_once() -> None:
    """Planning itself is raced for."""
    case = case_of("unet_skips")
    wrapped = WrappedModel(case.build())
    shapes = [(1 + i % 3, 3, 16, 16) for i in range(THREADS)]
    plain = case.build()
    start = threading.Barrier(THREADS)

    def work(number: int) -> bool:
        x = Draw(number).randn(*shapes[number])
        with torch.no_grad():
            expected = plain(x)
        start.wait(30)
        return same(wrapped.forward(wrapped.forward(x, end=1 + number % 4), start=1 + number % 4), expected)

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(THREADS)))


def test_metrics_are_each_threads_own() -> None:
    case = case_of("residual")
    wrapped = WrappedModel(case.build())
    args, _ = case.inputs()
    wrapped.forward(*args)
    start = threading.Barrier(4)

    def work(cut: int) -> bool:
        start.wait(30)
        for _ in range(5):
            wrapped.forward(*args, end=cut)
            if [record.layer_id for record in wrapped.get_layer_metrics()] != list(range(cut + 1)):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, [1, 3, 5, 7]))


def test_unwrapped_use_beside_wrapped_use() -> None:
    """While one thread stops heads, another calls the model directly."""
    case = case_of("residual")
    model = case.build()
    wrapped = WrappedModel(model)
    args, _ = case.inputs()
    expected = wrapped.forward(*args)
    stop = threading.Event()

    def direct() -> bool:
        fine = True
        while not stop.is_set():
            with torch.no_grad():
                fine &= same(model(*args), expected)
        return fine

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(direct)
        try:
            for cut in range(10):
                assert same(wrapped.forward(wrapped.forward(*args, end=cut), start=cut), expected)
        finally:
            stop.set()
        assert running.result()


_COLLECTING = """
import faulthandler, gc, threading, time
from shared_hooks import devices

faulthandler.dump_traceback_later(60, exit=True)
gc.callbacks.append(lambda phase, info: time.sleep(0.0001))  # a finalizer that lets another thread run
gc.freeze()
gc.set_threshold(3)


def copies():
    kept = []
    for _ in range(3_000):
        kept.append(devices.rng_state())


def sets():
    state = devices.rng_state()
    for _ in range(30_000):
        devices.set_rng_state(state)


threads = [threading.Thread(target=one) for one in (copies, copies, sets)]
for one in threads:
    one.start()
for one in threads:
    one.join()
"""


def test_the_generators_state_is_copied_while_garbage_is_collected() -> None:
    """torch makes the copy's object under its mutex: another thread that waited for that would keep both waiting."""
    done = subprocess.run([sys.executable, "-c", _COLLECTING], capture_output=True, text=True, timeout=120, check=False)
    assert not done.returncode, done.stderr
