"""The engine of split generation over the real service: generate() as if nothing was cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cloud_server import CloudServer, Core, Limits, ModelEntry, ServedModel
from edge_client import EdgeClient, ModelChoice
from edge_client.generation import SessionLink
from shared_hooks.generation import SplitForward
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.models import load_spec
from tests.shared_hooks.generation.small import cut_of, make, prompt

pytest.importorskip("transformers")
MODEL = "llama"


def llama() -> torch.nn.Module:
    return make(MODEL)


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    lifecycle = Lifecycle("cloud")
    spec = load_spec(f"{MODEL}={__name__}:llama")
    engine = ServedModel(ModelEntry(spec), torch.device("cpu"), lifecycle)
    limits = Limits(max_sessions_per_account=6)
    with Core([engine], limits, 2, observers=["activation"], lifecycle=lifecycle) as core:
        yield core


@pytest.fixture(scope="module")
def server(core: Core) -> Iterator[CloudServer]:
    server = CloudServer(core, "127.0.0.1:0")
    server.start()
    yield server
    server.drain()
    server.stop()


@pytest.fixture
def client(server: CloudServer) -> Iterator[EdgeClient]:
    choice = ModelChoice(llama(), model_id=MODEL)
    with EdgeClient(f"127.0.0.1:{server.port}", choice, metrics=False) as client:
        yield client


@pytest.mark.parametrize("more", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sampled", "beams"])
def test_the_same_tokens(client: EdgeClient, core: Core, more: dict[str, object]) -> None:
    model, asked = client.wrapped.model, {**prompt(2), "max_new_tokens": 12, **more}
    torch.manual_seed(3)
    whole = model.generate(**asked)  # type: ignore[operator]
    before = core.decoding.steps
    with SplitForward(model, cut_of(MODEL), SessionLink(client, cut_of(MODEL))):
        torch.manual_seed(3)
        assert torch.equal(model.generate(**asked), whole)  # type: ignore[operator]
    assert core.decoding.steps - before >= 12
    assert (len(core.decoding), core.decoding.nbytes) == (0, 0), "sessions are closed at the end"


def test_sessions_that_gave_way_come_back_by_themselves(client: EdgeClient, core: Core) -> None:
    """Eight conversations in turns, where six have room."""
    model = client.wrapped.model
    prompts = [torch.randint(6, 100, (1, 5 + one)) for one in range(8)]
    wanted = [model.generate(input_ids=one, max_new_tokens=6) for one in prompts]  # type: ignore[operator]
    with SplitForward(model, cut_of(MODEL), SessionLink(client, cut_of(MODEL))):
        found = []
        for one in prompts:
            found.append(model.generate(input_ids=one, max_new_tokens=3, return_dict_in_generate=True))  # type: ignore[operator]
        dropped = core.decoding.dropped["room"]
        for number, one in enumerate(found):
            more = model.generate(  # type: ignore[operator]
                input_ids=one.sequences, past_key_values=one.past_key_values, max_new_tokens=3
            )
            assert torch.equal(more, wanted[number])
        assert dropped == 2 and len(core.decoding) <= 6
