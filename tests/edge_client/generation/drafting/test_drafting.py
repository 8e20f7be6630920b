"""generate() with drafts gives, split, what transformers' own assisted decoding gives with the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from edge_client import EdgeClient, local_server
from edge_client.generation import SplitGenerator
from edge_client.generation import drafting as drafts
from edge_client.generation.drafting import Assistant, Constant, Drafting, DraftSource, FirstLayers, Lookup
from shared_hooks.errors import CutRefused, InputMismatch, UnknownLayer
from shared_hooks.generation import SplitForward, state_in, state_name
from shared_hooks.lifecycle import Event
from studies.experiments.relay import Relay
from tests.covering import crossed
from tests.edge_client.generation.speaking import CUT, SPEC, inputs, whole
from tests.shared_hooks.generation.small import cut_of, in_process, make, prompt

TOKENS = 20
SOURCES = ["lookup", "assistant", "first layers"]


def source_of(kind: str, name: str) -> DraftSource:
    if kind == "lookup":
        return Lookup(2)
    return Assistant(make(name)) if kind == "assistant" else FirstLayers(cut_of(name))


def generate(model: Any, **settings: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(**prompt(), **{"max_new_tokens": TOKENS, "do_sample": False, **settings})


@pytest.mark.parametrize(("name", "kind"), crossed(["llama", "gpt2", "sliding", "hybrid", "experts", "t5"], [*SOURCES]))
def test_greedy_search_is_as_without_drafts_and_sampling_as_locally(name: str, kind: str) -> None:
    model = make(name)
    plain, source = generate(model), source_of(kind, name)
    with Drafting(model, source, pace=Constant(3)):
        drafted, sampled = generate(model), generate(model, do_sample=True)
    assert torch.equal(plain, drafted)
    with (
        SplitForward(model, cut_of(name), in_process(name), answer=("least",)) as how,
        Drafting(model, source, pace=Constant(3)) as drafting,
    ):
        assert torch.equal(generate(model), drafted)
        assert torch.equal(generate(model, do_sample=True), sampled)
    assert len(how.records) == drafting.tally.steps == 2 * TOKENS - drafting.tally.accepted
    assert drafting.tally.drafted > TOKENS // 2


@pytest.mark.parametrize("sampled", [False, True])
def test_a_constant_number_is_transformers_own_schedule(sampled: bool) -> None:
    model, small = make("llama"), make("gpt2")
    small.generation_config.num_assistant_tokens = 3  # type: ignore[union-attr]
    small.generation_config.num_assistant_tokens_schedule = "constant"  # type: ignore[union-attr]
    small.generation_config.assistant_confidence_threshold = 0.0  # type: ignore[union-attr]
    theirs = generate(model, assistant_model=small, do_sample=sampled)
    with Drafting(model, Assistant(small), pace=Constant(3)):
        assert torch.equal(generate(model, do_sample=sampled), theirs)
    theirs = generate(model, prompt_lookup_num_tokens=5, max_matching_ngram_size=2, do_sample=sampled)
    with Drafting(model, Lookup(2), pace=Constant(5)):
        assert torch.equal(generate(model, do_sample=sampled), theirs)


def test_the_number_may_change_from_step_to_step_and_be_none() -> None:
    class Turns:
        def __init__(self) -> None:
            self.reported: list[tuple[int, int, int]] = []

        def choose(self) -> int:
            return (0, 3, 1, 0, 6)[len(self.reported) % 5]

        def step(self, asked: int, drafted: int, accepted: int, seconds: float | None) -> None:
            assert accepted <= drafted <= asked
            assert (seconds is None) is (not self.reported)
            self.reported.append((asked, drafted, accepted))

    for name in ("llama", "hybrid", "t5"):
        for kind in SOURCES:
            model, pace = make(name), Turns()
            plain = generate(model)
            with (
                SplitForward(model, cut_of(name), in_process(name)),
                Drafting(model, source_of(kind, name), pace=pace) as drafting,
            ):
                assert torch.equal(generate(model), plain)
            assert drafting.tally.drafted == sum(drafted for _, drafted, _ in pace.reported)


def test_the_measured_pace_leaves_greedy_search_as_it_is() -> None:
    model = make("gpt2")
    plain = generate(model, max_new_tokens=80)
    with (
        SplitForward(model, cut_of("gpt2"), in_process("gpt2"), answer=("token",)),
        Drafting(model, Lookup()) as drafting,
    ):
        assert torch.equal(generate(model, max_new_tokens=80), plain)
    assert drafting.tally.acceptance is not None
    assert drafting.tally.steps == 80 - drafting.tally.accepted


def test_the_first_layers_draft_as_a_model_of_these_layers() -> None:
    model, short = make("llama"), make("llama")
    short.model.layers = short.model.layers[:2]  # type: ignore[union-attr, index]
    short.config.num_hidden_layers = 2  # type: ignore[union-attr]
    with Drafting(model, FirstLayers("model.layers.1"), pace=Constant(4)) as ours:
        found = generate(model, do_sample=True)
    short.generation_config.assistant_confidence_threshold = 0.0  # type: ignore[union-attr]
    with Drafting(model, Assistant(short), pace=Constant(4)) as other:
        assert torch.equal(generate(model, do_sample=True), found)
    assert ours.tally == other.tally


def test_drafting_through_the_service(client: EdgeClient) -> None:
    asked = {**inputs(client), "max_new_tokens": 40, "do_sample": False}
    plain = whole(client, **asked)
    for source in (Lookup(), FirstLayers(CUT)):
        with (
            SplitGenerator(client, CUT, answer=("least",)) as generator,
            Drafting(generator.model, source, pace=Constant(4)) as drafting,
        ):
            assert torch.equal(generator.generate(**asked), plain)
        assert len(generator.records) == 40 - drafting.tally.accepted


def test_a_state_that_has_read_a_beginning() -> None:
    model = make("llama")
    first = generate(model, return_dict_in_generate=True)
    text = torch.cat([first.sequences, torch.arange(3, 43)[None]], dim=1)
    read = first.past_key_values.get_seq_length()

    def continued(ids: torch.Tensor, **more: Any) -> torch.Tensor:
        state = copy.deepcopy(first.past_key_values)
        given: Any = model.generate(  # type: ignore[operator]
            input_ids=ids, past_key_values=state, max_new_tokens=TOKENS, do_sample=False, **more
        )
        return given[:, -TOKENS:]

    plain = continued(text)
    for source in (Lookup(2), Assistant(make("gpt2")), FirstLayers("model.layers.1")):
        with Drafting(model, source, pace=Constant(3)):
            assert torch.equal(continued(text), plain)
            assert torch.equal(continued(text[:, read:], attention_mask=torch.ones_like(text)), plain)
            with pytest.raises(InputMismatch, match=f"has read {read} tokens, and the text has {read}"):
                continued(text[:, :read])


def test_the_model_is_afterwards_as_it_was() -> None:
    model = make("llama")
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    settings = model.generation_config.to_dict()  # type: ignore[union-attr, operator]
    with Drafting(model, FirstLayers("model.layers.1")):
        # a split that begins and ends inside
        with SplitForward(model, cut_of("llama"), in_process("llama"), answer=("least",)):
            generate(model)
        with Drafting(model, Lookup()) as inner:
            generate(model)
        assert inner.tally.steps
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before
    assert model.generation_config.to_dict() == settings  # type: ignore[union-attr, operator]


def test_drafting_begins_and_ends_while_a_model_is_split() -> None:
    model = make("llama")
    plain = generate(model)
    with SplitForward(model, cut_of("llama"), in_process("llama")):
        for source in (Lookup(), FirstLayers("model.layers.1"), Lookup()):
            with Drafting(model, source):
                assert torch.equal(generate(model), plain)
            assert torch.equal(generate(model), plain)


def test_unsupported_drafting_is_refused_by_name() -> None:
    model = make("llama")
    with Drafting(model, Lookup()), pytest.raises(InputMismatch, match="has 2"):
        model.generate(**prompt(rows=2), max_new_tokens=4)  # type: ignore[operator]
    with pytest.raises(InputMismatch, match="Linear"):
        Drafting(nn.Linear(2, 2), Lookup())
    with (
        SplitForward(model, cut_of("llama"), in_process("llama"), answer=("sample",)),
        Drafting(model, Lookup()),
        pytest.raises(CutRefused, match="drafts"),
    ):
        generate(model, do_sample=True)
    with (  # the other way about: the split sees nothing of the drafts in the arguments
        Drafting(model, Lookup()),
        SplitForward(model, cut_of("llama"), in_process("llama"), answer=("sample",)),
        pytest.raises(CutRefused, match="drafts"),
    ):
        generate(model, do_sample=True)


@pytest.mark.parametrize(
    ("last", "error", "why"),
    [
        ("model.layers.9", UnknownLayer, "no module"),
        ("model.layers.3", CutRefused, "the last block"),
        ("model.layers.1.mlp", CutRefused, "not one of a list"),
        ("model.norm", CutRefused, "not one of a list"),
    ],
)
def test_layers_that_cannot_draft(last: str, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why), Drafting(make("llama"), FirstLayers(last)):
        pass


def test_drafts_need_the_output_head_here_and_nothing_of_the_other_half() -> None:
    model = make("llama")
    whole_model = make("llama")
    plain = generate(whole_model)
    for layer in (2, 3):
        model.model.layers[layer].to("meta")  # type: ignore[union-attr, index, operator]
    with SplitForward(model, cut_of("llama"), in_process("llama")), Drafting(model, FirstLayers("model.layers.1")):
        assert torch.equal(generate(model), plain)
    model.lm_head.to("meta")  # type: ignore[union-attr, operator]
    with pytest.raises(CutRefused, match=r"lm_head\.weight"), Drafting(model, FirstLayers("model.layers.1")):
        pass


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are sent ahead whether that pays or not."""
    monkeypatch.setattr(drafts, "LEARN", 0.0)
    monkeypatch.setattr(drafts, "LEAST_CHANCE", 0.0)
    monkeypatch.setattr(drafts, "FIRST_CHANCE", 1.0)
    monkeypatch.setattr(drafts, "TRIED", 1000)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("name", "kind"), crossed(["llama", "gpt2", "sliding", "hybrid", "experts", "t5", "bloom"], [*SOURCES])
)
def test_drafts_that_are_sent_ahead_leave_greedy_search_as_it_is(name: str, kind: str) -> None:
    model = make(name)
    plain = generate(model, max_new_tokens=20)
    source = source_of(kind, name)
    if isinstance(source, Assistant):
        source.model.generation_config.assistant_confidence_threshold = 0.0  # type: ignore[union-attr]
    drafting = Drafting(model, source, pace=Constant(3))
    with SplitForward(model, cut_of(name), in_process(name), answer=("least",)), drafting:
        assert torch.equal(generate(model, max_new_tokens=20), plain)
        assert drafting.tally.ahead
        assert torch.equal(generate(model, max_new_tokens=20), plain)  # with another state, and the last steps left


