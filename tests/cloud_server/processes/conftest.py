"""Two workers for all tests of this folder: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.processes import Pool, PooledModel
from shared_hooks import WrappedModel
from shared_hooks.lifecycle import Lifecycle
from tests.cloud_server.fakes import CoreClient
from tests.cloud_server.processes import deadly
from tests.cloud_server.real import greet
from tests.waiting import eventually
from tests.zoo import CASES, Case

SAMPLE: list[Case] = [case for case in CASES if case.setting is nullcontext and not (case.loud or case.branches)][::13]
STARTS = 240.0
"""Seconds for a worker to start, on a machine that does much else."""


@pytest.fixture(scope="package")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    file = tmp_path_factory.mktemp("pool") / "server.toml"
    here = deadly.__name__
    lines = [
        'threads = 1\ndevice = "cpu"',
        f'[lifecycle]\nhooks = ["{here}:Keeper"]',
        f'[models.deadly]\nfactory = "{here}:Deadly"\nexample.args = [{{shape = [2, 8]}}]',
    ]
    for case in SAMPLE:
        lines.append(f'[models.{case.name}]\nfactory = "{here}:of_zoo"\nfactory_kwargs = {{name = "{case.name}"}}')
    file.write_text("\n".join(lines))
    with Pool([str(file), "--log-level=warning"], 2, Limits()) as pool:
        pool.start()
        yield pool


@pytest.fixture(scope="package")
def edge() -> Iterator[WrappedModel]:
    with WrappedModel(deadly.Deadly().eval()) as wrapped:
        wrapped.plan(torch.zeros(2, 8))
        yield wrapped


Connect = Callable[[WrappedModel, str], CoreClient]


@pytest.fixture
def connect(pool: Pool) -> Iterator[Connect]:
    """A client of a core of its own on the pool's workers."""
    with core_on(pool) as core:

        def connect(wrapped: WrappedModel, model_id: str) -> CoreClient:
            client = CoreClient(core, greet=False)
            client.send(greet(wrapped, model_id, client_id=f"client {len(core.engines)} {id(wrapped)}"))
            return client

        yield connect


@contextmanager
def core_on(pool: Pool) -> Iterator[Core]:
    eventually(lambda: pool.crew.warm == 2, "the workers that an earlier test ended are not replaced", STARTS)
    lifecycle = Lifecycle("cloud")
    models = [PooledModel(pool, one, lifecycle) for one in pool.crew.identities]
    with Core(models, workers=2, observers=["activation"], lifecycle=lifecycle) as core:
        yield core


@pytest.fixture
def client(connect: Connect, edge: WrappedModel) -> CoreClient:
    return connect(edge, "deadly")
