"""Implement OpenAI's protocol (https://platform.openai.com/docs/api-reference): check requests, write answers.

Fields that affect an answer here are read; unknown ones are ignored, as applications send many. Known but unsupported
ones are refused by name.
"""

from __future__ import annotations

import base64
import json
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from edge_client.generation import Words
from edge_client.serving.chats import Chats, WrittenText
from edge_client.serving.sampling import MOST_LOGPROBS, Chosen, Sampling, grammar_of_schema
from shared_hooks.errors import (
    AccessRefused,
    DeadlineExceeded,
    InputMismatch,
    IsthmusError,
    QuotaExceeded,
    ServerUnavailable,
    SpecError,
)

MOST_CHOICES: Final = 16
MOST_TEXTS: Final = 128
"""Maximum prompts times choices."""
MOST_STOPS: Final = 16
CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
"""Delimiters of a call, a JSON object, in many models (Hermes, Qwen, SmolLM2)."""


STATUSES: Final[dict[type[Exception], int]] = {
    InputMismatch: 400,
    SpecError: 400,
    QuotaExceeded: 429,
    AccessRefused: 502,
    ServerUnavailable: 503,
    DeadlineExceeded: 504,
}


class ProtocolError(Exception):
    """An error in the protocol's form. ``param``: the invalid field."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @classmethod
    def of(cls, error: Exception) -> ProtocolError:
        """Convert one of our errors for an application."""
        if isinstance(error, ProtocolError):
            return error
        status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
        code = type(error).__name__ if isinstance(error, IsthmusError) else None
        return cls(str(error) or type(error).__name__, status, code=code)

    def as_dict(self) -> dict[str, Any]:
        """Return the body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Fields:
    """A request's fields, taken by name and type."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise ProtocolError("the body is a JSON object")
        self._body = body

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        found = self._body.get(name)
        if found is None:
            return default
        if isinstance(found, bool) and kind is not bool:
            raise ProtocolError(f"{name}: a truth value, where something else is expected", param=name)
        if not isinstance(found, kind):
            wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise ProtocolError(f"{name}: expected {wanted}, found {type(found).__name__}", param=name)
        return found

    def number(self, name: str, default: Any, least: float, most: float, kind: Any = (int, float)) -> Any:
        found = self.take(name, kind, default)
        if found is not None and not least <= found <= most:
            raise ProtocolError(f"{name}: {found} is not between {least:g} and {most:g}", param=name)
        return found


@dataclass(frozen=True)
class TextRequest:
    """A request for texts, of a chat or of plain prompts. ``tools``: names of tools that may be called. ``only_call``:
    the text is a call only. ``echo``: the answer's text includes the prompt.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    most: int | None
    stops: tuple[str, ...]
    choices: int
    streams: bool
    reports_usage: bool
    is_chat: bool
    tools: tuple[str, ...] = ()
    only_call: bool = False
    several_calls: bool = True
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


def chat_request(body: Any, chats: Chats) -> TextRequest:
    """Parse a body of /v1/chat/completions. Raises `ProtocolError`, and what `Words.chat` raises."""
    fields = _Fields(body)
    messages = _messages(fields.take("messages", list, []))
    tools, forced = _tools(fields)
    grammar = _format_of(fields)
    if forced:
        if grammar:
            raise ProtocolError(
                "a forced tool call has its own form: no response_format beside it", param="response_format"
            )
        grammar = grammar_of_schema({"anyOf": [_call_schema(one) for one in forced]})
    wants = fields.take("logprobs", bool, False)
    most_logprobs = fields.number("top_logprobs", None, 0, MOST_LOGPROBS, int)
    if most_logprobs is not None and not wants:
        raise ProtocolError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    most = fields.number("max_completion_tokens", fields.number("max_tokens", None, 1, 1 << 30, int), 1, 1 << 30, int)
    ids = _chat_ids(chats.words, messages, [] if body.get("tool_choice") == "none" else tools)
    return TextRequest(
        prompts=(tuple(ids),),
        sampling=_sampling(fields, chats, grammar, (most_logprobs or 0) if wants else None),
        most=most,
        is_chat=True,
        tools=tuple(one["name"] for one in tools) if body.get("tool_choice") != "none" else (),
        only_call=bool(forced),
        several_calls=fields.take("parallel_tool_calls", bool, True),
        **_common(fields),
    )


