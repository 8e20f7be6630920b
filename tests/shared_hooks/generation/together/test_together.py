"""Decode steps of real architectures, each session with its own cache and length: as alone but for the last bits.

In float64, so that what differs by more than rounding shows.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.generation.together import Lockstep

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

BASE: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 8}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssForCausalLM", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                                      "sliding_window": 8}),
    "gptj": ("GPTJForCausalLM", {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    "falcon": ("FalconForCausalLM", {}),
    "mamba": ("MambaForCausalLM", {"state_size": 8}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4,
                                          "decoder_start_token_id": 0}),
}  # fmt: skip
TOKENS = 20


def build(name: str) -> nn.Module:
    kind, more = KINDS[name]
    config = getattr(transformers, kind).config_class(**{**BASE, **more})
    config._experts_implementation = "eager"  # the others know no float64
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind)(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # as they are drawn, no token stands out
    return model


class Session:
    """Greedy decoding: a batch of sequences with the cache that the model makes for them."""

    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(100 * batch + length)
        prompt = torch.randint(2, 60, (batch, length), generator=generator)
        self.state: dict[str, Any] = {}
        if model.config.is_encoder_decoder:  # type: ignore[union-attr]
            self.state["encoder_outputs"] = model.encoder(prompt)  # type: ignore[operator]
            prompt = prompt[:, : length // 2]
        self.logits = self.call(prompt)

    def call(self, ids: torch.Tensor) -> torch.Tensor:
        name = "decoder_input_ids" if "encoder_outputs" in self.state else "input_ids"
        output = self.model(**{name: ids}, **self.state, use_cache=True)
        for cache in ("past_key_values", "cache_params"):
            if output.get(cache) is not None:
                self.state[cache] = output[cache]
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def step(self) -> torch.Tensor:
        self.logits = self.call(self.tokens)
        return self.logits

    @property
    def tokens(self) -> torch.Tensor:
        return self.logits.argmax(-1, keepdim=True)

    @property
    def stands_out(self) -> torch.Tensor:
        """Whether rounding cannot change the token."""
        best = self.logits.topk(2).values
        return best[:, 0] - best[:, 1] > 1e-6

    def tensors(self) -> list[torch.Tensor]:
        cache = self.state.get("past_key_values") or self.state["cache_params"]
        halves = [getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache")
                  if hasattr(cache, name)] or [cache]  # fmt: skip
        return [value for half in halves for layer in half.layers for value in vars(layer).values()
                if isinstance(value, torch.Tensor)]  # fmt: skip


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", KINDS)
def test_sessions_decode_as_alone(name: str) -> None:
    """Twenty greedy steps of four sessions: the same tokens and logits, and caches that are as they would be."""
    model = build(name)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # Mamba says that it has no fast kernels
        alone = [Session(model, batch, length) for batch, length in ((1, 5), (1, 17), (3, 9), (2, 26))]
        shared = copy.deepcopy([vars(session) for session in alone], {id(model): model})
        sessions = [Session.__new__(Session) for _ in shared]
        for session, kept in zip(sessions, shared, strict=True):
            vars(session).update(kept)
        with Lockstep(model) as together:
            for _ in range(TOKENS):
                outcomes = together.run([session.step for session in sessions])
                for one, outcome in zip(alone, outcomes, strict=True):
                    wanted = one.step()
                    close(outcome.result(), wanted)
                    assert outcome.batch_size == len(sessions)
                    assert one.stands_out.all()
        for one, session in zip(alone, sessions, strict=True):
            assert torch.equal(one.tokens, session.tokens)
            for found, wanted in zip(session.tensors(), one.tensors(), strict=True):
                close(found, wanted)


def test_a_cache_holds_no_other_sessions_memory() -> None:
    """What a session keeps of a step is no part of a batch's memory: it does not keep others' alive, nor reach them."""
    model = build("llama")
    with torch.no_grad(), Lockstep(model) as together:
        caches = [transformers.DynamicCache(config=model.config) for _ in range(3)]
        ids = torch.tensor([[5]])
        together.run([lambda cache=cache: model(input_ids=ids, past_key_values=cache) for cache in caches])
    for cache in caches:
        for layer in cache.layers:
            for value in (layer.keys, layer.values):
                assert value.untyped_storage().nbytes() == value.nbytes


def test_steps_of_different_lengths_meet() -> None:
    """A prompt's chunk, several drafted tokens and one token go through the same modules as one."""
    model = build("llama")
    chunks = [torch.arange(2, 2 + length)[None] for length in (1, 4, 9)]
    with torch.no_grad(), Lockstep(model) as together:
        outcomes = together.run([lambda ids=ids: model(input_ids=ids).logits for ids in chunks])
        for outcome, ids in zip(outcomes, chunks, strict=True):
            close(outcome.result(), model(input_ids=ids).logits)
            assert outcome.batch_size == 3
