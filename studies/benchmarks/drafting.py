"""Tokens a second with drafts and without, over a link of 40 ms a round trip: greedy search of a split decoder, whose
text repeats itself. The link is this process and sleeps.

Weights are random, and those of the layers behind the cut smaller: so the first layers' drafts are accepted now and
then, as a trained model's are. How often that is for a model of yours is another question.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from edge_client.generation.drafting import Drafting, DraftSource, FirstLayers, Lookup, Measured
from shared_hooks.generation import DecodingTail, InProcess, SplitForward, StepReply
from studies.benchmarks.row import Line, Options, Row

LAYERS, WIDTH, HEADS, WORDS = 12, 512, 8, 8000
CUT = "model.layers.3"
ROUND_TRIP_S = 0.040
PROMPT = 5
"""A seed whose text repeats itself: 17 different words in 256."""
TIMES_LESS = 0.5
LATE = 0.1
"""What the layers behind the cut add to the hidden state, of what they would with weights like the others'."""


class Far:
    """A tail in another thread at the end of a long way, which computes one step after the other."""

    begins = True

    def __init__(self, tail: DecodingTail) -> None:
        self._inner = InProcess(tail)
        self._server = ThreadPoolExecutor(1)

    def step(self, *step: Any) -> StepReply:
        """As `Link.step`."""
        return self._sent(self._inner.step, *step).result()

    def begin(self, *step: Any) -> Sent:
        """As `EdgeLink.begin`."""
        return self._sent(lambda: self._inner.begin(*step).result())

    def close(self, session: int) -> None:
        """As `Link.close`."""
        self._server.submit(self._inner.close, session)

    def _sent(self, serve: Callable[..., StepReply], *step: Any) -> Sent:
        arrives = time.perf_counter() + ROUND_TRIP_S / 2

        def served() -> tuple[StepReply, float]:
            time.sleep(max(0.0, arrives - time.perf_counter()))
            return serve(*step), time.perf_counter() + ROUND_TRIP_S / 2

        return Sent(self._server.submit(served))


class Sent:
    """A step under way (`Pending`)."""

    bytes_up = 0

    def __init__(self, answer: Future[tuple[StepReply, float]]) -> None:
        self._answer = answer

    @property
    def is_over(self) -> bool:
        """Whether its answer has come."""
        return self._answer.done() and (self._answer.exception() or self._answer.result()[1] < time.perf_counter())

    def result(self, meanwhile: Callable[[], None] = lambda: None) -> StepReply:
        """Its answer, when that has come."""
        meanwhile()
        reply, comes = self._answer.result()
        time.sleep(max(0.0, comes - time.perf_counter()))
        return reply

    def cancel(self, why: object) -> None:
        """A step that is not begun is none."""
        self._answer.cancel()


def measure(options: Options) -> Row:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each side has a core
    try:
        return _measured(options)
    finally:
        torch.set_num_threads(threads)


def _measured(options: Options) -> Row:
    model, there = _decoder(), _decoder()
    tokens = 80 if options.quick else 256
    prompt = torch.randint(1, WORDS, (1, 64), generator=torch.Generator().manual_seed(PROMPT))
    whole = _generate(model, prompt, tokens)
    tail = DecodingTail(there, CUT)
    lines, details = [], {}
    with SplitForward(model, CUT, Far(tail), answer=("least",)) as split:
        _generate(model, prompt, 8)  # what is learnt once
        plain, found, _ = _timed(split, prompt, tokens, None)
        words = len(set(found[0, prompt.shape[1] :].tolist()))
        details["none"] = {"tokens_per_second": plain, "identical": torch.equal(found, whole), "words": words}
        sources = {"prompt lookup": Lookup(), "first layers": FirstLayers(CUT)}
        for (kind, source), ahead in itertools.product(sources.items(), (False, True)):
            name = f"{kind}, ahead" if ahead else kind
            rate, found, drafting = _timed(split, prompt, tokens, source, ahead)
            same, tally = torch.equal(found, whole), drafting.tally
            share = 0.0 if tally.acceptance is None else tally.acceptance
            details[name] = {
                "tokens_per_second": rate,
                "identical": same,
                "round_trips": tally.steps,
                "drafted": tally.drafted,
                "accepted": tally.accepted,
                "ahead": tally.ahead,
                "ahead_in_vain": tally.ahead_in_vain,
            }
            note = (
                f"{rate:.1f} tokens/s against {plain:.1f}, {rate / plain:.2f} times; {tally.steps} round trips for "
                f"{tokens} tokens, {share:.0%} of drafts accepted; {tally.ahead} steps ahead, {tally.ahead_in_vain} in "
                f"vain; tokens "
                f"{'' if same else 'NOT '}identical; {words} different words"
            )
            limit = TIMES_LESS if isinstance(source, Lookup) else None
            lines.append(Line(f"time of a token, drafts by {name}", plain / rate, "x", limit, note))
    tail.close()
    return Row(tuple(lines), details)


def _timed(
    split: SplitForward, prompt: torch.Tensor, tokens: int, source: DraftSource | None, ahead: bool = False
) -> tuple[float, torch.Tensor, Any]:
    """Tokens a second of the whole of it, the prompt's step included; the tokens; how drafting went."""
    if source is None:
        began = time.perf_counter()
        found = _generate(split.model, prompt, tokens)
        return tokens / (time.perf_counter() - began), found, None
    with Drafting(split.model, source, pace=Measured(), ahead=ahead) as drafting:
        began = time.perf_counter()
        found = _generate(split.model, prompt, tokens)
        return tokens / (time.perf_counter() - began), found, drafting


def _generate(model: nn.Module, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    found: torch.Tensor = model.generate(  # type: ignore[operator]
        prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return found


def _decoder() -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=int(WIDTH * 2.75), num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 4, max_position_embeddings=4096, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers[int(CUT.rpartition(".")[2]) + 1 :]:
            layer.self_attn.o_proj.weight.mul_(LATE)
            layer.mlp.down_proj.weight.mul_(LATE)
    made: nn.Module = model
    return made