def text_request(body: Any, chats: Chats) -> TextRequest:
    """Parse a body of /v1/completions. Raises `ProtocolError`."""
    fields = _Fields(body)
    if fields.take("echo", bool, False):
        raise ProtocolError("echo: the prompt is not repeated here", param="echo")
    if fields.take("suffix", str):
        raise ProtocolError("suffix: text is continued, not filled in", param="suffix")
    if fields.number("best_of", 1, 1, MOST_CHOICES, int) > fields.number("n", 1, 1, MOST_CHOICES, int):
        raise ProtocolError("best_of: all choices are given back: as many as n", param="best_of")
    logprobs = fields.number("logprobs", None, 0, MOST_LOGPROBS, int)
    return TextRequest(
        prompts=prompts_of(body.get("prompt"), chats.words, "prompt"),
        sampling=_sampling(fields, chats, _format_of(fields), logprobs),
        most=fields.number("max_tokens", 16, 1, 1 << 30, int),
        is_chat=False,
        **_common(fields),
    )


def prompts_of(given: Any, words: Words, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of one or several texts, or ids as given. Raises `ProtocolError`."""
    several = given if isinstance(given, list) and not all(map(_is_id, given)) else [given]
    if len(several) > MOST_TEXTS:
        raise ProtocolError(f"{name}: {len(several)} texts; at most {MOST_TEXTS} are taken", param=name)
    found = []
    for one in several:
        if isinstance(one, str):
            one = words.encode(_whole(one, name))
        elif not (isinstance(one, list) and one and all(map(_is_id, one))):
            raise ProtocolError(f"{name}: expected a text, token ids, or a list of either", param=name)
        found.append(tuple(one))
    return tuple(found)


def _is_id(one: Any) -> bool:
    return type(one) is int and 0 <= one < 1 << 31


def _common(fields: _Fields) -> dict[str, Any]:
    stops = fields.take("stop", (str, list), [])
    stops = [stops] if isinstance(stops, str) else stops
    if len(stops) > MOST_STOPS or not all(isinstance(one, str) and one for one in stops):
        raise ProtocolError(f"stop: a text, or at most {MOST_STOPS} of them", param="stop")
    options = fields.take("stream_options", dict, {})
    return {
        "stops": tuple(stops),
        "choices": fields.number("n", 1, 1, MOST_CHOICES, int),
        "streams": fields.take("stream", bool, False),
        "reports_usage": bool(options.get("include_usage")),
    }


def _sampling(fields: _Fields, chats: Chats, grammar: str, logprobs: int | None) -> Sampling:
    bias = {}
    for token, amount in fields.take("logit_bias", dict, {}).items():
        if (
            not (str(token).isascii() and str(token).isdecimal())
            or type(amount) not in (int, float)
            or not -100 <= amount <= 100
        ):
            raise ProtocolError("logit_bias: token ids, and numbers between -100 and 100", param="logit_bias")
        bias[int(token)] = float(amount)
    return Sampling(
        temperature=float(fields.number("temperature", 1.0, 0, 2)),
        top_k=fields.number("top_k", chats.top_k, -1, 1 << 30, int),
        top_p=float(fields.number("top_p", 1.0, 0, 1)),
        seed=fields.number("seed", None, -(1 << 63), (1 << 63) - 1, int),
        presence_penalty=float(fields.number("presence_penalty", 0.0, -2, 2)),
        frequency_penalty=float(fields.number("frequency_penalty", 0.0, -2, 2)),
        logprobs=logprobs,
        grammar=grammar,
        bias=bias,
    )


def _format_of(fields: _Fields) -> str:
    """Return the grammar of ``response_format``."""
    requested = fields.take("response_format", dict)
    if requested is None or requested.get("type") == "text":
        return ""
    if requested.get("type") == "json_object":
        return grammar_of_schema({"type": "object"})
    if requested.get("type") == "json_schema" and isinstance(requested.get("json_schema"), dict):
        schema = requested["json_schema"].get("schema")
        if isinstance(schema, dict):
            return grammar_of_schema(schema)
    raise ProtocolError(
        'response_format: "text", "json_object", or "json_schema" with a json_schema.schema', param="response_format"
    )


# Messages and tools


def _messages(given: list[Any]) -> list[dict[str, Any]]:
    if not given:
        raise ProtocolError("messages: there is none", param="messages")
    found = []
    for number, one in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(one, dict) or one.get("role") not in ("system", "developer", "user", "assistant", "tool"):
            raise ProtocolError(f"{where}: expected a role of system, developer, user, assistant or tool", param=where)
        message = {**one, "role": "system" if one["role"] == "developer" else one["role"]}
        message["content"] = _content(one.get("content"), where)
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise ProtocolError(f"{where}.tool_calls: expected a list", param=where)
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise ProtocolError(f"{where}.tool_calls: expected functions with arguments", param=where)
            if isinstance(function.get("arguments"), str):  # templates expect objects
                try:
                    call["function"] = {**function, "arguments": json.loads(function["arguments"])}
                except ValueError:
                    raise ProtocolError(f"{where}.tool_calls: arguments are JSON", param=where) from None
        found.append(message)
    return found


def _content(given: Any, where: str) -> str:
    if given is None or isinstance(given, str):
        return _whole(given or "", where)
    parts = []
    for part in given if isinstance(given, list) else [None]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ProtocolError(
                f"{where}.content: expected a text; this model takes no pictures or sounds", param=where
            )
        parts.append(_whole(part["text"], where))
    return "".join(parts)


def _whole(text: str, where: str) -> str:
    """Return the text. Raises `ProtocolError` for one with an unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{where}: half a character ({error.reason})", param=where) from None
    return text


def _tools(fields: _Fields) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the functions, and those of which one must be called."""
    found = []
    for number, one in enumerate(fields.take("tools", list, [])):
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ProtocolError(f"tools[{number}]: expected a function with a name", param="tools")
        found.append(function)
    choice = fields.take("tool_choice", (str, dict), "auto")
    if choice in ("auto", "none"):
        return found, []
    if choice == "required":
        named = found
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        wanted = function.get("name") if isinstance(function, dict) else None
        named = [one for one in found if one["name"] == wanted]
    if not named:
        raise ProtocolError("tool_choice: names no function of tools", param="tool_choice")
    return found, named


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _chat_ids(words: Words, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
    """Return the token ids of a chat, by the tokenizer's template; without one, one line per message."""
    template = str(getattr(words.tokenizer, "chat_template", None) or "")
    if tools and "tools" not in template:
        described = "\n".join(json.dumps(one) for one in tools)
        instructions = (
            f"Functions that may be called:\n{described}\nTo call one, answer with "
            f'{CALL_BEGINS}{{"name": ..., "arguments": {{...}}}}{CALL_ENDS}.'
        )
        messages, tools = [{"role": "system", "content": instructions}, *messages], []
    if template:
        given = [{"type": "function", "function": one} for one in tools] or None
        return words.chat(messages, tools=given)
    lines = [f"{one['role']}: {one['content'] or json.dumps(one.get('tool_calls'))}\n" for one in messages]
    return words.encode("".join([*lines, "assistant: "]))


_CALL = re.compile(rf"{CALL_BEGINS}\s*(.*?)\s*(?:{CALL_ENDS}|$)", re.DOTALL)


def calls_in(text: str, requested: TextRequest) -> tuple[str, list[dict[str, Any]]]:
    """Split a text into the text without tool calls, and the calls in the protocol's form. An invalid call
    stays text.
    """
    if not requested.tools:
        return text, []
    found: list[dict[str, Any]] = []

    def call(written: str) -> bool:
        try:
            parsed = json.loads(written)
        except ValueError:
            return False
        if not isinstance(parsed, dict) or parsed.get("name") not in requested.tools:
            return False
        arguments = parsed.get("arguments", parsed.get("parameters", {}))
        function = {"name": parsed["name"], "arguments": json.dumps(arguments)}
        found.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return True

    if call(text.strip()):
        return "", found
    left = _CALL.sub(lambda match: "" if call(match[1]) else match[0], text)
    most = None if requested.several_calls else 1
    return (left.strip() if found else left), found[:most]


# Answers


def usage_of(prompts: int, texts: Sequence[WrittenText], chats: Chats) -> dict[str, Any]:
    """Return token counts, and under "isthmus" the split's cost, of each text."""
    written = sum(len(one.ids) for one in texts)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": written,
        "total_tokens": prompts + written,
        "prompt_tokens_details": {"cached_tokens": min((one.kept for one in texts), default=0)},
        "isthmus": {
            "server": ",".join(chats.client.chain),
            "cut": ",".join(chats.cuts),
            "texts": [one.summary.as_dict() for one in texts],
        },
    }


