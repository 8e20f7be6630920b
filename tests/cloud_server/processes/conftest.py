"""Two workers for all tests of this folder: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.processes import Pool, PooledModel
from shared_hooks import WrappedModel
from shared_hooks.lifecycle import Lifecycle
from tests.cloud_server.fakes import CoreClient
from tests.cloud_server.processes import deadly, zoo_models
from tests.cloud_server.real import greet
from tests.waiting import eventually
from tests.zoo import CASES, Case

SAMPLE: list[Case] = [
    case
    for case in CASES
    if case.setting is nullcontext and not (case.loud or case.branches or case.name.startswith("hf_"))
][::12]
STARTS = 240.0
"""Seconds for a worker to start, on a machine that does much else."""


@pytest.fixture(scope="package")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    file = tmp_path_factory.mktemp("pool") / "server.toml"
    here = deadly.__name__
    file.write_text(
        f"""
        threads = 1
        device = "cpu"
        [lifecycle]
        hooks = ["{here}:Keeper"]
        [models.deadly]
        factory = "{here}:Deadly"
        example.args = [{{shape = [2, 8]}}]
        """
    )
    with Pool([str(file), "--log-level=warning"], 2, Limits()) as pool:
        pool.start()
        yield pool


@pytest.fixture(scope="package")
def zoo_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One worker, with a sample of the zoo."""
    file = tmp_path_factory.mktemp("zoo") / "server.toml"
    entry = '[models.{name}]\nfactory = "{here}:of_zoo"\nfactory_kwargs = {{name = "{name}"}}\n'
    file.write_text("".join(entry.format(name=case.name, here=zoo_models.__name__) for case in SAMPLE))
    with Pool([str(file), "--threads=1", "--device=cpu", "--log-level=warning"], 1, Limits()) as pool:
        pool.start()
        yield pool


@pytest.fixture(scope="package")
def edge() -> Iterator[WrappedModel]:
    with WrappedModel(deadly.Deadly().eval()) as wrapped:
        wrapped.plan(torch.zeros(2, 8))
        yield wrapped


@contextmanager
def core_on(pool: Pool) -> Iterator[Core]:
    """A server of its own on the workers."""
    count = pool.crew._count
    eventually(lambda: pool.crew.warm == count, "the workers that an earlier test ended are not replaced", STARTS)
    lifecycle = Lifecycle("cloud")
    models = [PooledModel(pool, one, lifecycle) for one in pool.crew.identities]
    with Core(models, workers=count, observers=["activation"], lifecycle=lifecycle) as core:
        yield core


@pytest.fixture
def core(pool: Pool) -> Iterator[Core]:
    with core_on(pool) as core:
        yield core


@pytest.fixture
def client(core: Core, edge: WrappedModel) -> CoreClient:
    client = CoreClient(core, greet=False)
    client.send(greet(edge, "deadly"))
    return client
