"""generate() of several clients at once, whose steps the server computes together: the same words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cloud_server import CloudServer, Core, Limits, ModelEntry, ServedModel
from edge_client import EdgeClient, ModelChoice
from edge_client.generation import SessionLink
from shared_hooks.generation import SplitForward, StepRecord
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.models import load_spec
from tests.shared_hooks.generation.small import cut_of, make

pytest.importorskip("transformers")
CLIENTS = 5
WORDS = 8


def double(name: str) -> torch.nn.Module:
    """Return the model in double precision, so that no rounding changes a word."""
    return make(name).double()


def llama() -> torch.nn.Module:
    return double("llama")


def hybrid() -> torch.nn.Module:
    return double("hybrid")


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def core(name: str) -> Iterator[Core]:
    lifecycle = Lifecycle("cloud")
    engine = ServedModel(ModelEntry(load_spec(f"{name}={__name__}:{name}")), torch.device("cpu"), lifecycle)
    with Core([engine], Limits(max_queue_delay_microseconds=100_000, max_batch_size=4), lifecycle=lifecycle) as core:
        yield core


@pytest.fixture(scope="module")
def address(core: Core) -> Iterator[str]:
    server = CloudServer(core, "127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{server.port}"
    server.drain()
    server.stop()


class Writer(threading.Thread):
    """A client that writes, beside the model as it is without a cut."""

    def __init__(self, address: str, name: str, number: int, *, exact: bool) -> None:
        super().__init__()
        self.exact = exact
        self.records: list[StepRecord] = []
        self.found: Any = None
        self._address, self._id = address, name
        self._cut = cut_of(name)
        self._model: Any = double(name)
        ids = torch.randint(6, 100, (1 + number % 2, 4 + 3 * number), generator=torch.Generator().manual_seed(number))
        self._asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": WORDS}
        self._asked |= {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        self.wanted = self._model.generate(**self._asked)

    def run(self) -> None:
        with EdgeClient(self._address, ModelChoice(self._model, model_id=self._id), metrics=False) as client:
            link = SessionLink(client, self._cut, exact=self.exact)
            with SplitForward(self._model, self._cut, link) as split:
                self.found = self._model.generate(**self._asked)
            self.records = list(split.records)


def test_batched_texts_equal_single_ones(address: str, name: str) -> None:
    writers = [Writer(address, name, number, exact=number == CLIENTS - 1) for number in range(CLIENTS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    for writer in writers:
        assert torch.equal(writer.found.sequences, writer.wanted.sequences)
        if writer.exact:
            assert {record.batch_size for record in writer.records} == {1}
            pairs = zip(writer.found.logits, writer.wanted.logits, strict=True)
            assert all(torch.equal(found, wanted) for found, wanted in pairs)
    assert max(record.batch_size for writer in writers for record in writer.records) > 1