@pytest.mark.usefixtures("always")
def test_drafts_are_sent_while_earlier_ones_are_verified(client: EdgeClient) -> None:
    asked = {**inputs(client), "max_new_tokens": 40, "do_sample": False}
    plain = whole(client, **asked)
    with local_server(SPEC) as server, Relay(("127.0.0.1", int(server.rpartition(":")[2])), delay=0.01) as relay:
        host, port = relay.address
        with EdgeClient(f"{host}:{port}", SPEC) as far, SplitGenerator(far, CUT, answer=("least",)) as generator:
            small: Any = copy.deepcopy(client.wrapped.model)
            small.generation_config.assistant_confidence_threshold = 0.0
            for source in (Lookup(), FirstLayers(CUT), Assistant(small)):
                with Drafting(generator.model, source, pace=Constant(3)) as drafting:
                    output = generator.generate(**asked, return_dict_in_generate=True)
                    assert torch.equal(output.sequences, plain)
                    # the state is as far as the text, whatever was sent beyond it
                    state = copy.deepcopy(output.past_key_values)
                    more = {"input_ids": output.sequences, "attention_mask": torch.ones_like(output.sequences)}
                    longer = generator.generate(**more, past_key_values=state, max_new_tokens=9, do_sample=False)
                assert torch.equal(longer, whole(client, **{**asked, "max_new_tokens": 49}))
            assert drafting.tally.ahead - drafting.tally.ahead_in_vain > 5  # of a model that is always right


