"""Settings of every test: one thread (kernels may choose by it), seeded, nothing left behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("ISTHMUS_SERVER", None)
os.environ["XDG_CONFIG_HOME"] = os.devnull  # nor is what this machine's user has set a test's business

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.seeds import seed
from tests.starts import forked
from tests.waiting import eventually

torch.set_num_threads(1)
# No clock decides: a busy machine runs examples slowly, and draws them slowly. Nor does luck: `make fuzz` looks on.
settings.register_profile(
    "repeatable", database=None, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or the processes of tests would not hear of it


def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`: one more than processors, since many tests wait for processes of their own."""
    return 1 + (os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the studies, which take longest, so that no processor waits for one at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/studies/"))


def pytest_collection_finish() -> None:
    """Freeze the objects of imported modules, which the garbage collector would visit again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def freeze_late_imports() -> Iterator[None]:
    """Freeze again after a module that imported large libraries."""
    yield
    if len(gc.get_objects(generation=2)) > 200_000:
        pytest_collection_finish()


@pytest.fixture(autouse=True)
def clean_torch() -> Iterator[None]:
    """The global generator starts the same, and global switches end where they were. Attention's fast path is a switch
    of the whole process: off while any thread runs a model, as a server of the tests may when its client has gone."""
    eventually(torch.backends.mha.get_fastpath_enabled, "attention's fast path is off before a test")
    seed(0)
    before = _switches()
    yield
    eventually(lambda: _switches() == before, "a test changed a global switch of torch")


class _OperatorsReadOnce:
    """Stands for onnxscript in `torch.onnx`, which parses the source of five hundred operators in each export."""

    def __init__(self, apis: Any) -> None:
        self._apis = apis
        self.get_torchlib_ops = functools.cache(lambda: apis.get_torchlib_ops())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._apis, name)


@pytest.fixture(autouse=True, scope="session")
def operators_of_onnx_are_read_once() -> Iterator[None]:
    """An export takes half the time."""
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(ImportError, AttributeError):  # another release of torch
            from torch.onnx._internal.exporter import _registration

            patch.setattr(_registration, "onnxscript_apis", _OperatorsReadOnce(_registration.onnxscript_apis))
        yield


def _switches() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
    )


@pytest.fixture(autouse=True, scope="session")
def processes_of_the_product_are_forked() -> Iterator[None]:
    """Those that commands, `verify` and trials start themselves: an interpreter for each would cost minutes in all."""
    trials, verify = "cloud_server.processes.trials.subprocess", "shared_hooks.middle.multiprocessing"
    with forked("edge_client.process.subprocess", trials, verify):
        yield