def logprobs_of(chosen: Sequence[Chosen], words: Words, requested: TextRequest) -> dict[str, Any] | None:
    """Return the tokens' log probabilities in the form of chats or of plain texts."""
    if requested.sampling.logprobs is None:
        return None

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        text = words.decode([id])
        # JSON has no infinity, the log-probability of an impossible token
        value = -9999.0 if logprob is None or logprob == float("-inf") else logprob
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    tokens = [entry(one.id, one.logprob) for one in chosen]
    likeliest = [[entry(*pair) for pair in one.likeliest] for one in chosen]
    if requested.is_chat:
        both = zip(tokens, likeliest, strict=True)
        return {"content": [{**token, "top_logprobs": top} for token, top in both], "refusal": None}
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token["token"])
    return {
        "tokens": [one["token"] for one in tokens],
        "token_logprobs": [one["logprob"] for one in tokens],
        "top_logprobs": [{one["token"]: one["logprob"] for one in top} for top in likeliest],
        "text_offset": offsets,
    }


def answer(
    requested: TextRequest, model: str, choices: Sequence[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    """Return a whole answer."""
    return {**_head(requested, model, chunk=False), "choices": list(choices), "usage": usage}


def choice(requested: TextRequest, index: int, text: str, written: WrittenText, words: Words) -> dict[str, Any]:
    """Return one text of a whole answer."""
    logprobs = logprobs_of(written.chosen, words, requested)
    if not requested.is_chat:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": written.reason}
    left, calls = calls_in(text, requested)
    message: dict[str, Any] = {"role": "assistant", "content": left if left or not calls else None, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    reason = "tool_calls" if calls else written.reason
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def chunk(
    requested: TextRequest,
    model: str,
    index: int | None,
    text: str | None = None,
    *,
    role: bool = False,
    calls: Sequence[dict[str, Any]] = (),
    reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
    usage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a piece of a streamed answer; ``index`` None: only the usage."""
    made = {**_head(requested, model, chunk=True), "choices": []}
    if requested.reports_usage:
        made["usage"] = usage
    if index is None:
        return made
    if requested.is_chat:
        delta: dict[str, Any] = {"role": "assistant"} if role else {}
        if text is not None:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": number, **one} for number, one in enumerate(calls)]
        found = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    else:
        found = {"index": index, "text": text or "", "logprobs": logprobs, "finish_reason": reason}
    made["choices"] = [found]
    return made


def _head(requested: TextRequest, model: str, *, chunk: bool) -> dict[str, Any]:
    kind = "chat.completion" + (".chunk" if chunk else "") if requested.is_chat else "text_completion"
    prefix = "chatcmpl" if requested.is_chat else "cmpl"
    return {"id": f"{prefix}-{requested.id}", "object": kind, "created": requested.created, "model": model}


def embeddings(model: str, vectors: Sequence[Sequence[float]], tokens: int, form: str | None) -> dict[str, Any]:
    """Return an answer of /v1/embeddings; ``form`` "base64": of little-endian four-byte floats."""
    coded: list[Any] = list(vectors)
    if form == "base64":
        coded = [base64.b64encode(np.asarray(one, "<f4").tobytes()).decode() for one in vectors]
    data = [{"object": "embedding", "index": number, "embedding": one} for number, one in enumerate(coded)]
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


class Pieces:
    """Streams a text: passes on what is certain, up to a stop text, or to where a tool call may begin."""

    def __init__(self, requested: TextRequest) -> None:
        self._stops = requested.stops
        self._holds = (CALL_BEGINS,) if requested.tools else ()
        self._all = requested.only_call
        self.text = ""
        self._given = 0
        self._quiet = requested.only_call
        self.is_stopped = False

    def add(self, text: str) -> str:
        """Return what may be passed on now."""
        if self.is_stopped:
            return ""
        begin = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += text
        found = [at for stop in self._stops if (at := self.text.find(stop, begin)) >= 0]
        if found:
            self.text, self.is_stopped = self.text[: min(found)], True
        return self._next(self.is_stopped)

    def end(self) -> str:
        """Return what was held back and is no call."""
        return self._next(True)

    def _next(self, whole: bool) -> str:
        if self._quiet:
            return ""
        left = self.text[self._given :]
        if self._holds and not self._given and left.lstrip().startswith("{"):
            self._quiet = True  # an object in place of text is a call, or is returned at the end
            return ""
        for mark in self._holds:
            if (at := left.find(mark)) >= 0:
                self._quiet = True
                self._given += at
                return left[:at]
        marks = (*self._stops, *self._holds)
        held = 0 if whole else max((_overlap(left, mark) for mark in marks), default=0)
        given = left[: len(left) - held]
        self._given += len(given)
        return given

    @property
    def withheld(self) -> str:
        """The end of the text that was not passed on."""
        return self.text[self._given :]


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``mark``."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