@pytest.mark.usefixtures("always")
def test_the_same_seed_gives_the_same_words_whatever_the_times() -> None:
    model = make("llama")
    with SplitForward(model, cut_of("llama"), in_process("llama")):
        with Drafting(model, Lookup(2), pace=Constant(3)) as drafting:
            first = generate(model, do_sample=True)
        with Drafting(model, Lookup(2), pace=Constant(3), ahead=False):
            assert torch.equal(generate(model, do_sample=True), first)
    assert not drafting.tally.ahead


class Requests:
    """A hook that counts those that began and those that are over."""

    def __init__(self) -> None:
        self.began: list[object] = []
        self.over: list[object] = []

    def before_request(self, event: Event) -> None:
        self.began.append(event.request.id)

    def after_request(self, event: Event) -> None:
        self.over.append(event.request.id)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_an_interruption_leaves_no_request_open(client: EdgeClient, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Whatever was under way then: the step of the call, one that was sent ahead, one whose call has come."""
    asked = {**inputs(client), "max_new_tokens": 30, "do_sample": False}
    plain, requests, calls = whole(client, **asked), Requests(), 0
    sent_ahead = SplitForward._sent_ahead

    def interrupted(*given: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return sent_ahead(*given)

    monkeypatch.setattr(SplitForward, "_sent_ahead", interrupted)
    client.lifecycle.register(requests)
    try:
        with (
            SplitGenerator(client, CUT, answer=("least",)) as generator,
            Drafting(generator.model, FirstLayers(CUT), pace=Constant(3)),
        ):
            with pytest.raises(KeyboardInterrupt):
                for _ in range(20):  # how many steps are sent ahead depends on how fast answers come
                    generator.generate(**asked)
            assert requests.began and sorted(requests.began, key=str) == sorted(requests.over, key=str)
            assert torch.equal(generator.generate(**asked), plain)
    finally:
        client.lifecycle.remove(requests)


@pytest.mark.parametrize("name", ["past_key_values", "cache_params", "cache"])
def test_a_state_is_known_by_its_class_whatever_transformers_calls_it(name: str) -> None:
    """Until it was, drafts read a prompt again into a state that had it, and wrote other tokens, in silence."""
    from transformers import DynamicCache

    state: Any = DynamicCache()
    state.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 0)
    ids = torch.zeros(1, 5, dtype=torch.long)
    assert drafts._read(ids, None, {name: state, "attention_mask": torch.ones(1, 5)}) == 3
    assert state_in({"input_ids": ids, name: state}) is state and state_in({"input_ids": ids}) is None


def test_the_name_of_a_state_is_that_of_this_release(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.utils import GenerateDecoderOnlyOutput as Results

    assert state_name() in Results.__dataclass_fields__
    monkeypatch.setattr(Results, "__dataclass_fields__", {"sequences": None, "cache": None})
    assert state_name() == "cache"
    monkeypatch.setattr(Results, "__dataclass_fields__", {"sequences": None, "past_key_values": None})
    assert state_name() == "past_key_values"


@pytest.mark.parametrize("release", ["4.57.6", "5.4.0", "5.16.1", "5.17.0.dev0"])
def test_a_release_whose_drafts_read_a_state_again_is_refused(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There drafts wrote other tokens in a chat's second turn, in silence."""
    model = make("llama")
    Drafting(model, Lookup(2))
    monkeypatch.setattr("transformers.__version__", release)
    with pytest.raises(InputMismatch, match=f"transformers 5.18 or later: {release} is installed"):
        Drafting(model, Lookup(2))
