"""Applications that speak OpenAI's protocol get the model's own text: streamed, by a schema, with calls of tools."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from edge_client import EdgeClient
from edge_client.generation import Words
from edge_client.serving.app import Endpoint
from edge_client.serving.chats import Chats
from edge_client.serving.sampling import Chosen
from shared_hooks.errors import SpecError
from tests.edge_client.generation.speaking import CUT, SPEC, connected
from tests.starts import Started, run
from tests.waiting import eventually

NAME = "language-model"
SCHEMA = {
    "type": "object",
    "properties": {"up": {"type": "boolean"}, "count": {"enum": [1, 2, 3]}},
    "required": ["up", "count"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "look there", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}},
]
HELLO: list[Any] = [{"role": "user", "content": "the first layers run here"}]


@pytest.fixture(scope="module")
def client() -> Iterator[EdgeClient]:
    with connected() as made:
        yield made


@pytest.fixture(scope="module")
def endpoint(client: EdgeClient) -> Iterator[Endpoint]:
    chats = Chats(client, CUT, seats=3)
    with Endpoint(chats, "0") as made:
        yield made
    chats.close()


@pytest.fixture(scope="module")
def api(endpoint: Endpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=endpoint.url, api_key="none", max_retries=0)


def ask(api: openai.OpenAI, messages: list[Any] = HELLO, **more: Any) -> Any:
    return api.chat.completions.create(
        **{"model": NAME, "messages": messages, "max_tokens": 24, "temperature": 0, **more}
    )


def own_text(client: EdgeClient, prompt: str, tokens: int) -> str:
    """What the whole model writes here, greedily."""
    words = Words.of(client.spec)
    ids = torch.tensor([words.encode(prompt)])
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}
    made = client.wrapped.model.generate(**asked)[0, ids.shape[1] :].tolist()  # type: ignore[operator]
    return words.decode([one for one in made if one != words.tokenizer.eos_token_id])


def test_the_text_is_the_models_own(client: EdgeClient, api: openai.OpenAI) -> None:
    answer = ask(api)
    assert answer.choices[0].message.content == own_text(client, "user: the first layers run here\nassistant: ", 24)
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.isthmus["cut"] == CUT and usage.isthmus["texts"][0]["round_trips"] > 0
    plain = api.completions.create(model=NAME, prompt="the first", max_tokens=10, temperature=0)
    assert plain.choices[0].text == own_text(client, "the first", 10)
    assert [one.id for one in api.models.list()] == [NAME] and api.models.retrieve(NAME).id == NAME


def test_a_stream_is_the_same_text_in_pieces(api: openai.OpenAI) -> None:
    whole = ask(api, max_tokens=40)
    pieces = list(ask(api, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    texts = [one.choices[0].delta.content for one in pieces if one.choices and one.choices[0].delta.content]
    assert "".join(texts) == whole.choices[0].message.content and len(texts) > 5
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_next_turn_reads_what_is_new_alone(client: EdgeClient, api: openai.OpenAI) -> None:
    first = ask(api, [{"role": "user", "content": "one more question about layers"}])
    said = first.choices[0].message.content
    chat = [
        {"role": "user", "content": "one more question about layers"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and then?"},
    ]
    second = ask(api, chat)
    lines = f"user: one more question about layers\nassistant: {said}\nuser: and then?\nassistant: "
    assert second.choices[0].message.content == own_text(client, lines, 24)
    # random ids may be cut otherwise when they are read as a text again
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_chats_with_one_beginning_read_it_once(client: EdgeClient, api: openai.OpenAI) -> None:
    system = {"role": "system", "content": "You answer questions about models that are cut in two, shortly and well."}
    answers = [ask(api, [system, {"role": "user", "content": word}]) for word in ("first", "second", "third")]
    for word, answer in zip(("first", "second", "third"), answers, strict=True):
        text = f"system: {system['content']}\nuser: {word}\nassistant: "
        assert answer.choices[0].message.content == own_text(client, text, 24)
    common = len(Words.of(client.spec).encode(f"system: {system['content']}\nuser: "))
    assert all(one.usage.prompt_tokens_details.cached_tokens >= common - 2 for one in answers[1:])


def test_a_schema_is_followed(api: openai.OpenAI) -> None:
    for seed in range(4):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        answer = ask(api, response_format=form, seed=seed, temperature=1.5)
        found = json.loads(answer.choices[0].message.content)
        assert type(found["up"]) is bool and found["count"] in (1, 2, 3) and answer.choices[0].finish_reason == "stop"
    text = ask(api, response_format={"type": "json_object"}, max_tokens=200, temperature=0.5, seed=1)
    assert text.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_of_a_tool_and_its_result(api: openai.OpenAI, choice: Any) -> None:
    answer = ask(api, tools=TOOLS, tool_choice=choice, seed=5, temperature=1.0, max_tokens=60)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert call.function.name in ("look", "wait") and isinstance(json.loads(call.function.arguments), dict)
    chunks = list(ask(api, tools=TOOLS, tool_choice=choice, seed=5, temperature=1.0, max_tokens=60, stream=True))
    (streamed,) = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    assert streamed.function.name == call.function.name
    assert streamed.function.arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "nothing there"}
    assert ask(api, [*HELLO, answer.choices[0].message.model_dump(), result], tools=TOOLS).choices[0].message


def test_langchain_streams_a_chat_with_tools_and_a_schema(endpoint: Endpoint) -> None:
    model = ChatOpenAI(model=NAME, base_url=endpoint.url, api_key="none", temperature=0, max_tokens=60)  # type: ignore[call-arg, arg-type]
    assert (
        "".join(str(one.content) for one in model.stream("the first layers"))
        == model.invoke("the first layers").content
    )
    called = model.bind_tools(TOOLS, tool_choice="look").invoke([HumanMessage("look up")])
    assert called.tool_calls[0]["name"] == "look" and set(called.tool_calls[0]["args"]) == {"up", "count"}
    schema = {"title": "answer", **SCHEMA}
    found = model.with_structured_output(schema, method="json_schema").invoke("is it up?")
    assert set(found) == {"up", "count"}  # type: ignore[arg-type]


def test_a_seed_is_the_requests_own_beside_others(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 16}
    alone = ask(api, **asked).choices[0].message.content
    with ThreadPoolExecutor(6) as threads:
        seeds = [11, 12, 11, 13, 11, 14]
        found = list(threads.map(lambda seed: ask(api, **{**asked, "seed": seed}).choices[0].message.content, seeds))
    assert [text for seed, text in zip(seeds, found, strict=True) if seed == 11] == [alone] * 3
    assert len(set(found)) > 2
    several = ask(api, **asked, n=3)
    assert [one.index for one in several.choices] == [0, 1, 2]
    assert several.choices[0].message.content == alone != several.choices[1].message.content


def test_stops_bias_penalties_and_logprobs(client: EdgeClient, api: openai.OpenAI) -> None:
    whole = ask(api).choices[0].message.content
    stop = whole[8:11]
    stopped = ask(api, stop=["never there", stop])
    assert stopped.choices[0].message.content == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    streamed = [one.choices[0].delta.content or "" for one in ask(api, stop=stop, stream=True)]
    assert "".join(streamed) == whole[: whole.index(stop)]
    token = Words.of(client.spec).encode("layer")[-1]
    biased = ask(api, logit_bias={str(token): 100}, max_tokens=3).choices[0].message.content
    assert biased == Words.of(client.spec).decode([token] * 3)
    punished = ask(api, logit_bias={str(token): 3}, frequency_penalty=2, max_tokens=12).choices[0].message.content
    assert punished != ask(api, logit_bias={str(token): 3}, max_tokens=12).choices[0].message.content
    reported = ask(api, logprobs=True, top_logprobs=2, max_tokens=6).choices[0].logprobs.content
    assert len(reported) == 6 and all(len(one.top_logprobs) == 2 for one in reported)
    assert all(one.logprob == one.top_logprobs[0].logprob <= 0 for one in reported), "the likeliest was taken"


def test_embeddings_are_of_the_last_states(client: EdgeClient, api: openai.OpenAI) -> None:
    answer = api.embeddings.create(model=NAME, input=["the first layers", "here"])
    ids = torch.tensor([Words.of(client.spec).encode("the first layers")])
    with torch.no_grad():
        states = client.wrapped.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states  # type: ignore[operator]
    expected = torch.nn.functional.normalize(states[-1][0].mean(0), dim=0)
    assert torch.allclose(torch.tensor(answer.data[0].embedding), expected, atol=1e-6)
    assert answer.usage.prompt_tokens == ids.shape[1] + len(Words.of(client.spec).encode("here"))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0]"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"top_p": -1}, "top_p"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objct"}}}}, ""),
    ({"messages": [{"role": "user", "content": "long " * 4000}]}, ""),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]}, "messages[0]"),
    ({"tools": TOOLS, "tool_choice": {"function": "look"}}, "tool_choice"),
    ({"logit_bias": {"\u00b2": 1}}, "logit_bias"),
    ({"stream_options": 3}, "stream_options"),
]


@pytest.mark.parametrize(("more", "param"), BAD, ids=str)
@pytest.mark.parametrize("streams", [False, True])
def test_errors_have_the_protocols_form(api: openai.OpenAI, more: dict[str, Any], param: str, streams: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(api, **{"stream": streams, **more})
    body = refused.value.body
    assert isinstance(body, dict) and body["message"] and body["type"] == "invalid_request_error"
    assert (body["param"] or "") == param


def test_other_routes_models_and_bodies(endpoint: Endpoint, api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=NAME):
        ask(api, model="gpt-9")
    with httpx.Client() as web:
        assert web.get(f"{endpoint.url}/nothing").json()["error"]["type"] == "not_found_error"
        for body in (b"", b"[]", b"{", b"[" * 100_000, b"\xff", b'{"model": NaN}'):
            answer = web.post(f"{endpoint.url}/chat/completions", content=body)
            assert answer.status_code in (400, 404) and answer.json()["error"]["message"]
        half = {"model": NAME, "prompt": "half \ud800", "messages": [{"role": "user", "content": "\ud800"}]}
        for route in ("completions", "chat/completions"):
            answer = web.post(f"{endpoint.url}/{route}", content=json.dumps(half).encode())
            assert answer.status_code == 400 and "half a character" in answer.json()["error"]["message"]
        answer = web.post(f"{endpoint.url}/chat/completions", content=b'{"model": "' + b"x" * (9 << 20) + b'"}')
        assert answer.status_code == 413
        assert web.get(f"{endpoint.url.removesuffix('/v1')}/health").json() == {"status": "ok"}


def test_prompts_of_a_text(api: openai.OpenAI) -> None:
    several = api.completions.create(model=NAME, prompt=["the first", "here"], max_tokens=4, temperature=0, n=2)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text != several.choices[2].text
    cold: Any = {"model": NAME, "prompt": "the first", "max_tokens": 4}
    greedy = api.completions.create(**cold, temperature=0).choices[0].text
    assert api.completions.create(**cold, temperature=1e-300).choices[0].text == greedy
    bad: list[Any] = [[], [[]], [1, "x"], [[1], ["x"]], 5, {"a": 1}, [-1], [10**9], ["x"] * 200]
    for prompt in bad:
        with pytest.raises(openai.BadRequestError):
            api.completions.create(model=NAME, prompt=prompt, max_tokens=2)


def test_pages_of_other_sites_and_names_are_refused(endpoint: Endpoint) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        answer = httpx.get(f"{endpoint.url}/models", headers=headers)
        assert answer.status_code == 403, headers
    assert httpx.get(f"{endpoint.url}/models", headers={"Origin": "http://localhost:3000"}).status_code == 200


def test_a_key_and_other_addresses(client: EdgeClient) -> None:
    chats = Chats(client, CUT, seats=1)
    try:
        with pytest.raises(SpecError, match="--key-file"):
            Endpoint(chats, "0.0.0.0:0")
        with Endpoint(chats, "0", key="secret") as made:
            for key, is_right in (("secret", True), ("secre", False), ("none", False)):
                api = openai.OpenAI(base_url=made.url, api_key=key, max_retries=0)
                if is_right:
                    assert ask(api, max_tokens=2)
                else:
                    with pytest.raises(openai.AuthenticationError):
                        ask(api)
    finally:
        chats.close()


def test_an_application_that_goes_frees_its_seat(client: EdgeClient) -> None:
    """Streamed or waited for: a text of hundreds of tokens ends as soon as nobody reads it."""
    chats, tokens = Chats(client, CUT, seats=1), Counter[int]()
    written = chats._written

    def counted(seat: Any, task: Any, most: int, on_token: Callable[[Chosen], bool], wanted: Any) -> Any:
        def heard(chosen: Chosen) -> bool:
            tokens[most] += 1
            return on_token(chosen)

        return written(seat, task, most, heard, wanted)

    chats._written = counted  # type: ignore[method-assign]
    try:
        with Endpoint(chats, "0") as made:
            api = openai.OpenAI(base_url=made.url, api_key="none", max_retries=0)
            for streams, most in ((True, 400), (False, 401)):
                body = {"model": NAME, "messages": HELLO, "max_tokens": most, "logit_bias": {"40": 100}}
                with (
                    httpx.Client() as web,
                    web.stream("POST", f"{made.url}/chat/completions", json={**body, "stream": True})
                    if streams
                    else httpx.Client() as going,
                ):
                    if streams:
                        next(going.iter_lines())  # type: ignore[union-attr]
                    else:
                        with pytest.raises(httpx.ReadTimeout):
                            going.post(f"{made.url}/chat/completions", json=body, timeout=0.3)  # type: ignore[union-attr]
                assert ask(api, max_tokens=2)
                assert 0 < tokens[most] < most, "it was not written to its end"
                eventually(lambda: len(chats._free) == 1)
    finally:
        chats.close()


def test_on_the_command_line(client: EdgeClient, tmp_path: Path) -> None:
    assert client.server is not None
    words = ["serve", "--model", SPEC, "--server", client.server, "--cut", CUT, "--listen", "0", "--seats", "1"]
    process = Started("edge_client", words)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:") and NAME in line
        url = line.split()[2].rstrip(",")
        assert ask(openai.OpenAI(base_url=url, api_key="none"), max_tokens=2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    refused = run([sys.executable, "-m", "edge_client", *words[:-4], "--listen", "0.0.0.0:0", "--insecure"])
    assert refused.returncode == 2 and "--key-file" in refused.stderr


def test_more_than_there_are_seats_wait_their_turn(client: EdgeClient) -> None:
    chats = Chats(client, CUT, seats=1, waiting=2)
    try:
        with Endpoint(chats, "0") as made:
            api = openai.OpenAI(base_url=made.url, api_key="none", max_retries=0)
            found: list[object] = []

            def chat() -> None:
                try:
                    found.append(ask(api, max_tokens=60, logit_bias={"40": 100}).choices[0].message.content)
                except openai.InternalServerError as error:
                    found.append(error.status_code)

            threads = [threading.Thread(target=chat) for _ in range(6)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            texts = [one for one in found if isinstance(one, str)]
            assert len(texts) >= 3 and len(set(texts)) == 1 and set(found) - {texts[0]} <= {503}
    finally:
        chats.close()
