"""The engine of split generation over the real service: generate() as if nothing was cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cloud_server import CloudServer, Core, Limits, ModelEntry, ServedModel
from edge_client import EdgeClient, ModelChoice
from edge_client.generation import SessionLink
from shared_hooks.generation import SplitForward
from shared_hooks.lifecycle import Event, Lifecycle
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


def test_observers_that_are_asked_for_see_what_runs_at_the_server(server: CloudServer) -> None:
    """Every layer behind the cut, in every step, and none before it."""
    seen: list[dict[str, object]] = []

    class Hook:
        def on_result(self, event: Event) -> None:
            seen.append(event.answer.observations["cloud"]["activation"])

    lifecycle = Lifecycle("edge")
    lifecycle.register(Hook())
    choice = ModelChoice(llama(), model_id=MODEL)
    address = f"127.0.0.1:{server.port}"
    with EdgeClient(address, choice, metrics=False, observers=["activation"], lifecycle=lifecycle) as client:
        model = client.wrapped.model
        with SplitForward(model, cut_of(MODEL), SessionLink(client, cut_of(MODEL))):
            model.generate(**prompt(), max_new_tokens=3)  # type: ignore[operator]
    steps = [[record["name"] for record in one["records"]] for one in seen if one["records"]]  # type: ignore[index,attr-defined]
    assert len(steps) == 3 and all(step == steps[0] for step in steps)
    assert "model.layers.2.mlp.down_proj" in steps[0] and "lm_head" in steps[0]
    assert not any(name.startswith(("model.layers.0.", "model.layers.1.", "model.embed")) for name in steps[0])
